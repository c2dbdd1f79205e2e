"""Keys and values in fixed places, written in place: what engines step on and what sweeps attend over.

A `KVCache` is a value that grows; a `KVBuffer` has N slots from the start, so that shapes never change. Position p of
a row lies in slot p mod N: with full attention N is as long as the row may become, with a window the oldest goes.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from contextready.errors import ContextReadyError
from contextready.model.cache import KV, KVCache

NEVER = -(2**62)
"""The position held by a slot that was never written."""
OLDEST = 2**61
"""How far back full attention sees: further than any position, not as far as NEVER."""

Sees = Literal["held", "causal", "all"]
Spans = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, eq=False)
class KVBuffer:
    """N slots of keys and values a row and layer, and the position that each slot holds."""

    layers: tuple[KV, ...]
    """Keys and values of each layer, (B, N, heads, head size), each a tensor of its own: a compiled step that wrote
    into a part of a larger one would copy all of it."""
    held_BN: Tensor
    first_B1: Tensor
    """The first slot of each row when all rows' slots are counted through."""
    window: int | None

    @classmethod
    def empty(
        cls, batch_size: int, slots: int, layers: int, heads: int, head_size: int, window: int | None, like: Tensor
    ) -> "KVBuffer":
        """A buffer that holds nothing, with the dtype and device of `like`."""
        if batch_size < 1 or slots < 1:
            raise ContextReadyError(
                f"A buffer of {batch_size} rows and {slots} slots was asked for; give at least 1 of each."
            )
        # Zeros, not whatever memory held: 0 × NaN is NaN even where the weight of a masked slot is 0.
        shape = (batch_size, slots, heads, head_size)
        kvs = tuple((like.new_zeros(shape), like.new_zeros(shape)) for _ in range(layers))
        held_BN = torch.full((batch_size, slots), NEVER, device=like.device, dtype=torch.int64)
        first_B1 = torch.arange(0, batch_size * slots, slots, device=like.device)[:, None]
        return cls(kvs, held_BN, first_B1, window)

    @property
    def batch_size(self) -> int:
        """Rows."""
        return self.held_BN.shape[0]

    @property
    def slots(self) -> int:
        """N, the positions a row can hold."""
        return self.held_BN.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values."""
        return sum(tensor.nbytes for kv in self.layers for tensor in kv)

    def clear(self, row: int) -> None:
        """Forget what a row holds."""
        self.held_BN[row] = NEVER

    def load(self, row: int, cache: KVCache) -> None:
        """Replace what a row holds by a cache of one row."""
        if cache.batch_size != 1:
            raise ContextReadyError(f"A state of {cache.batch_size} rows was given for one row; select one of them.")
        L, (H, D) = len(self.layers), self.layers[0][0].shape[2:]
        theirs = (len(cache.layers), cache.layers[0][0].shape[1], cache.layers[0][0].shape[3], cache.window)
        if theirs != (L, H, D, self.window):
            raise ContextReadyError(
                "This state is of another model (layers, heads, head size, window: "
                f"{theirs} instead of {(L, H, D, self.window)}); start one with init_state."
            )
        count = min(cache.length, self.slots)
        if count < cache.needed:
            raise ContextReadyError(
                f"This state holds {cache.needed} positions that are needed and there is room for {self.slots}; "
                "make the engine with a larger capacity."
            )
        self.clear(row)
        if count == 0:
            return
        positions_S = torch.arange(cache.position - count, cache.position, device=self.held_BN.device)
        slots_S = positions_S % self.slots
        for kv, theirs_kv in zip(self.layers, cache.layers, strict=True):
            for store_BNHD, new_BHSD in zip(kv, theirs_kv, strict=True):
                store_BNHD[row].index_copy_(0, slots_S, new_BHSD[0, :, -count:].transpose(0, 1))
        self.held_BN[row, slots_S] = positions_S

    def cache(self, row: int, position: int, history: int) -> KVCache:
        """What a row holds after `position` tokens, as a value that shares no memory with the buffer."""
        keep = None if self.window is None else self.window - 1 + history
        # A state that was rolled back before it was loaded holds fewer than it may.
        count = position if keep is None else int((self.held_BN[row] >= max(0, position - keep)).sum())
        slots_S = torch.arange(position - count, position, device=self.held_BN.device) % self.slots
        layers = tuple(
            (k_BNHD[row, slots_S].transpose(0, 1)[None], v_BNHD[row, slots_S].transpose(0, 1)[None])
            for k_BNHD, v_BNHD in self.layers
        )
        return KVCache(layers, position, self.window, keep)

    def at(self, positions_BT: Tensor, sees: Sees = "held", visible: int | None = None, spans: Spans = ()) -> "Places":
        """Places for T tokens a row at these positions.

        `sees` says how attention is masked: by the positions the slots hold; `causal` for a whole sequence from
        position 0; `all` for one token that may see every visible slot. `visible` limits it to the first slots, and
        `spans` limits some tokens to fewer: from, to, and as many slots.
        """
        index = (positions_BT % self.slots + self.first_B1).flatten()
        return Places(self, positions_BT, index, sees, self.slots if visible is None else visible, spans)


@dataclass(frozen=True, eq=False)
class Places:
    """A buffer, and where in it the tokens of one call belong: what blocks take in the place of a cache."""

    buffer: KVBuffer
    positions_BT: Tensor
    index: Tensor
    """The slots of all tokens, when all rows' slots are counted through."""
    sees: Sees
    visible: int
    spans: Spans

    def mark(self) -> None:
        """Say which positions the slots hold from now on."""
        self.buffer.held_BN.view(-1).index_copy_(0, self.index, self.positions_BT.flatten())

    def mask_B1TN(self) -> Tensor:
        """Who sees whom: a token sees what lies at or before its own position, and within the window."""
        held_B1N, at_BT1 = self.buffer.held_BN[:, None, : self.visible], self.positions_BT[:, :, None]
        oldest_BT1 = at_BT1 - (self.buffer.window or OLDEST) + 1
        return ((held_B1N <= at_BT1) & (held_B1N >= oldest_BT1))[:, None]

    def join(self, layer: int, k_BHTD: Tensor, v_BHTD: Tensor) -> KV:
        """Put a layer's new keys and values in their places; return all visible ones."""
        joined = []
        for store_BNHD, new_BHTD in zip(self.buffer.layers[layer], (k_BHTD, v_BHTD), strict=True):
            store_BNHD.flatten(0, 1).index_copy_(0, self.index, new_BHTD.transpose(1, 2).flatten(0, 1))
            joined.append(store_BNHD[:, : self.visible].transpose(1, 2))
        return joined[0], joined[1]
