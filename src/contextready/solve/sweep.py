"""Solves a prompt's fixed point with Gauss-Seidel sweeps over segments, all segments in parallel.

T tokens are split into S segments of length L. One plain pass gives every position keys, values and a first z. In a
sweep, step j = 0 … L-1 processes the j-th token of every segment as one batch, with the newest z before it and the
newest keys and values of all earlier positions. Within a segment this equals the stream; only the inputs from earlier
segments are one sweep old. So after m sweeps the first m segments are exact whatever the contraction, and after S
sweeps the whole prompt is.
"""

from dataclasses import dataclass
from itertools import pairwise
from math import ceil, inf, isfinite, log

import torch
from torch import Tensor

from contextready.model.buffer import KVBuffer, Places
from contextready.model.context_ready import ContextReady, Pass
from contextready.solve.norms import largest_change
from contextready.solve.reading import estimated_error

PARTS = 2
"""A wide step computes attention in this many parts; more parts skip more keys, but make the products too narrow."""
HOPEFUL = 0.7
"""The first rate says little, because the first change is from the plain pass; below this, a third sweep is made."""


class Chunk:
    """The tokens being solved, with all rows at the same position, and their current solution.

    Keys and values are written to the caller's buffer, which holds the earlier positions and has space for these.
    """

    def __init__(self, model: ContextReady, e_BTC: Tensor, buffer: KVBuffer, position: int, before_B1C: Tensor) -> None:
        self.model, self.e_BTC, self.buffer, self.position, self.before_B1C = model, e_BTC, buffer, position, before_B1C
        B, T, _ = e_BTC.shape
        self.z_BTC, self.carried_BTC = torch.zeros_like(e_BTC), torch.zeros_like(e_BTC)
        self.positions_BT = position + torch.arange(T, device=e_BTC.device).expand(B, T)
        self.in_order = position + T <= buffer.capacity
        """Whether every position p is in slot p, so that later slots can be ignored."""

    def all_places(self) -> Places:
        """Return the places of all tokens in the chunk."""
        end = self.position + self.e_BTC.shape[1]
        visible = end if self.in_order else None
        return self.buffer.at(self.positions_BT, "held" if self.position else "causal", visible)

    def plain_pass(self) -> None:
        """Process all positions at once, without a correction."""
        self._take(slice(None), self.model.recur(self.e_BTC, None, self.all_places()))

    def sweep(self, exact: int, segment: int) -> float:
        """Sweep over all segments that are not exact yet; return the largest change of z, relative to its norm."""
        before_BTC = self.z_BTC.clone()
        for j in range(segment):
            self.step(exact * segment + j, segment)
        return largest_change(before_BTC, self.z_BTC)

    def step(self, first: int, stride: int) -> None:
        """Process tokens first, first + stride, … as one batch, each with the newest z before it."""
        T, chosen = self.e_BTC.shape[1], slice(first, None, stride)
        if first >= T:
            return
        before_BSC = self.carried_BTC[:, first - 1 : T - 1 : stride] if first else self._shifted(stride)
        self._take(chosen, self.model.recur(self.e_BTC[:, chosen], before_BSC, self._places(first, stride)))

    def read_from(self, first: int) -> None:
        """Read the tokens from `first` on one at a time; those before it must be exact."""
        T = self.e_BTC.shape[1]
        for t in range(first, T):
            self.step(t, T)

    def _shifted(self, stride: int) -> Tensor:
        """Return the vectors carried over to tokens 0, stride, 2 stride, …"""
        return torch.cat((self.before_B1C, self.carried_BTC[:, stride - 1 : -1 : stride]), dim=1)

    def _places(self, first: int, stride: int) -> Places:
        positions_BS = self.positions_BT[:, first::stride]
        S = positions_BS.shape[1]
        if not self.in_order:
            return self.buffer.at(positions_BS)
        ends = [self.position + first + (last - 1) * stride + 1 for last in range(S + 1)]
        if S == 1 and self.buffer.window is None:
            return self.buffer.at(positions_BS, "all", ends[-1])
        # Early segments see few keys, so computing attention in parts skips many keys that would be masked.
        cuts = sorted({S * part // PARTS for part in range(PARTS + 1)})
        spans = tuple((low, high, ends[high]) for low, high in pairwise(cuts))
        return self.buffer.at(positions_BS, "held", ends[-1], spans)

    def _take(self, chosen: slice, result: Pass) -> None:
        self.z_BTC[:, chosen] = result.z_BTC
        self.carried_BTC[:, chosen] = result.carried_BTC


@dataclass(frozen=True)
class Sweeps:
    """The outcome of solving a chunk by sweeps."""

    changes: tuple[float, ...]
    """The largest change of any position's z in each sweep, relative to its norm."""
    runs: tuple[tuple[int, int], ...]
    """The ranges of tokens that were processed with a correction, as (first, end)."""
    exact: bool
    alone_from: int | None
    """The first token that was read one at a time, if sweeping did not pay off."""


def solve_by_sweeps(chunk: Chunk, tolerance: float, segment: int, free_tokens: float) -> Sweeps:
    """Sweep until the estimated error is within the tolerance, or until reading one token at a time is cheaper.

    `free_tokens` describes the hardware: a step of r tokens takes time in proportion to 1 + r / free_tokens.
    """
    T = chunk.e_BTC.shape[1]
    segments = ceil(T / segment)
    changes: list[float] = []
    runs: list[tuple[int, int]] = []
    chunk.plain_pass()
    for swept in range(1, segments + 1):
        changes.append(chunk.sweep(swept - 1, segment))
        runs.append(((swept - 1) * segment, T))
        if swept == segments and isfinite(changes[-1]):
            return Sweeps(tuple(changes), tuple(runs), True, None)
        if estimated_error(changes) <= tolerance:
            return Sweeps(tuple(changes), tuple(runs), False, None)
        if sweeps_left(changes, tolerance, segments - swept) > break_even_sweeps(segments - swept, free_tokens):
            break
    alone_from = swept * segment
    if not isfinite(changes[-1]):
        # Nothing from the sweeps can be kept, because 0 × NaN is NaN even behind a mask.
        alone_from = 0
        chunk.z_BTC.zero_()
        chunk.carried_BTC.zero_()
        chunk.buffer.erase(range(chunk.position, chunk.position + T))
    chunk.read_from(alone_from)
    runs.append((alone_from, T))
    return Sweeps(tuple(changes), tuple(runs), True, alone_from)


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
