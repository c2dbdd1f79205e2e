"""The fixed point of a prompt by Gauss-Seidel sweeps over segments, all segments at once.

T tokens are split into S segments of L. One plain pass gives every position keys, values and a first z. In a sweep,
step j = 0 … L-1 takes the j-th token of every segment as one batch, with the newest z before it and the newest keys and
values of all earlier positions. Within a segment that is the stream itself; only what comes from earlier segments is
one sweep old. So after m sweeps the first m segments are exact whatever the contraction, and S sweeps are the stream.
"""

from dataclasses import dataclass
from itertools import pairwise
from math import ceil, inf, isfinite, log

import torch
from torch import Tensor

from contextready.model.buffer import KVBuffer, Places
from contextready.model.cache import KVCache
from contextready.model.context_ready import ContextReady, Pass
from contextready.model.state import State
from contextready.solve.report import estimated_error

PARTS = 2
"""In how many parts a wide step attends; more leave out more, but their products are too narrow to pay."""
HOPEFUL = 0.7
"""The first change is from the plain pass, so the rate of the second says little: below this, a third sweep is made."""


@dataclass(frozen=True, eq=False)
class Solution:
    """Block outputs of a chunk, the state after it, and how it was found."""

    z_BTC: Tensor
    state: State
    changes: tuple[float, ...]
    """The largest change of z by each sweep, relative to the largest ‖z‖."""
    runs: tuple[tuple[int, int], ...]
    """Which tokens of the chunk went through the blocks with a correction, run by run: from, to."""
    exact: bool
    alone_from: int | None
    """The token from which on tokens were read one by one, if sweeping did not pay."""


