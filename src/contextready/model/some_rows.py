"""One token in each of some rows of a buffer: one pass through the blocks, in which every row attends to its own slots.

The products with weights see all these tokens at once. Attention runs once for each run of neighbouring rows, whose
slots lie next to each other in memory, so nothing is copied.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from contextready.model.attention import KV, Attend
from contextready.model.buffer import AtPlaces, Places
from contextready.model.config import TransformerConfig


def runs_of(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Split ascending rows into runs of neighbours, as (first, end)."""
    starts = [i for i in range(len(rows)) if i == 0 or rows[i] != rows[i - 1] + 1]
    return [(rows[i], rows[j - 1] + 1) for i, j in zip(starts, [*starts[1:], len(rows)], strict=True)]


@dataclass(frozen=True, eq=False)
class SomeRows:
    """The places of some rows' tokens; the blocks accept this instead of a cache."""

    runs: tuple[Places, ...]
    """The places in each run of neighbouring rows, in the order of the tokens."""

    def attend(self, config: TransformerConfig, x_BTC: Tensor) -> "AtSomeRows":
        """Return the attention for the tokens at these places."""
        return AtSomeRows(config, x_BTC, self)


class AtSomeRows(Attend):
    """Attention of every run of rows over its own part of the buffer."""

    def __init__(self, config: TransformerConfig, x_BTC: Tensor, places: SomeRows) -> None:
        self.places, self.sizes = places, [len(run.positions_BT) for run in places.runs]
        self.set_positions(config, torch.cat([run.positions_BT for run in places.runs]), x_BTC.dtype)
        parts_BTC = torch.split(x_BTC, self.sizes)
        self.parts = [_AtRun(config, part, run) for part, run in zip(parts_BTC, places.runs, strict=True)]
        self.joined: list[KV] = []

    def join(self, layer: int, k_BHTE: Tensor, v_BHTE: Tensor) -> KV:
        """Write a layer's new keys and values to their slots; the attention that follows sees all visible ones."""
        news = zip(self.parts, torch.split(k_BHTE, self.sizes), torch.split(v_BHTE, self.sizes), strict=True)
        self.joined = [part.join(layer, k, v) for part, k, v in news]
        return k_BHTE, v_BHTE

    def __call__(self, q_BHTE: Tensor, k_BHSE: Tensor, v_BHSE: Tensor, dropout: float = 0.0) -> Tensor:
        """Compute the attention output of every query over the slots of its own row."""
        queries = zip(self.parts, torch.split(q_BHTE, self.sizes), self.joined, strict=True)
        return torch.cat([part(q, k, v, dropout) for part, q, (k, v) in queries])

    def after(self) -> SomeRows:
        """Return the places, whose buffer now holds the new keys and values."""
        return self.places


class _AtRun(AtPlaces):
    """The attention of one run of rows."""

    def set_positions(self, config: TransformerConfig, positions: Tensor, dtype: torch.dtype) -> None:
        """Do nothing, because the angles of all runs are computed together."""
