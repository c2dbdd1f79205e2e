"""Scores on state tracking: the fraction of right answers after each symbol, and the longest length solved."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contextready.data.shards import IGNORED
from contextready.model.context_ready import ContextReady
from contextready.state.task import StateBatch, StateTask

SOLVED = 0.99
"""A length is solved if at least this fraction of the answers is right there, and at all shorter lengths."""
AROUND = 4
"""The accuracy at a length is that of the last quarter of the symbols up to it."""
TOKENS = 16_384
"""Tokens per batch."""


@dataclass(frozen=True)
class StateScore:
    """For every number of symbols: the answers asked for, the right ones, and their negative log-likelihood."""

    asked_N: np.ndarray
    right_N: np.ndarray
    nll_N: np.ndarray

    @property
    def loss(self) -> float:
        """Nats per answer."""
        return float(self.nll_N.sum() / max(1.0, self.asked_N.sum()))

    def accuracy(self, length: int) -> float:
        """The fraction of right answers in the last quarter of the symbols up to this length."""
        last = slice(length - max(1, length // AROUND), length)
        asked = self.asked_N[last].sum()
        return float(self.right_N[last].sum() / asked) if asked else 1.0

    @property
    def curve(self) -> list[float]:
        """The accuracy at every length."""
        return [self.accuracy(n) for n in range(1, len(self.asked_N) + 1)]

    @property
    def solved(self) -> int:
        """The longest length solved."""
        return solved_length(self.curve)

    @classmethod
    def joined(cls, parts: "Sequence[StateScore]") -> "StateScore":
        """Add up the scores of several parts."""
        return cls(*(sum(getattr(part, name) for part in parts) for name in ("asked_N", "right_N", "nll_N")))


def solved_length(curve: Sequence[float]) -> int:
    """The longest length up to which the accuracy is always high enough, given the accuracy at every length."""
    return next((n for n, accuracy in enumerate(curve) if accuracy < SOLVED), len(curve))


class Reader(Protocol):
    """A model that reads sequences: a context-ready model, or a control with the same functions."""

    @property
    def backbone(self) -> Any:
        """The part with the functions `embed` and `head`."""

    def init_state(self, batch_size: int) -> Any:
        """Return the state before the first token."""

    def read(self, e_BTC: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Return the outputs of the next tokens, given their embeddings, and the state after them."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the weights."""


def score_stream(model: Reader, task: StateTask, batch: StateBatch) -> StateScore:
    """Score sequences that the model reads token by token."""

    def read(e_BTC: Tensor) -> Iterator[Tensor]:
        yield model.read(e_BTC, model.init_state(len(e_BTC)))[0]

    (score,) = _scores(model, task, batch, read)
    return score


def score_passes(
    model: ContextReady, task: StateTask, batch: StateBatch, passes: Sequence[int]
) -> dict[int, StateScore]:
    """Score sequences after each of the given numbers of parallel passes, all in one unroll."""
    wanted = sorted(set(passes))

    def read(e_BTC: Tensor) -> Iterator[Tensor]:
        for k, done in enumerate(islice(model.passes(e_BTC), wanted[-1]), start=1):
            if k in wanted:
                yield done.z_BTC

    return dict(zip(wanted, _scores(model, task, batch, read), strict=True))


@torch.inference_mode()
def _scores(
    model: Reader, task: StateTask, batch: StateBatch, read: Callable[[Tensor], Iterator[Tensor]]
) -> list[StateScore]:
    """Score every output that `read` yields."""
    backbone, device = model.backbone, next(model.parameters()).device
    P, T = task.words_per_symbol, batch.inputs_BT.shape[1]
    ends_N = torch.arange(P, T, P)
    sums: dict[int, Tensor] = {}
    rows = max(1, TOKENS // T)
    for inputs_BT, targets_BT in zip(
        *(torch.split(part, rows) for part in (batch.inputs_BT, batch.targets_BT)), strict=True
    ):
        targets_BN = targets_BT[:, ends_N]
        asked_BN = targets_BN != IGNORED
        for which, z_BTC in enumerate(read(backbone.embed(inputs_BT.to(device)))):
            logits_BNV = backbone.head(z_BTC[:, ends_N.to(device)]).cpu().float()
            right_BN = (logits_BNV.argmax(dim=-1) == targets_BN) & asked_BN
            nll_BN = F.cross_entropy(
                logits_BNV.flatten(0, 1), targets_BN.flatten(), ignore_index=IGNORED, reduction="none"
            ).view_as(right_BN)
            mine = sums.setdefault(which, torch.zeros(3, len(ends_N), dtype=torch.float64))
            for index, values_BN in enumerate((asked_BN, right_BN, nll_BN)):
                mine[index] += values_BN.double().sum(dim=0)
    return [StateScore(*mine.numpy()) for mine in sums.values()]


def best_score(task: StateTask, batch: StateBatch, reached: int) -> StateScore:
    """The best possible score of a function that sees at most `reached` positions back; its loss is unknown."""
    P, T = task.words_per_symbol, batch.inputs_BT.shape[1]
    asked, right = [], []
    for end in range(P, T, P):
        asked_B = batch.targets_BT[:, end] != IGNORED
        seen_B = end - batch.since_BT[asked_B, end] <= reached
        # A symbol of which any token is in sight counts as seen.
        chance = task.guess(max(0, (end - reached - 1) // P))
        asked.append(len(seen_B))
        right.append(float(torch.where(seen_B, 1.0, chance).sum()))
    return StateScore(np.array(asked, float), np.array(right), np.full(len(asked), np.nan))
