"""Solves a prompt's fixed point with Gauss-Seidel sweeps over segments, all segments in parallel: the steps in torch.

`solve/sweeping.py` has the algorithm.
"""

import copy
from itertools import pairwise

import torch
from torch import Tensor

from contextready.model.buffer import KVBuffer, Places
from contextready.model.context_ready import ContextReady, Pass
from contextready.solve.norms import largest_change

PARTS = 2
"""A wide step computes attention in this many parts; more parts skip more keys, but make the products too narrow."""


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

    @property
    def tokens(self) -> int:
        """T, the number of tokens."""
        return self.e_BTC.shape[1]

    def solved_by(self, model: ContextReady) -> "Chunk":
        """Return the same tokens for another model, which works on the same solution in the same buffer."""
        other = copy.copy(self)
        other.model = model
        return other

    def reset(self) -> None:
        """Forget what has been computed; nothing that overflowed may be left, because 0 × NaN is NaN even masked."""
        self.z_BTC.zero_()
        self.carried_BTC.zero_()
        self.buffer.erase(range(self.position, self.position + self.tokens))

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
