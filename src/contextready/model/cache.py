"""The key-value cache of a transformer: an immutable value, never changed in place."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Protocol, Self

import torch
from torch import Tensor

from contextready.errors import ContextReadyError
from contextready.formats.record import read_record
from contextready.model.attention import KV, Attend, causal_mask
from contextready.model.checks import check_rows, check_shape
from contextready.model.config import TransformerConfig

LONGEST = 1 << 48
"""Positions and windows in files are shorter than this."""


@dataclass(frozen=True)
class CacheRecord:
    """What a file says about a cache besides its tensors."""

    layers: Annotated[int, range(1, 1 << 20)]
    position: Annotated[int, range(LONGEST)]
    window: Annotated[int, range(1, LONGEST)] | None
    keep: Annotated[int, range(LONGEST)] | None

    @property
    def needed(self) -> int:
        """The number of positions that the next token attends to."""
        return self.position if self.window is None else min(self.position, self.window - 1)

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise an error unless tensors of these names and shapes are a cache that this record describes."""
        # The number is compared first, so that a record of many layers costs nothing.
        names = (
            {f"{i}.{name}" for i in range(self.layers) for name in "kv"} if len(shapes) == 2 * self.layers else set()
        )
        if shapes.keys() != names:
            raise ContextReadyError(f"its tensors are not the keys and values of {self.layers} layers")
        # Heads and head sizes may differ between layers, and between keys and values.
        if any(len(shape) != 4 or 0 in (shape[0], shape[1], shape[3]) for shape in shapes.values()):
            raise ContextReadyError("its keys and values do not have four dimensions")
        rows, held = shapes["0.k"][0], shapes["0.k"][2]
        if {(shape[0], shape[2]) for shape in shapes.values()} != {(rows, held)}:
            raise ContextReadyError("its keys and values do not match each other")
        # Without a window everything is kept, and with one at least what the next token attends to.
        is_kept = self.keep is None if self.window is None else self.keep is not None and self.keep >= self.window - 1
        most = self.position if self.keep is None else min(self.position, self.keep)
        if not is_kept or not self.needed <= held <= most:
            raise ContextReadyError(f"it holds {held} positions, which does not match its position and window")


