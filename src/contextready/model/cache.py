"""The key-value cache of a transformer: an immutable value, never changed in place."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from contextready.errors import ContextReadyError
from contextready.model.attention import KV, Attend, causal_mask
from contextready.model.checks import check_rows, check_shape
from contextready.model.config import TransformerConfig


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
        """Layers, heads, head size and window, which must match the model's."""
        k_BHSE = self.layers[0][0]
        return len(self.layers), k_BHSE.shape[1], k_BHSE.shape[3], self.window

    def attend(self, config: TransformerConfig, x_BTC: Tensor) -> "AfterCache":
        """Return the attention for the next tokens."""
        check_shape(self.shape, (config.layers, config.heads, config.head_size, config.window))
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
        meta = {
            "layers": len(self.layers),
            "position": self.position,
            "window": self.window,
            "keep": self.keep,
        }
        return tensors, meta

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor], meta: dict[str, Any]) -> "KVCache":
        """Rebuild a cache from the result of `to_tensors`; raises ValueError for anything else."""
        layers = tuple((tensors[f"{i}.k"], tensors[f"{i}.v"]) for i in range(meta["layers"]))
        cache = cls(layers, int(meta["position"]), meta["window"], meta["keep"])
        limits = [limit for limit in (cache.window, cache.keep) if limit is not None]
        if (
            len({(tensor.shape[0], tensor.shape[2]) for kv in layers for tensor in kv}) != 1
            or not all(isinstance(limit, int) for limit in limits)
            or not cache.needed <= cache.length <= min([cache.position, *limits[-1:]])
        ):
            raise ValueError("its keys and values do not match")
        return cache

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
