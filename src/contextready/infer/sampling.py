"""How the next token is chosen from logits, in float64 and without torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np
import numpy.typing as npt

from contextready.errors import ContextReadyError

Seen = npt.NDArray[np.bool_] | Sequence[int]
"""Tokens that came before: their ids, or a mask over the vocabulary."""


@dataclass(frozen=True)
class Sampling:
    """How to choose: every filter is off by default, so that tokens are drawn from the model's own distribution."""

    temperature: float = 1.0
    """Divides the logits; 0 always takes the most likely token."""
    top_k: int | None = None
    """Keep this many of the most likely tokens, and those as likely as the last of them."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probabilities reach this sum."""
    min_p: float = 0.0
    """Keep tokens at least this probable relative to the most likely one."""
    repetition_penalty: float = 1.0
    """Divides the positive and multiplies the negative logits of tokens that came before (CTRL)."""

    def __post_init__(self) -> None:
        # Each condition is written so that NaN, which compares false to everything, fails it.
        if not (isfinite(self.temperature) and self.temperature >= 0):
            raise ContextReadyError(
                f"A temperature of {self.temperature} is impossible; give 0, for the most likely token, or more."
            )
        if self.top_k is not None and not (hasattr(self.top_k, "__index__") and self.top_k >= 1):
            raise ContextReadyError(f"top_k={self.top_k} leaves nothing to choose from; give 1, 2, 3, … or none.")
        if not 0 < self.top_p <= 1:
            raise ContextReadyError(f"top_p={self.top_p} is no share; give more than 0 and at most 1, which keeps all.")
        if not 0 <= self.min_p <= 1:
            raise ContextReadyError(f"min_p={self.min_p} is no share; give 0, which keeps all, to 1.")
        if not (isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise ContextReadyError(
                f"A repetition penalty of {self.repetition_penalty} is impossible; give a positive number, 1 for none."
            )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0


def rng_for(seed: int, sample: int) -> np.random.Generator:
    """The draws of one sample of a prompt; they do not depend on its row, so a batch gives what a prompt alone does."""
    return np.random.Generator(np.random.PCG64([seed, sample]))


def choose(logits_V: npt.NDArray[Any], sampling: Sampling, rng: np.random.Generator, seen: Seen = ()) -> int:
    """The next token: penalty, temperature, top-k, top-p and min-p in Hugging Face's order, then one draw."""
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
        # The most likely token's is exp(0) = 1 here, so that chances are relative to it already.
        kept = np.flatnonzero(chances >= sampling.min_p)
        ids, chances = ids[kept], chances[kept]
    sums = chances.cumsum()
    return int(ids[sums.searchsorted(rng.random() * sums[-1], side="right")])


def log_probabilities(logits_V: npt.NDArray[Any], token: int, top: int = 0) -> tuple[float, list[tuple[int, float]]]:
    """The log-probability of a token and the `top` likeliest with theirs, as the model gave them: nothing applied."""
    scores_V = _finite(logits_V.astype(np.float64))
    scores_V = scores_V - scores_V.max()
    scores_V = scores_V - np.log(np.exp(scores_V).sum())
    if top == 0:
        return float(scores_V[token]), []
    # Among equals the lower id comes first, as argmax has it.
    ids = np.flatnonzero(scores_V >= np.partition(scores_V, -top)[-top])
    ids = ids[np.argsort(-scores_V[ids], kind="stable")][:top]
    return float(scores_V[token]), [(int(i), float(scores_V[i])) for i in ids]


def _penalised(logits_V: npt.NDArray[Any], penalty: float, seen: Seen) -> npt.NDArray[np.float64]:
    """A float64 copy of the logits in which the tokens that came before are less likely."""
    scores_V = logits_V.astype(np.float64)
    if penalty != 1:
        index = seen if isinstance(seen, np.ndarray) else list(seen)
        old = scores_V[index]
        with np.errstate(over="ignore"):
            scores_V[index] = np.where(old > 0, old / penalty, old * penalty)
    return scores_V


def _nucleus(chances: npt.NDArray[np.float64], share: float) -> npt.NDArray[np.intp]:
    """Places of the smallest set of largest chances that reaches a share of their sum, and holds at least one."""
    whole = chances.sum()
    # The n chances below whole·(1 - share)/n sum to less than whole·(1 - share): the set lies in the others, and only
    # they need sorting.
    likely = np.flatnonzero(chances >= whole * (1 - share) / len(chances))
    order = likely[np.argsort(-chances[likely], kind="stable")]
    return order[: chances[order].cumsum().searchsorted(whole * share) + 1]


def _finite(scores_V: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The same scores, if they are numbers."""
    if not np.isfinite(scores_V).all():
        raise ContextReadyError(
            "The logits are not finite numbers; the model's weights are damaged or its number format is too narrow."
        )
    return scores_V
