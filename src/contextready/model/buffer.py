"""Keys and values in fixed places, written in place: what engines step on and what sweeps attend over.

A `KVCache` is a value that grows; a `KVBuffer` has N slots from the start, so that shapes never change. Position p of
a row lies in slot p mod N: with full attention N is as long as the row may become, with a window the oldest goes.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from contextready.errors import ContextReadyError
from contextready.model.attention import KV, Attend
from contextready.model.cache import KVCache
from contextready.model.checks import check_shape
from contextready.model.config import TransformerConfig

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
        cls,
        batch_size: int,
        capacity: int,
        layers: int,
        heads: int,
        head_size: int,
        *,
        window: int | None,
        like: Tensor,
    ) -> "KVBuffer":
        """A buffer that holds nothing, with the dtype and device of `like`."""
        if batch_size < 1 or capacity < 1:
            raise ContextReadyError(
                f"A buffer of {batch_size} rows and capacity {capacity} was asked for; give at least 1 of each."
            )
        # Zeros, not whatever memory held: 0 × NaN is NaN even where the weight of a masked slot is 0.
        shape = (batch_size, capacity, heads, head_size)
        kvs = tuple((like.new_zeros(shape), like.new_zeros(shape)) for _ in range(layers))
        held_BN = torch.full((batch_size, capacity), NEVER, device=like.device, dtype=torch.int64)
        return cls(kvs, held_BN, _first_slots(held_BN), window)

    @property
    def batch_size(self) -> int:
        """Rows."""
        return self.held_BN.shape[0]

    @property
    def capacity(self) -> int:
        """N, the positions a row can hold."""
        return self.held_BN.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values."""
        return sum(tensor.nbytes for kv in self.layers for tensor in kv)

    def row(self, row: int) -> "KVBuffer":
        """One row as a buffer of its own, in the same memory."""
        held_1N = self.held_BN[row : row + 1]
        layers = tuple((k_BNHE[row : row + 1], v_BNHE[row : row + 1]) for k_BNHE, v_BNHE in self.layers)
        return KVBuffer(layers, held_1N, _first_slots(held_1N), self.window)

    def clear(self, row: int) -> None:
        """Forget what a row holds."""
        self.held_BN[row] = NEVER

    def erase(self, positions: range) -> None:
        """Put zeros where these positions of all rows lie, and forget them."""
        slots_S = self._slots(positions, self.capacity)
        for kv in self.layers:
            for store_BNHE in kv:
                store_BNHE[:, slots_S] = 0.0
        self.held_BN[:, slots_S] = NEVER

    def load(self, row: int, cache: KVCache) -> None:
        """Replace what a row holds by a cache of one row."""
        if cache.batch_size != 1:
            raise ContextReadyError(f"A state of {cache.batch_size} rows was given for one row; select one of them.")
        check_shape(cache.shape, (len(self.layers), *self.layers[0][0].shape[2:], self.window))
        count = min(cache.length, self.capacity)
        if count < cache.needed:
            raise ContextReadyError(
                f"This state holds {cache.needed} positions that are needed and the capacity is {self.capacity}; "
                "make the engine with a larger capacity."
            )
        kvs = [(k_BHSE[0, :, -count:], v_BHSE[0, :, -count:]) for k_BHSE, v_BHSE in cache.layers] if count else []
        self._store(row, range(cache.position - count, cache.position), kvs)

    def copy_row(self, row: int, source: "KVBuffer", source_row: int, positions: range) -> None:
        """Replace what a row holds by these positions of a row of another buffer."""
        slots_S = self._slots(positions, source.capacity)
        kvs = [
            (k_BNHE[source_row, slots_S].transpose(0, 1), v_BNHE[source_row, slots_S].transpose(0, 1))
            for k_BNHE, v_BNHE in source.layers
        ]
        self._store(row, positions, kvs)

    def held(self, row: int, position: int, most: int) -> range:
        """The newest positions before `position` that a row holds, at most this many."""
        # A state that was rolled back before it was loaded holds fewer than it may.
        first = max(0, position - most)
        return range(position - int((self.held_BN[row] >= first).sum()), position)

    def cache(self, row: int, position: int, history: int) -> KVCache:
        """What a row holds after `position` tokens, as a value that shares no memory with the buffer."""
        keep = None if self.window is None else self.window - 1 + history
        positions = range(position) if keep is None else self.held(row, position, keep)
        slots_S = self._slots(positions, self.capacity)
        layers = tuple(
            (k_BNHE[row, slots_S].transpose(0, 1)[None], v_BNHE[row, slots_S].transpose(0, 1)[None])
            for k_BNHE, v_BNHE in self.layers
        )
        return KVCache(layers, position, self.window, keep)

    def at(self, positions_BT: Tensor, sees: Sees = "held", visible: int | None = None, spans: Spans = ()) -> "Places":
        """Places for T tokens a row at these positions.

        `sees` says how attention is masked: by the positions the slots hold; `causal` for a whole sequence from
        position 0; `all` for one token that may see every visible slot. `visible` limits it to the first slots, and
        `spans` limits some tokens to fewer: from, to, and as many slots.
        """
        index = (positions_BT % self.capacity + self.first_B1).flatten()
        return Places(self, positions_BT, index, sees, self.capacity if visible is None else visible, spans=spans)

    def _slots(self, positions: range, capacity: int) -> Tensor:
        return torch.arange(positions.start, positions.stop, device=self.held_BN.device) % capacity

    def _store(self, row: int, positions: range, kvs_HSE: list[KV]) -> None:
        """Make these keys and values all that a row holds."""
        self.clear(row)
        if not positions:
            return
        slots_S = self._slots(positions, self.capacity)
        for kv, theirs in zip(self.layers, kvs_HSE, strict=True):
            for store_BNHE, new_HSE in zip(kv, theirs, strict=True):
                store_BNHE[row].index_copy_(0, slots_S, new_HSE.transpose(0, 1))
        self.held_BN[row, slots_S] = torch.arange(positions.start, positions.stop, device=slots_S.device)


