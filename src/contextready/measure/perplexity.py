"""Perplexity over whole sequences, after K parallel passes or sequentially, as the model streams."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import exp, log

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from contextready.data.batches import Sequences
from contextready.data.shards import IGNORED
from contextready.model.context_ready import ContextReady

PARALLEL_TOKENS = 1 << 14
"""Tokens per batch in parallel passes."""
SEQUENTIAL_ROWS = 512
"""The most sequences to stream at the same time. With many rows per step, the weights are read less often."""
SEQUENTIAL_BYTES = 1 << 30
"""The most memory for the states of these sequences."""
LOGITS_AT_ONCE = 1 << 25


@dataclass(frozen=True)
class Score:
    """The negative log-likelihood of each sequence, in nats per token."""

    nll_N: np.ndarray
    """The mean over the tokens of each sequence that count."""
    counts_N: np.ndarray | None = None
    """How many tokens of each sequence count, if not all of them do."""

    @property
    def shares_N(self) -> np.ndarray:
        """Each sequence's part of the loss, times the number of sequences, so that the mean over all is the loss."""
        if self.counts_N is None:
            return self.nll_N
        shares: np.ndarray = self.nll_N * self.counts_N * (len(self.counts_N) / max(1, self.counts_N.sum()))
        return shares

    @property
    def loss(self) -> float:
        """The mean over all tokens that count."""
        return float(self.shares_N.mean())

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return exp(self.loss)

    @property
    def loss_error(self) -> float:
        """The standard error of the loss, with sequences as independent samples."""
        return standard_error(self.shares_N)

    @property
    def perplexity_error(self) -> float:
        """The standard error of the perplexity."""
        return self.perplexity * self.loss_error

    @classmethod
    def interleaved(cls, shares: "Sequence[Score]") -> "Score":
        """Combine n scores, each of every n-th sequence, in the order of the sequences."""
        nll_N = _interleaved([share.nll_N for share in shares])
        counts = [share.counts_N for share in shares if share.counts_N is not None]
        return cls(nll_N, _interleaved(counts) if counts else None)

    def bits_per_byte(self, bytes_per_token: float) -> tuple[float, float]:
        """Return the bits per byte of text and their standard error."""
        scale = log(2.0) * bytes_per_token
        return self.loss / scale, self.loss_error / scale

    def perplexity_above(self, other: "Score") -> tuple[float, float]:
        """Return this perplexity minus another on the same sequences, and the standard error of the difference."""
        # Both scores vary together from sequence to sequence, so the paired difference gives the error.
        paired_N = self.perplexity * self.shares_N - other.perplexity * other.shares_N
        return self.perplexity - other.perplexity, standard_error(paired_N)


def _interleaved(parts: Sequence[np.ndarray]) -> np.ndarray:
    joined = np.empty(sum(len(part) for part in parts))
    for i, part in enumerate(parts):
        joined[i :: len(parts)] = part
    return joined


def standard_error(values: np.ndarray) -> float:
    """Return the standard error of the mean; NaN for a single value."""
    return float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else float("nan")


@torch.inference_mode()
def parallel_scores(
    model: ContextReady,
    sequences: Sequences,
    passes: Sequence[int],
    count: int | None = None,
    advance: Callable[[int], None] = lambda _: None,
    share: tuple[int, int] = (0, 1),
) -> dict[int, Score]:
    """Score the first `count` sequences (default: all) after each K in `passes`; a transformer has only K = 1.

    With `share` = (i, n), only sequences i, i + n, i + 2n, … are scored.
    """
    nll: dict[int, list[Tensor]] = {k: [] for k in passes}
    counts: list[Tensor] = []
    rows = max(1, PARALLEL_TOKENS // sequences.block_size)
    for inputs_BT, targets_BT in _batches(model, sequences, count, rows, share):
        counts.append(_counts(targets_BT))
        unroll = model.passes(model.embed(inputs_BT))
        for k, made in enumerate(islice(unroll, max(passes)), 1):
            if k in nll:
                nll[k].append(mean_nll(model, made.z_BTC, targets_BT))
        advance(inputs_BT.numel())
    return {k: _score(sequences, parts, counts) for k, parts in nll.items()}


@torch.inference_mode()
def sequential_score(
    model: ContextReady,
    sequences: Sequences,
    count: int | None = None,
    advance: Callable[[int], None] = lambda _: None,
    share: tuple[int, int] = (0, 1),
) -> Score:
    """Score the first `count` sequences as the model streams: token by token, with many sequences at once."""
    nll: list[Tensor] = []
    counts: list[Tensor] = []
    one_row = _state_bytes(model, sequences.block_size)
    rows = max(1, min(SEQUENTIAL_ROWS, SEQUENTIAL_BYTES // one_row))
    for inputs_BT, targets_BT in _batches(model, sequences, count, rows, share):
        counts.append(_counts(targets_BT))
        z_BTC, _ = model.read(model.embed(inputs_BT), model.init_state(len(inputs_BT)))
        nll.append(mean_nll(model, z_BTC, targets_BT))
        advance(inputs_BT.numel())
    return _score(sequences, nll, counts)


def _counts(targets_BT: Tensor) -> Tensor:
    """Return how many targets of each row count."""
    return (targets_BT != IGNORED).sum(dim=1).cpu()


def _score(sequences: Sequences, nll: list[Tensor], counts: list[Tensor]) -> Score:
    masked = sequences.tokens.counted is not None
    return Score(_joined(nll), _joined(counts).astype(np.float64) if masked else None)


def mean_nll(model: ContextReady, z_BTC: Tensor, targets_BT: Tensor) -> Tensor:
    """Return the mean negative log-likelihood of each row (B,) as float64 on the CPU, a few rows at a time.

    Only targets that count are included. A row without any has 0.
    """
    backbone = model.backbone
    rows = max(1, LOGITS_AT_ONCE // (z_BTC.shape[1] * backbone.head(z_BTC[:1, :1]).shape[-1]))
    means = []
    for z, targets in zip(torch.split(z_BTC, rows), torch.split(targets_BT, rows), strict=True):
        logits = backbone.head(z).flatten(0, 1)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        nll = F.cross_entropy(wide, targets.flatten(), reduction="none").view(targets.shape).cpu().double()
        means.append(nll.sum(dim=1) / _counts(targets).clamp(min=1))
    return torch.cat(means)


def _state_bytes(model: ContextReady, tokens: int) -> int:
    """Return an upper bound on a row's state after this many tokens: that many times its state after one token."""
    token_11 = torch.zeros(1, 1, dtype=torch.long, device=next(model.parameters()).device)
    _, state = model.read(model.embed(token_11), model.init_state(1))
    return tokens * state.nbytes


def _batches(
    model: ContextReady, sequences: Sequences, count: int | None, rows: int, share: tuple[int, int]
) -> Iterator[tuple[Tensor, Tensor]]:
    device = next(model.parameters()).device
    numbers = np.arange(share[0], sequences.count if count is None else min(count, sequences.count), share[1])
    for first in range(0, len(numbers), rows):
        inputs_BT, targets_BT = sequences.read(numbers[first : first + rows])
        yield inputs_BT.to(device), targets_BT.to(device)


def _joined(nll: list[Tensor]) -> np.ndarray:
    joined: np.ndarray = torch.cat(nll).numpy() if nll else np.empty(0)
    return joined
