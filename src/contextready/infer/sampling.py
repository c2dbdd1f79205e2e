"""Sampling: choose the next token from logits, in float64 and without torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np
import numpy.typing as npt

from contextready.errors import ContextReadyError

Seen = npt.NDArray[np.bool_] | Sequence[int]
"""Earlier tokens, as ids or as a mask over the vocabulary."""


@dataclass(frozen=True)
class Sampling:
    """How to choose a token. Every filter is off by default, so tokens are drawn from the model's distribution."""

    temperature: float = 1.0
    """Divides the logits; 0 always takes the most likely token."""
    top_k: int | None = None
    """Keep this many of the most likely tokens, and any that tie with the last of them."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probabilities reach this sum."""
    min_p: float = 0.0
    """Keep tokens at least this probable relative to the most likely one."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of earlier tokens (CTRL)."""

    def __post_init__(self) -> None:
        # Each condition is written so that NaN, which compares false to everything, fails.
        if not (isfinite(self.temperature) and self.temperature >= 0):
            raise ContextReadyError(
                f"temperature must be 0 (the most likely token) or greater, but got {self.temperature}."
            )
        if self.top_k is not None and not (hasattr(self.top_k, "__index__") and self.top_k >= 1):
            raise ContextReadyError(f"top_k must be an integer of at least 1, or None, but got {self.top_k}.")
        if not 0 < self.top_p <= 1:
            raise ContextReadyError(f"top_p must be greater than 0 and at most 1, but got {self.top_p}.")
        if not 0 <= self.min_p <= 1:
            raise ContextReadyError(f"min_p must be between 0 and 1, but got {self.min_p}.")
        if not (isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise ContextReadyError(
                f"repetition_penalty must be greater than 0 (1 turns it off), but got {self.repetition_penalty}."
            )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.temperature == 0


def rng_for(seed: int, sample: int) -> np.random.Generator:
    """Random numbers for one sample of a prompt; they do not depend on its row, so batching does not change them."""
    return np.random.Generator(np.random.PCG64([seed, sample]))


def choose(logits_V: npt.NDArray[Any], sampling: Sampling, rng: np.random.Generator, seen: Seen = ()) -> int:
    """Choose the next token: penalty, temperature, top-k, top-p and min-p in Hugging Face's order, then one draw."""
    scores_V = _finite(_penalised(logits_V, sampling.repetition_penalty, seen))
    if sampling.greedy:
        return int(scores_V.argmax())
    # The largest is subtracted first: a tiny temperature then sends the others to -inf and leaves the largest at 0.
    with np.errstate(over="ignore"):
        scores_V = (scores_V - scores_V.max()) / sampling.temperature
    ids = np.arange(len(scores_V))
    if sampling.top_k is not None and sampling.top_k < len(ids):
        ids = np.flatnonzero(scores_V >= np.partition(scores_V, -sampling.top_k)[-sampling.top_k])
    chances = np.exp(scores_V[ids])
    if sampling.top_p < 1:
        kept = _nucleus(chances, sampling.top_p)
        ids, chances = ids[kept], chances[kept]
    if sampling.min_p > 0:
        # The most likely token has exp(0) = 1 here, so chances are already relative to it.
        kept = np.flatnonzero(chances >= sampling.min_p)
        ids, chances = ids[kept], chances[kept]
    sums = chances.cumsum()
    return int(ids[sums.searchsorted(rng.random() * sums[-1], side="right")])


def log_probabilities(logits_V: npt.NDArray[Any], token: int, top: int = 0) -> tuple[float, list[tuple[int, float]]]:
    """The log-probability of a token and the `top` most likely tokens with theirs, from the raw logits."""
    scores_V = _finite(logits_V.astype(np.float64))
    scores_V = scores_V - scores_V.max()
    scores_V = scores_V - np.log(np.exp(scores_V).sum())
    if top == 0:
        return float(scores_V[token]), []
    # Ties are broken by the lower id, as argmax does.
    ids = np.flatnonzero(scores_V >= np.partition(scores_V, -top)[-top])
    ids = ids[np.argsort(-scores_V[ids], kind="stable")][:top]
    return float(scores_V[token]), [(int(i), float(scores_V[i])) for i in ids]


def _penalised(logits_V: npt.NDArray[Any], penalty: float, seen: Seen) -> npt.NDArray[np.float64]:
    """A float64 copy of the logits in which earlier tokens are less likely."""
    scores_V = logits_V.astype(np.float64)
    if penalty != 1:
        index = seen if isinstance(seen, np.ndarray) else list(seen)
        old = scores_V[index]
        with np.errstate(over="ignore"):
            scores_V[index] = np.where(old > 0, old / penalty, old * penalty)
    return scores_V


def _nucleus(chances: npt.NDArray[np.float64], p: float) -> npt.NDArray[np.intp]:
    """Indices of the smallest set of largest chances that reaches a fraction p of their sum; never empty."""
    whole = chances.sum()
    # The n chances below whole·(1 - p)/n sum to less than whole·(1 - p), so the set lies in the others, and only they
    # need sorting.
    likely = np.flatnonzero(chances >= whole * (1 - p) / len(chances))
    order = likely[np.argsort(-chances[likely], kind="stable")]
    return order[: chances[order].cumsum().searchsorted(whole * p) + 1]


def _finite(scores_V: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the scores unchanged, or refuse them if any is not finite."""
    if not np.isfinite(scores_V).all():
        raise ContextReadyError(
            "The logits are not finite; the model's weights are damaged, or its number format is too narrow."
        )
    return scores_V