def _first_slots(held_BN: Tensor) -> Tensor:
    B, N = held_BN.shape
    return torch.arange(0, B * N, N, device=held_BN.device)[:, None]


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

    def attend(self, config: TransformerConfig, x_BTC: Tensor) -> "AtPlaces":
        """How the tokens at these places attend."""
        return AtPlaces(config, x_BTC, self)

    def mark(self) -> None:
        """Say which positions the slots hold from now on."""
        self.buffer.held_BN.view(-1).index_copy_(0, self.index, self.positions_BT.flatten())

    def mask_B1TN(self) -> Tensor:
        """Who sees whom: a token sees what lies at or before its own position, and within the window."""
        held_B1N, at_BT1 = self.buffer.held_BN[:, None, : self.visible], self.positions_BT[:, :, None]
        oldest_BT1 = at_BT1 - (self.buffer.window or OLDEST) + 1
        return ((held_B1N <= at_BT1) & (held_B1N >= oldest_BT1))[:, None]


class AtPlaces(Attend):
    """Attention of tokens at chosen places of a buffer, over what it holds."""

    def __init__(self, config: TransformerConfig, x_BTC: Tensor, places: Places) -> None:
        self.places = places
        places.mark()
        self.set_positions(config, places.positions_BT, x_BTC.dtype)
        self.causal = places.sees == "causal" and (config.window is None or config.window >= x_BTC.shape[1])
        self.mask = None if self.causal or places.sees == "all" else places.mask_B1TN()

    def join(self, layer: int, k_BHTE: Tensor, v_BHTE: Tensor) -> KV:
        """Put a layer's new keys and values in their places; return all visible ones."""
        places, joined = self.places, []
        for store_BNHE, new_BHTE in zip(places.buffer.layers[layer], (k_BHTE, v_BHTE), strict=True):
            store_BNHE.flatten(0, 1).index_copy_(0, places.index, new_BHTE.transpose(1, 2).flatten(0, 1))
            joined.append(store_BNHE[:, : places.visible].transpose(1, 2))
        return joined[0], joined[1]

    def __call__(self, q_BHTE: Tensor, k_BHSE: Tensor, v_BHSE: Tensor) -> Tensor:
        """Attention, in parts where some tokens see far fewer slots than others: what is masked is left out."""
        if not self.places.spans or self.mask is None:
            return super().__call__(q_BHTE, k_BHSE, v_BHSE)
        parts = [
            F.scaled_dot_product_attention(
                q_BHTE[:, :, first:end],
                k_BHSE[:, :, :seen],
                v_BHSE[:, :, :seen],
                attn_mask=self.mask[..., first:end, :seen],
            )
            for first, end, seen in self.places.spans
        ]
        return torch.cat(parts, dim=2)

    def after(self) -> Places:
        """The places: the buffer holds the new keys and values."""
        return self.places
