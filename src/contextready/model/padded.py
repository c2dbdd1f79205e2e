"""The caches of several rows as one, so that a backbone with its own kind of attention can step them together."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from contextready.model.attention import KV
from contextready.model.cache import KVCache


@dataclass(frozen=True, eq=False)
class PaddedCache:
    """Keys and values of rows at different positions, padded on the left so that the newest tokens are aligned.

    A backbone may be given one if its attribute `steps_rows_together` is true: it then computes for every row what it
    would compute for that row alone. This is an immutable value, for caches that keep all positions.
    """

    layers: tuple[KV, ...]
    """Keys and values of each layer, (B, heads, S, head size), where S is the largest position."""
    positions_B: tuple[int, ...]

    @classmethod
    def of(cls, caches: Sequence[KVCache]) -> "PaddedCache":
        """Join caches that have one row each."""
        longest = max(cache.length for cache in caches)

        def padded(tensor_1HSE: Tensor) -> Tensor:
            return F.pad(tensor_1HSE, (0, 0, longest - tensor_1HSE.shape[2], 0))

        layers = zip(*(cache.layers for cache in caches), strict=True)
        return cls(
            tuple((torch.cat([padded(k) for k, _ in kvs]), torch.cat([padded(v) for _, v in kvs])) for kvs in layers),
            tuple(cache.position for cache in caches),
        )

    @property
    def positions_B1(self) -> Tensor:
        """The position of every row's next token."""
        return torch.tensor(self.positions_B, device=self.layers[0][0].device)[:, None]

    @property
    def mask_BS(self) -> Tensor:
        """1 for the positions that a row's next token attends to, including its own, and 0 for padding."""
        S = self.layers[0][0].shape[2] + 1
        return (torch.arange(S, device=self.layers[0][0].device) >= S - 1 - self.positions_B1).long()

    def advanced(self, layers: list[KV]) -> "PaddedCache":
        """Return the cache after one more token in every row; `layers` holds old and new keys and values, joined."""
        return replace(self, layers=tuple(layers), positions_B=tuple(position + 1 for position in self.positions_B))

    def row(self, index: int) -> KVCache:
        """Copy one row, without padding."""
        position = self.positions_B[index]

        def kept(tensor_BHSE: Tensor) -> Tensor:
            # Not [-position:], which is everything if the position is 0.
            return tensor_BHSE[index : index + 1, :, tensor_BHSE.shape[2] - position :].clone()

        return KVCache(tuple((kept(k), kept(v)) for k, v in self.layers), position, window=None, keep=None)
