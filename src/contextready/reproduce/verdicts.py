"""The rule that turns measurements into a verdict on a claim. `RULE` states it in words, for the ledger."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev

REPRODUCED = "reproduced"
IN_SIGN = "reproduced in sign"
NOT_SEEN = "not seen at this scale"
CONTRADICTED = "contradicted"
NOT_TESTABLE = "not testable here"
FROM_BEST = (REPRODUCED, IN_SIGN, NOT_SEEN, CONTRADICTED)
ENOUGH = 3
"""Seeds from which on the spread can be estimated."""
FACTOR = 2.0
"""Two effects are of the same size if neither is more than this many times as large as the other."""

RULE = f"""\
- An **effect** is a difference in percent that the paper states or implies. It is *seen* if it has the same sign with
  every seed and its mean is more than two standard errors from zero. If it is seen in the paper's direction, the
  verdict is "{REPRODUCED}" if its mean is between half and twice the paper's difference (also in percent), and
  "{IN_SIGN}" otherwise, or if the paper prints no figure. If it is not seen, or is seen in the other
  direction, the verdict is "{NOT_SEEN}", because the paper speaks of larger models and longer
  training.
- A **match** (for example "as good as two more layers") is "{REPRODUCED}" if the mean is at most a margin worse,
  which is printed, and "{NOT_SEEN}" otherwise.
- A **range** (for example of contraction rates) is "{REPRODUCED}" if the mean is inside, "{IN_SIGN}" if it
  is only on the side that the claim is about, and "{NOT_SEEN}" otherwise.
- A **limit** or an **identity** (for example that streaming equals the fixed point) does not depend on the scale. It is
  "{REPRODUCED}" if every value keeps it, and "{CONTRADICTED}" otherwise.
- A claim with several parts has the worst verdict of its parts. Parts that have not been measured do not count, nor do
  the controls that the paper lacks, which have verdicts of their own.
- With fewer than {ENOUGH} seeds there is no spread: the direction of the mean alone decides. Such a verdict is marked
  with °, and so is one with parts that have not been measured.
- "{NOT_TESTABLE}" means that it needs other hardware or sizes, or that nothing has been run for it."""


@dataclass(frozen=True)
class Verdict:
    """A verdict, and whether it rests on fewer than three seeds or lacks a part."""

    word: str
    preliminary: bool = False

    def __str__(self) -> str:
        return f"{self.word}°" if self.preliminary else self.word


def is_seen(values: Sequence[float]) -> bool:
    """Whether an effect has one sign with every seed and is more than two standard errors from zero.

    Fewer than three seeds have no spread that could be trusted, so only the sign counts.
    """
    if not values or min(values) <= 0.0 <= max(values):
        return False
    return len(values) < ENOUGH or abs(fmean(values)) > 2.0 * stdev(values) / sqrt(len(values))


def of_effect(values: Sequence[float], expected: float, *, sized: bool = True) -> Verdict:
    """Judge differences in percent against the paper's; `sized` if the paper prints a figure to compare with."""
    if not values:
        return Verdict(NOT_TESTABLE)
    few, mean = len(values) < ENOUGH, fmean(values)
    if not is_seen(values) or (mean > 0.0) != (expected > 0.0):
        return Verdict(NOT_SEEN, few)
    ratio = mean / expected
    return Verdict(REPRODUCED if sized and 1.0 / FACTOR <= ratio <= FACTOR else IN_SIGN, few)


def of_range(values: Sequence[float], low: float, high: float, below: float | None, above: float | None) -> Verdict:
    """Judge values against a range of the paper, and against the bound that the claim is about."""
    if not values:
        return Verdict(NOT_TESTABLE)
    few, mean = len(values) < ENOUGH, fmean(values)
    if low <= mean <= high:
        return Verdict(REPRODUCED, few)
    if (below is not None and mean < below) or (above is not None and mean > above):
        return Verdict(IN_SIGN, few)
    return Verdict(NOT_SEEN, few)


def of_match(values: Sequence[float], most: float) -> Verdict:
    """Judge differences in percent that should not be larger than a margin."""
    if not values:
        return Verdict(NOT_TESTABLE)
    return Verdict(REPRODUCED if fmean(values) <= most else NOT_SEEN, len(values) < ENOUGH)


def of_limit(values: Sequence[float], limit: float) -> Verdict:
    """Judge values that must not exceed a limit in size."""
    if not values:
        return Verdict(NOT_TESTABLE)
    return Verdict(REPRODUCED if max(map(abs, values)) <= limit else CONTRADICTED, len(values) < ENOUGH)


def of_identity(pairs: Sequence[tuple[str, str]]) -> Verdict:
    """Judge figures that must be the same; they are computed, so that seeds do not matter."""
    return Verdict(REPRODUCED if all(ours == theirs for ours, theirs in pairs) else CONTRADICTED)


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict on a claim with several parts."""
    judged = [one for one in verdicts if one.word != NOT_TESTABLE]
    if not judged:
        return Verdict(NOT_TESTABLE)
    word = max((one.word for one in judged), key=FROM_BEST.index)
    return Verdict(word, any(one.preliminary for one in judged) or len(judged) < len(verdicts))
