"""Perplexity over whole windows: after K parallel passes, and sequentially, as the model streams."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import exp, log

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from contextready.data.batches import Windows
from contextready.model.context_ready import ContextReady
from contextready.model.transformer import Transformer

PARALLEL_TOKENS = 1 << 14
"""Tokens in a batch of parallel passes."""
SEQUENTIAL_ROWS = 512
"""Windows that stream side by side: a step is a product with as many rows, so the weights are read seldom."""
SEQUENTIAL_BYTES = 1 << 30
"""… or fewer, where their states would take more than this."""
LOGITS_AT_ONCE = 1 << 25


@dataclass(frozen=True)
class Score:
    """Negative log-likelihood of each window, in nats per token."""

    nll_W: np.ndarray

    @property
    def loss(self) -> float:
        """The mean over all tokens."""
        return float(self.nll_W.mean())

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return exp(self.loss)

    @property
    def loss_error(self) -> float:
        """Standard error of the loss, windows taken as independent draws."""
        return standard_error(self.nll_W)

    @property
    def perplexity_error(self) -> float:
        """Standard error of the perplexity."""
        return self.perplexity * self.loss_error

    @classmethod
    def interleaved(cls, shares: "Sequence[Score]") -> "Score":
        """All windows in their order, from n shares that each scored every n-th."""
        nll_W = np.empty(sum(len(share.nll_W) for share in shares))
        for i, share in enumerate(shares):
            nll_W[i :: len(shares)] = share.nll_W
        return cls(nll_W)

    def bits_per_byte(self, bytes_per_token: float) -> tuple[float, float]:
        """Bits to code a byte of text, and the standard error of that."""
        scale = log(2.0) * bytes_per_token
        return self.loss / scale, self.loss_error / scale

    def perplexity_above(self, other: "Score") -> tuple[float, float]:
        """How much higher this perplexity is than another on the same windows, and the standard error of that."""
        # Both vary together from window to window, so the error is that of the paired difference.
        paired_W = self.perplexity * self.nll_W - other.perplexity * other.nll_W
        return self.perplexity - other.perplexity, standard_error(paired_W)


def standard_error(values: np.ndarray) -> float:
    """Of the mean; not a number for a single value."""
    return float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else float("nan")


@torch.inference_mode()
def parallel_scores(
    model: Transformer | ContextReady,
    windows: Windows,
    passes: Sequence[int],
    count: int | None = None,
    advance: Callable[[int], None] = lambda _: None,
    share: tuple[int, int] = (0, 1),
) -> dict[int, Score]:
    """Score the first `count` windows (default: all) after each of these K; a transformer has only K = 1.

    With `share` = (i, n), only the windows i, i + n, i + 2n, …
    """
    found: dict[int, list[Tensor]] = {k: [] for k in passes}
    rows = max(1, PARALLEL_TOKENS // windows.block_size)
    for inputs_BT, targets_BT in _batches(model, windows, count, rows, share):
        if isinstance(model, ContextReady):
            unroll = model.passes(model.backbone.embed(inputs_BT))
            for k, made in enumerate(islice(unroll, max(passes)), 1):
                if k in found:
                    found[k].append(window_nll(model, made.z_BTC, targets_BT))
        else:
            z_BTC, _ = model.blocks(model.embed(inputs_BT))
            found[1].append(window_nll(model, z_BTC, targets_BT))
        advance(inputs_BT.numel())
    return {k: Score(_joined(nll)) for k, nll in found.items()}


@torch.inference_mode()
def sequential_score(
    model: ContextReady,
    windows: Windows,
    count: int | None = None,
    advance: Callable[[int], None] = lambda _: None,
    share: tuple[int, int] = (0, 1),
) -> Score:
    """Score the first `count` windows as streaming computes them: one token after the other, many windows at once."""
    found = []
    one_row = _state_bytes(model, windows.block_size)
    rows = max(1, min(SEQUENTIAL_ROWS, SEQUENTIAL_BYTES // one_row))
    for inputs_BT, targets_BT in _batches(model, windows, count, rows, share):
        z_BTC, _ = model.read(model.backbone.embed(inputs_BT), model.init_state(len(inputs_BT)))
        found.append(window_nll(model, z_BTC, targets_BT))
        advance(inputs_BT.numel())
    return Score(_joined(found))


def window_nll(model: Transformer | ContextReady, z_BTC: Tensor, targets_BT: Tensor) -> Tensor:
    """Mean negative log-likelihood of each row (B,), float64 on the CPU; logits are made a few rows at a time."""
    backbone = model.backbone if isinstance(model, ContextReady) else model
    rows = max(1, LOGITS_AT_ONCE // (z_BTC.shape[1] * backbone.head(z_BTC[:1, :1]).shape[-1]))
    means = []
    for z, targets in zip(torch.split(z_BTC, rows), torch.split(targets_BT, rows), strict=True):
        logits = backbone.head(z).flatten(0, 1)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        nll = F.cross_entropy(wide, targets.flatten(), reduction="none")
        means.append(nll.view(targets.shape).cpu().double().mean(dim=1))
    return torch.cat(means)


def _state_bytes(model: ContextReady, tokens: int) -> int:
    """What a row's state holds after this many tokens, if nothing is forgotten: what it holds after one, so often."""
    token_11 = torch.zeros(1, 1, dtype=torch.long, device=next(model.parameters()).device)
    _, state = model.read(model.backbone.embed(token_11), model.init_state(1))
    return tokens * state.nbytes


def _batches(
    model: Transformer | ContextReady, windows: Windows, count: int | None, rows: int, share: tuple[int, int]
) -> Iterator[tuple[Tensor, Tensor]]:
    device = next(model.parameters()).device
    numbers = np.arange(share[0], windows.count if count is None else min(count, windows.count), share[1])
    for first in range(0, len(numbers), rows):
        inputs_BT, targets_BT = windows.read(numbers[first : first + rows])
        yield inputs_BT.to(device), targets_BT.to(device)


def _joined(nll: list[Tensor]) -> np.ndarray:
    joined: np.ndarray = torch.cat(nll).numpy() if nll else np.empty(0)
    return joined
