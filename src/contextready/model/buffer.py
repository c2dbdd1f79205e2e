"""Keys and values in preallocated slots, updated in place, for the engines' decode steps and the prefill sweeps.

A `KVCache` is an immutable value that grows. A `KVBuffer` has N slots from the start, so its shapes never change.
Position p of a row is stored in slot p mod N. With full attention, N is the longest length a row may reach; with a
window, new positions overwrite the oldest ones.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from contextready.errors import ContextReadyError
from contextready.formats.limits import check_memory
from contextready.model.attention import KV, Attend, are_shared
from contextready.model.cache import KVCache
from contextready.model.checks import check_shape
from contextready.model.config import TransformerConfig

NEVER = -(2**62)
"""The position of an empty slot."""
OLDEST = 2**61
"""How far back full attention sees: beyond every real position, but not as far as NEVER."""

Sees = Literal["held", "causal", "all"]
Spans = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, eq=False)
class KVBuffer:
    """N slots of keys and values per row and layer, and the position that each slot holds."""

    layers: tuple[KV, ...]
    """Keys and values of each layer, (B, N, heads, head size). They are separate tensors because a compiled step that
    writes to a slice of a larger tensor copies all of it."""
    held_BN: Tensor
    first_B1: Tensor
    """The index of each row's first slot when the slots of all rows are numbered consecutively."""
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
        """Create an empty buffer with the dtype and device of `like`."""
        if batch_size < 1 or capacity < 1:
            raise ContextReadyError(f"batch_size and capacity must be at least 1, but got {batch_size} and {capacity}.")
        if like.device.type == "cpu":
            size = 2 * layers * batch_size * capacity * heads * head_size * like.dtype.itemsize
            check_memory(size, f"The cache of {batch_size} rows with {capacity:,} positions", "lower one of them.")
        # Zeros rather than uninitialized memory, because a masked slot has weight 0 and 0 × NaN is NaN.
        shape = (batch_size, capacity, heads, head_size)
        kvs = tuple((like.new_zeros(shape), like.new_zeros(shape)) for _ in range(layers))
        held_BN = torch.full((batch_size, capacity), NEVER, device=like.device, dtype=torch.int64)
        return cls(kvs, held_BN, _first_slots(held_BN), window)

    @property
    def batch_size(self) -> int:
        """The number of rows."""
        return self.held_BN.shape[0]

    @property
    def capacity(self) -> int:
        """N, the number of positions that a row can hold."""
        return self.held_BN.shape[1]

    @property
    def nbytes(self) -> int:
        """The size of the keys and values in bytes."""
        return sum(tensor.nbytes for kv in self.layers for tensor in kv)

    def row(self, row: int) -> "KVBuffer":
        """Return one row as a buffer that shares this one's memory."""
        return self.run(row, row + 1)

    def run(self, first: int, end: int) -> "KVBuffer":
        """Return neighbouring rows as a buffer that shares this one's memory."""
        held_BN = self.held_BN[first:end]
        layers = tuple((k_BNHE[first:end], v_BNHE[first:end]) for k_BNHE, v_BNHE in self.layers)
        return KVBuffer(layers, held_BN, _first_slots(held_BN), self.window)

    def clear(self, row: int) -> None:
        """Mark all slots of a row as empty."""
        self.held_BN[row] = NEVER

    def erase(self, positions: range) -> None:
        """Overwrite these positions with zeros in all rows, and mark their slots as empty."""
        slots_S = self._slots(positions, self.capacity)
        for kv in self.layers:
            for store_BNHE in kv:
                store_BNHE[:, slots_S] = 0.0
        self.held_BN[:, slots_S] = NEVER

    def load(self, row: int, cache: KVCache) -> None:
        """Replace the contents of a row with a cache that has one row."""
        if cache.batch_size != 1:
            raise ContextReadyError(
                f"The state must have one row, but has {cache.batch_size}; select one of them first."
            )
        check_shape(cache.shape, (len(self.layers), *self.layers[0][0].shape[2:], self.window))
        theirs, ours = cache.layers[0][0].dtype, self.layers[0][0].dtype
        if theirs != ours:
            raise ContextReadyError(f"The state has numbers of type {theirs}, but the engine computes in {ours}.")
        count = min(cache.length, self.capacity)
        if count < cache.needed:
            raise ContextReadyError(
                f"This state needs {cache.needed} positions, but the engine's capacity is {self.capacity}; "
                "create the engine with a larger capacity."
            )
        kvs = [(k_BHSE[0, :, -count:], v_BHSE[0, :, -count:]) for k_BHSE, v_BHSE in cache.layers] if count else []
        self._store(row, range(cache.position - count, cache.position), kvs)

    def copy_row(self, row: int, source: "KVBuffer", source_row: int, positions: range) -> None:
        """Replace the contents of a row with these positions of a row in another buffer."""
        slots_S = self._slots(positions, source.capacity)
        kvs = [
            (k_BNHE[source_row, slots_S].transpose(0, 1), v_BNHE[source_row, slots_S].transpose(0, 1))
            for k_BNHE, v_BNHE in source.layers
        ]
        self._store(row, positions, kvs)

    def held(self, row: int, position: int, most: int) -> range:
        """Return the newest positions before `position` that a row holds, at most `most` of them."""
        # A state that was rolled back before it was loaded may hold fewer than `most`.
        first = max(0, position - most)
        return range(position - int((self.held_BN[row] >= first).sum()), position)

    def cache(self, row: int, position: int, history: int) -> KVCache:
        """Copy the contents of a row after `position` tokens into a cache that shares no memory with the buffer."""
        keep = None if self.window is None else self.window - 1 + history
        positions = range(position) if keep is None else self.held(row, position, keep)
        slots_S = self._slots(positions, self.capacity)
        layers = tuple(
            (k_BNHE[row, slots_S].transpose(0, 1)[None], v_BNHE[row, slots_S].transpose(0, 1)[None])
            for k_BNHE, v_BNHE in self.layers
        )
        return KVCache(layers, position, self.window, keep)

    def at(
        self,
        positions_BT: Tensor,
        sees: Sees = "held",
        visible: int | None = None,
        spans: Spans = (),
        active_B1: Tensor | None = None,
    ) -> "Places":
        """Return the places of T tokens per row at these positions.

        `sees` selects the attention mask: `held` compares the positions that the slots hold, `causal` is for a whole
        sequence from position 0, and `all` is for one token that may see every visible slot. `visible` limits attention
        to the first slots. `spans` limits groups of tokens to fewer: (first token, end token, number of slots) each.
        With `active_B1`, rows for which it is false are computed too, but leave the buffer as it is (one token each).
        """
        index = (positions_BT % self.capacity + self.first_B1).flatten()
        visible = self.capacity if visible is None else visible
        return Places(self, positions_BT, index, sees, visible, spans=spans, active_B1=active_B1)

    def _slots(self, positions: range, capacity: int) -> Tensor:
        return torch.arange(positions.start, positions.stop, device=self.held_BN.device) % capacity

    def _store(self, row: int, positions: range, kvs_HSE: list[KV]) -> None:
        """Replace the contents of a row with these keys and values."""
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
    """The slots of a buffer that the tokens of one call use; the blocks accept this instead of a cache."""

    buffer: KVBuffer
    positions_BT: Tensor
    index: Tensor
    """The slots of all tokens, when the slots of all rows are numbered consecutively."""
    sees: Sees
    visible: int
    spans: Spans
    active_B1: Tensor | None = None
    """The rows that write to the buffer; none means all."""

    def attend(self, config: TransformerConfig, x_BTC: Tensor) -> "AtPlaces":
        """Return the attention for the tokens at these places."""
        return AtPlaces(config, x_BTC, self)

    def mark(self) -> None:
        """Record the positions that the slots hold from now on."""
        self.write(self.buffer.held_BN.view(-1), self.positions_BT.flatten())

    def write(self, store: Tensor, new: Tensor) -> None:
        """Write a value of every token to its slot; `store` has the slots of all rows as its first dimension."""
        if self.active_B1 is not None:
            # Written back as it was, so that a compiled step has the same shapes whichever rows are active.
            active = self.active_B1.flatten().view(-1, *[1] * (new.dim() - 1))
            new = torch.where(active, new, store.index_select(0, self.index))
        store.index_copy_(0, self.index, new)

    def mask_B1TN(self) -> Tensor:
        """Return the attention mask: a token sees the positions up to its own that are within the window."""
        held_B1N, at_BT1 = self.buffer.held_BN[:, None, : self.visible], self.positions_BT[:, :, None]
        oldest_BT1 = at_BT1 - (self.buffer.window or OLDEST) + 1
        return ((held_B1N <= at_BT1) & (held_B1N >= oldest_BT1))[:, None]


