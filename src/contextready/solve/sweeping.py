"""Solves a prompt's fixed point with Gauss-Seidel sweeps over segments, all segments in parallel. Needs only Python.

T tokens are split into S segments of length L. One plain pass gives every position keys, values and a first z. In a
sweep, step j = 0 … L-1 processes the j-th token of every segment as one batch, with the newest z before it and the
newest keys and values of all earlier positions. Within a segment this equals the stream; only the inputs from earlier
segments are one sweep old. So after m sweeps the first m segments are exact whatever the contraction, and after S
sweeps the whole prompt is.
"""

from dataclasses import dataclass
from math import ceil, inf, isfinite, log
from typing import Protocol

from contextready.solve.reading import early_should_end, estimated_error

HOPEFUL = 0.7
"""The first rate says little, because the first change is from the plain pass; below this, a third sweep is made."""


class Sweepable(Protocol):
    """Tokens that are being solved, and their current solution."""

    @property
    def tokens(self) -> int:
        """T, the number of tokens."""

    def plain_pass(self) -> None:
        """Process all positions at once, without a correction."""

    def sweep(self, exact: int, segment: int) -> float:
        """Sweep over all segments that are not exact yet; return the largest change of z, relative to its norm."""

    def read_from(self, first: int) -> None:
        """Read the tokens from `first` on one at a time; those before it must be exact."""

    def reset(self) -> None:
        """Forget everything that has been computed."""


@dataclass(frozen=True)
class Sweeps:
    """The outcome of solving a chunk by sweeps."""

    changes: tuple[float, ...]
    """The largest change of any position's z in each sweep, relative to its norm; without early sweeps."""
    runs: tuple[tuple[int, int], ...]
    """The ranges of tokens that were processed with a correction, as (first, end)."""
    exact: bool
    alone_from: int | None
    """The first token that was read one at a time, if sweeping did not pay off."""
    early: int = 0
    """How many of the sweeps came first, in lower precision, as did the plain pass then."""


def solve_by_sweeps(
    chunk: Sweepable, tolerance: float, segment: int, free_tokens: float, early: Sweepable | None = None
) -> Sweeps:
    """Sweep until the estimated error is within the tolerance, or until reading one token at a time is cheaper.

    `free_tokens` describes the hardware: a step of r tokens takes time in proportion to 1 + r / free_tokens. `early` is
    the same chunk in lower precision, for all sweeps until the next one will probably be the last.
    """
    T = chunk.tokens
    segments = ceil(T / segment)
    (early or chunk).plain_pass()
    changes: list[float] = []
    before = [] if early is None else _sweep_early(early, tolerance, segment, free_tokens)
    runs = [(done * segment, T) for done in range(len(before))]
    if before and not isfinite(before[-1]):
        chunk.reset()
    for swept in range(1, segments + 1):
        changes.append(chunk.sweep(swept - 1, segment))
        runs.append(((swept - 1) * segment, T))
        if swept == segments and isfinite(changes[-1]):
            return Sweeps(tuple(changes), tuple(runs), True, None, len(before))
        if estimated_error(changes) <= tolerance:
            return Sweeps(tuple(changes), tuple(runs), False, None, len(before))
        if sweeps_left(changes, tolerance, segments - swept) > break_even_sweeps(segments - swept, free_tokens):
            break
    alone_from = swept * segment
    if not isfinite(changes[-1]):
        # Nothing from the sweeps can be kept.
        alone_from = 0
        chunk.reset()
    chunk.read_from(alone_from)
    runs.append((alone_from, T))
    return Sweeps(tuple(changes), tuple(runs), True, alone_from, len(before))


def _sweep_early(early: Sweepable, tolerance: float, segment: int, free_tokens: float) -> list[float]:
    """Sweep in lower precision until exact sweeps should follow; returns the changes."""
    segments = ceil(early.tokens / segment)
    changes: list[float] = []
    while len(changes) < segments and not early_should_end(changes, tolerance):
        changes.append(early.sweep(len(changes), segment))
        left = segments - len(changes)
        if sweeps_left(changes, tolerance, left) > break_even_sweeps(left, free_tokens):
            break
    return changes


def sweeps_left(changes: list[float], tolerance: float, segments_left: int) -> float:
    """Estimate how many more sweeps are needed, at the rate of the last two and at most one per segment."""
    if not isfinite(changes[-1]):
        return inf
    if len(changes) < 2:
        return 1
    rate = changes[-1] / changes[-2]
    if rate >= 1.0 or tolerance == 0.0:
        return segments_left
    if len(changes) == 2 and rate < HOPEFUL:
        return 1
    return min(segments_left, ceil(log(tolerance / changes[-1]) / log(rate)))


def break_even_sweeps(segments_left: int, free_tokens: float) -> float:
    """Return how many sweeps over this many segments take as long as reading their tokens one at a time."""
    return segments_left * (1.0 + 1.0 / free_tokens) / (1.0 + segments_left / free_tokens)