class Cache(Protocol):
    """The interface that a state needs from a cache; each backbone has its own kind."""

    @property
    def position(self) -> int:
        """The number of tokens read so far."""

    @property
    def batch_size(self) -> int:
        """The number of rows."""

    @property
    def nbytes(self) -> int:
        """The size of all tensors in bytes."""

    def clone(self) -> Self:
        """Return a copy that shares no memory."""

    def select(self, rows: Tensor) -> Self:
        """Return the rows at these indices, in this order."""

    def rollback(self, position: int) -> Self:
        """Return the cache as it was when `position` tokens had been read."""

    def to_tensors(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return everything needed to rebuild the cache: tensors by name, and plain JSON values."""


@dataclass(frozen=True, eq=False)
class KVCache:
    """The keys and values of the newest positions, oldest first."""

    layers: tuple[KV, ...]
    position: int
    window: int | None
    """The attention window of the model, or none for full attention."""
    keep: int | None
    """The maximum number of positions to keep, or none to keep all."""

    @classmethod
    def empty(
        cls,
        batch_size: int,
        layers: int,
        heads: int,
        head_size: int,
        window: int | None,
        *,
        history: int,
        like: Tensor,
    ) -> "KVCache":
        """Create an empty cache with the dtype and device of `like`.

        With a window, a token attends to the window - 1 positions before it; `history` more are kept for rollback.
        """
        if batch_size < 1 or history < 0:
            raise ContextReadyError(
                f"batch_size must be at least 1 and history at least 0, but got {batch_size} and {history}."
            )
        nothing = like.new_empty(batch_size, heads, 0, head_size)
        keep = None if window is None else window - 1 + history
        return cls(((nothing, nothing),) * layers, position=0, window=window, keep=keep)

    @property
    def batch_size(self) -> int:
        """The number of rows."""
        return self.layers[0][0].shape[0]

    @property
    def length(self) -> int:
        """The number of positions held."""
        return self.layers[0][0].shape[2]

    @property
    def needed(self) -> int:
        """The number of positions that the next token attends to; any others are kept for rollback."""
        return self.position if self.window is None else min(self.position, self.window - 1)

    @property
    def nbytes(self) -> int:
        """The size of the keys and values in bytes."""
        return sum(tensor.nbytes for kv in self.layers for tensor in kv)

    @property
    def shape(self) -> tuple[int | None, ...]:
        """Layers, heads of keys, head size and window, which must match the model's."""
        sizes = {(tensor.shape[1], tensor.shape[3]) for kv in self.layers for tensor in kv}
        # Layers of different sizes match no native model.
        heads, head_size = sizes.pop() if len(sizes) == 1 else (None, None)
        return len(self.layers), heads, head_size, self.window

    def attend(self, config: TransformerConfig, x_BTC: Tensor) -> "AfterCache":
        """Return the attention for the next tokens."""
        check_shape(self.shape, (config.layers, config.shared_heads, config.head_size, config.window))
        check_rows(self.batch_size, x_BTC.shape[0])
        return AfterCache(config, x_BTC, self)

    def advanced(self, layers: list[KV], tokens: int) -> "KVCache":
        """Return the cache after `tokens` more tokens; `layers` holds the old and new keys and values, joined."""
        total = self.length + tokens
        start = 0 if self.keep is None else max(0, total - self.keep)
        advanced = replace(
            self, layers=tuple((k[:, :, start:], v[:, :, start:]) for k, v in layers), position=self.position + tokens
        )
        # A slice keeps the whole tensor alive, so if more is dropped than kept, the kept part is copied.
        return advanced.clone() if start > total - start else advanced

    def clone(self) -> "KVCache":
        """Return a copy that shares no memory."""
        return self._map(torch.clone)

    def select(self, rows: Tensor) -> "KVCache":
        """Return the rows at these indices, in this order."""
        return self._map(lambda tensor: tensor.index_select(0, rows))

    @staticmethod
    def stacked(caches: Sequence["KVCache"]) -> "KVCache":
        """Join caches at the same position into one cache with all their rows."""
        layers = zip(*(cache.layers for cache in caches), strict=True)
        return replace(
            caches[0],
            layers=tuple((torch.cat([k for k, _ in kvs]), torch.cat([v for _, v in kvs])) for kvs in layers),
        )

    def rollback(self, position: int) -> "KVCache":
        """Return the cache as it was when `position` tokens had been read."""
        if not 0 <= position <= self.position:
            raise ContextReadyError(f"Cannot roll back to position {position}; {self.position} tokens have been read.")
        held = max(0, self.length - (self.position - position))
        layers = tuple((k[:, :, :held], v[:, :, :held]) for k, v in self.layers)
        rolled = replace(self, layers=layers, position=position)
        if held < rolled.needed:
            raise ContextReadyError(
                f"Cannot roll back from position {self.position} to {position}: attention there needs {rolled.needed} "
                f"earlier positions, but only {held} are kept. Create the state with a larger history."
            )
        return rolled

    def to_tensors(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return everything needed to rebuild the cache: tensors by name, and plain JSON values."""
        tensors = {f"{i}.{name}": t for i, kv in enumerate(self.layers) for name, t in zip("kv", kv, strict=True)}
        return tensors, asdict(CacheRecord(len(self.layers), self.position, self.window, self.keep))

    @staticmethod
    def read_record(meta: Any, shapes: Mapping[str, tuple[int, ...]], where: str) -> CacheRecord:
        """Check the plain values of `to_tensors`, and whether tensors of these names and shapes belong to them."""
        record = read_record(CacheRecord, meta, where)
        record.check_shapes(shapes)
        return record

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], record: CacheRecord) -> "KVCache":
        """Rebuild a cache from tensors whose shapes have been checked."""
        layers = tuple((tensors[f"{i}.k"], tensors[f"{i}.v"]) for i in range(record.layers))
        return cls(layers, record.position, record.window, record.keep)

    def to(self, device: torch.device) -> "KVCache":
        """Return the cache on another device."""
        return self._map(lambda tensor: tensor.to(device))

    def _map(self, change: Callable[[Tensor], Tensor]) -> "KVCache":
        return replace(self, layers=tuple((change(k), change(v)) for k, v in self.layers))


class AfterCache(Attend):
    """Attention for the tokens that follow a cache."""

    def __init__(self, config: TransformerConfig, x_BTC: Tensor, cache: KVCache) -> None:
        T, device = x_BTC.shape[1], x_BTC.device
        self.cache, self.tokens, self.layers = cache, T, list[KV]()
        self.set_positions(config, torch.arange(cache.position, cache.position + T, device=device), x_BTC.dtype)
        past = cache.length if config.window is None else min(cache.length, config.window - 1)
        self.visible = past + T
        # One token sees everything visible; several tokens after an empty cache are a whole sequence.
        self.causal = T > 1 and past == 0 and (config.window is None or config.window >= T)
        self.mask = None if T == 1 or self.causal else causal_mask(T, past, config.window, device)

    def join(self, layer: int, k_BHTE: Tensor, v_BHTE: Tensor) -> KV:
        """Append the new keys and values to those of the cache, and return the visible ones."""
        k_BHPE, v_BHPE = self.cache.layers[layer]
        k_BHSE, v_BHSE = torch.cat((k_BHPE, k_BHTE), dim=2), torch.cat((v_BHPE, v_BHTE), dim=2)
        self.layers.append((k_BHSE, v_BHSE))
        # Positions before the window are kept only for rollback.
        return k_BHSE[:, :, -self.visible :], v_BHSE[:, :, -self.visible :]

    def after(self) -> KVCache:
        """Return the cache including these tokens."""
        return self.cache.advanced(self.layers, self.tokens)