class AtPlaces(Attend):
    """Attention for tokens at given places of a buffer, over everything that it holds."""

    def __init__(self, config: TransformerConfig, x_BTC: Tensor, places: Places) -> None:
        self.places = places
        places.mark()
        self.set_positions(config, places.positions_BT, x_BTC.dtype)
        self.causal = places.sees == "causal" and (config.window is None or config.window >= x_BTC.shape[1])
        self.mask = None if self.causal or places.sees == "all" else places.mask_B1TN()

    def join(self, layer: int, k_BHTE: Tensor, v_BHTE: Tensor) -> KV:
        """Write a layer's new keys and values to their slots, and return all visible ones."""
        places, joined = self.places, []
        for store_BNHE, new_BHTE in zip(places.buffer.layers[layer], (k_BHTE, v_BHTE), strict=True):
            places.write(store_BNHE.flatten(0, 1), new_BHTE.transpose(1, 2).flatten(0, 1))
            joined.append(store_BNHE[:, : places.visible].transpose(1, 2))
        return joined[0], joined[1]

    def __call__(self, q_BHTE: Tensor, k_BHSE: Tensor, v_BHSE: Tensor, dropout: float = 0.0) -> Tensor:
        """Compute attention, separately for each span of tokens, so that slots masked for a whole span are skipped."""
        if not self.places.spans or self.mask is None:
            return super().__call__(q_BHTE, k_BHSE, v_BHSE, dropout)
        parts = [
            F.scaled_dot_product_attention(
                q_BHTE[:, :, first:end],
                k_BHSE[:, :, :seen],
                v_BHSE[:, :, :seen],
                attn_mask=self.mask[..., first:end, :seen],
                dropout_p=dropout,
                enable_gqa=are_shared(q_BHTE, k_BHSE),
            )
            for first, end, seen in self.places.spans
        ]
        return torch.cat(parts, dim=2)

    def after(self) -> Places:
        """Return the places, whose buffer now holds the new keys and values."""
        return self.places