class Chunk:
    """The tokens being solved and everything known of them so far, one row a prompt."""

    def __init__(self, model: ContextReady, e_BTC: Tensor, state: State) -> None:
        self.model, self.e_BTC, self.state = model, e_BTC, state
        B, T, _ = e_BTC.shape
        self.z_BTC, self.carried_BTC = torch.zeros_like(e_BTC), torch.zeros_like(e_BTC)
        self.buffer = room(model, state, T)
        self.positions_BT = state.position + torch.arange(T, device=e_BTC.device).expand(B, T)
        self.from_zero = self.buffer.slots == state.position + T

    def plain_pass(self) -> None:
        """Every position at once, without a correction."""
        places = self.buffer.at(self.positions_BT, "held" if self.state.position else "causal")
        self._take(slice(None), self.model.recur(self.e_BTC, None, places))

    def sweep(self, exact: int, segment: int) -> float:
        """One sweep over all segments that are not exact yet; the largest change of z, relative to the largest ‖z‖."""
        before_BTC = self.z_BTC.clone()
        for j in range(segment):
            self.step(exact * segment + j, segment)
        return largest_norm(self.z_BTC - before_BTC) / (largest_norm(self.z_BTC) or 1.0)

    def step(self, first: int, stride: int) -> None:
        """Tokens first, first + stride, … as one batch, each with the newest z before it."""
        T, chosen = self.e_BTC.shape[1], slice(first, None, stride)
        if first >= T:
            return
        before_BSC = self.carried_BTC[:, first - 1 : T - 1 : stride] if first else self._shifted(stride)
        self._take(chosen, self.model.recur(self.e_BTC[:, chosen], before_BSC, self._places(first, stride)))

    def read_from(self, first: int) -> None:
        """The rest one by one, after tokens that are exact."""
        T = self.e_BTC.shape[1]
        for t in range(first, T):
            self.step(t, T)

    def solved(self) -> State:
        """The state after the chunk."""
        after = self.state.position + self.e_BTC.shape[1]
        rows = [self.buffer.cache(row, after, self.state.history) for row in range(self.e_BTC.shape[0])]
        return self.state.advanced(self.carried_BTC, KVCache.stacked(rows))

    def _shifted(self, stride: int) -> Tensor:
        """What lies before tokens 0, stride, 2 stride, …"""
        return torch.cat((self.state.z_prev_B1C, self.carried_BTC[:, stride - 1 : -1 : stride]), dim=1)

    def _places(self, first: int, stride: int) -> Places:
        positions_BS = self.positions_BT[:, first::stride]
        S, before = positions_BS.shape[1], self.state.position
        if not self.from_zero:
            return self.buffer.at(positions_BS)
        ends = [before + first + (last - 1) * stride + 1 for last in range(S + 1)]
        if S == 1 and self.buffer.window is None:
            return self.buffer.at(positions_BS, "all", ends[-1])
        # Early segments see few keys, so attention in parts leaves out some of what a mask would throw away.
        cuts = sorted({S * part // PARTS for part in range(PARTS + 1)})
        spans = tuple((low, high, ends[high]) for low, high in pairwise(cuts))
        return self.buffer.at(positions_BS, "held", ends[-1], spans)

    def _take(self, chosen: slice, result: Pass) -> None:
        self.z_BTC[:, chosen] = result.z_BTC
        self.carried_BTC[:, chosen] = result.carried_BTC


def solve_by_sweeps(
    model: ContextReady, e_BTC: Tensor, state: State, tolerance: float, segment: int, free_rows: float
) -> Solution:
    """Sweep until the error left is within the tolerance, or until reading the rest one by one is cheaper.

    `free_rows` is the hardware's part in that choice: a step of r tokens takes time in proportion to 1 + r / free_rows.
    """
    T, chunk = e_BTC.shape[1], Chunk(model, e_BTC, state)
    segments = ceil(T / segment)
    changes: list[float] = []
    runs: list[tuple[int, int]] = []
    chunk.plain_pass()
    for swept in range(1, segments + 1):
        changes.append(chunk.sweep(swept - 1, segment))
        runs.append(((swept - 1) * segment, T))
        if swept == segments and isfinite(changes[-1]):
            return Solution(chunk.z_BTC, chunk.solved(), tuple(changes), tuple(runs), True, None)
        if estimated_error(changes) <= tolerance:
            return Solution(chunk.z_BTC, chunk.solved(), tuple(changes), tuple(runs), False, None)
        if sweeps_left(changes, tolerance, segments - swept) > as_many_as_alone(segments - swept, free_rows):
            break
    alone_from = swept * segment
    if not isfinite(changes[-1]):
        # 0 × NaN is NaN even behind a mask, so nothing of the sweeps can be kept.
        chunk, alone_from = Chunk(model, e_BTC, state), 0
    chunk.read_from(alone_from)
    runs.append((alone_from, T))
    return Solution(chunk.z_BTC, chunk.solved(), tuple(changes), tuple(runs), True, alone_from)


def sweeps_left(changes: list[float], tolerance: float, segments_left: int) -> float:
    """How many more sweeps it seems to take: at the rate of the last two, and no more than there are segments."""
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


def as_many_as_alone(segments_left: int, free_rows: float) -> float:
    """The sweeps over so many segments that take the time of reading their tokens one by one."""
    return segments_left * (1.0 + 1.0 / free_rows) / (1.0 + segments_left / free_rows)


def largest_norm(z_BTC: Tensor) -> float:
    """The largest ‖z‖ of any position."""
    return float(torch.linalg.vector_norm(z_BTC, dim=-1).max())


def room(model: ContextReady, state: State, tokens: int) -> KVBuffer:
    """A buffer that holds what the state has read, with room for more tokens."""
    cache = state.cache
    assert isinstance(cache, KVCache)
    buffer: KVBuffer = model.backbone.init_buffer(state.batch_size, cache.length + tokens)  # type: ignore[attr-defined]
    for row in range(state.batch_size):
        buffer.load(row, cache.select(torch.tensor([row], device=buffer.held_BN.device)))
    return buffer
