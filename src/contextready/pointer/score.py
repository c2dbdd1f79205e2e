"""Scores on pointer chasing: the fraction of right answers at each level, streamed or after K parallel passes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from contextready.model.context_ready import ContextReady
from contextready.pointer.task import PointerBatch, PointerTask

SOLVED = 0.99
"""A level is solved when at least this fraction of its answers is right."""
ROWS = 500
"""Sequences per batch."""


def levels_solved(accuracy: Sequence[float]) -> int:
    """Count the levels that are solved, given the accuracy of each."""
    return sum(part >= SOLVED for part in accuracy)


@dataclass(frozen=True)
class LevelScore:
    """For every level: the number of queries, the number of right answers, and their negative log-likelihood."""

    asked_L: np.ndarray
    right_L: np.ndarray
    nll_L: np.ndarray

    @property
    def accuracy(self) -> list[float]:
        """The fraction of right answers at each level."""
        return [float(part) for part in self.right_L / self.asked_L]

    @property
    def solved(self) -> int:
        """The number of levels solved."""
        return levels_solved(self.accuracy)

    @property
    def loss(self) -> float:
        """Nats per answer."""
        return float(self.nll_L.sum() / self.asked_L.sum())

    @classmethod
    def joined(cls, parts: "Sequence[LevelScore]") -> "LevelScore":
        """Add up the scores of several parts."""
        return cls(*(sum(getattr(part, name) for part in parts) for name in ("asked_L", "right_L", "nll_L")))


def score_levels(model: ContextReady, task: PointerTask, batch: PointerBatch) -> LevelScore:
    """Score sequences that the model reads token by token."""

    def read(e_BTC: Tensor) -> Iterator[Tensor]:
        yield model.read(e_BTC, model.init_state(len(e_BTC)))[0]

    (score,) = _scores(model, task, batch, read)
    return score


def score_passes(
    model: ContextReady, task: PointerTask, batch: PointerBatch, passes: Sequence[int]
) -> dict[int, LevelScore]:
    """Score sequences after each of the given numbers of parallel passes, all in one unroll."""
    wanted = sorted(set(passes))

    def read(e_BTC: Tensor) -> Iterator[Tensor]:
        for k, done in enumerate(islice(model.passes(e_BTC), wanted[-1]), start=1):
            if k in wanted:
                yield done.z_BTC

    return dict(zip(wanted, _scores(model, task, batch, read), strict=True))


@torch.inference_mode()
def _scores(
    model: ContextReady,
    task: PointerTask,
    batch: PointerBatch,
    read: Callable[[Tensor], Iterator[Tensor]],
) -> list[LevelScore]:
    """Score every output that `read` yields."""
    backbone = model.backbone
    device = next(model.parameters()).device
    asks_T = batch.levels_T >= 0
    levels_Q = batch.levels_T[asks_T]
    sums: dict[int, Tensor] = {}
    for inputs_BT, targets_BT in zip(
        *(torch.split(part, ROWS) for part in (batch.inputs_BT, batch.targets_BT)), strict=True
    ):
        targets_BQ = targets_BT[:, asks_T]
        for which, z_BTC in enumerate(read(backbone.embed(inputs_BT.to(device)))):
            logits_BQV = backbone.head(z_BTC[:, asks_T.to(device)]).cpu().double()
            right_BQ = (logits_BQV.argmax(dim=-1) == targets_BQ).double()
            nll_BQ = F.cross_entropy(logits_BQV.flatten(0, 1), targets_BQ.flatten(), reduction="none").view_as(right_BQ)
            mine = sums.setdefault(which, torch.zeros(3, task.levels, dtype=torch.float64))
            for index, values_BQ in enumerate((torch.ones_like(right_BQ), right_BQ, nll_BQ)):
                mine[index].index_add_(0, levels_Q, values_BQ.sum(dim=0))
    return [LevelScore(*mine.numpy()) for mine in sums.values()]


def best_accuracy(task: PointerTask, reached: int) -> list[float]:
    """Compute the best possible accuracy at each level for a function that sees at most `reached` positions back.

    This does not hold for visible answers, with which a query need not reach the base table. A query at level 0 asks
    for its own entry of the base table. The chain of a later query ends at every entry equally often. If that entry's
    value is out of sight, the function can only guess one of the V values, because they are drawn independently.
    """
    if task.answers == "visible":
        raise ValueError("best_accuracy does not hold for visible answers: a query need not reach the base table.")
    levels_T = task.batch("train", 0, 0, 1).levels_T.numpy()
    value_positions_M = 3 * np.arange(task.keys)
    best = []
    for level in range(task.levels):
        asked_Q = np.flatnonzero(levels_T == level)
        by_entry = asked_Q.reshape(-1, task.keys) if level == 0 else asked_Q[:, None]
        seen = by_entry - value_positions_M <= reached
        best.append(float(np.where(seen, 1.0, 1.0 / task.values).mean()))
    return best
