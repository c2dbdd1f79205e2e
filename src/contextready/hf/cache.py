"""The extra state z in a Hugging Face cache, and how the passes of one forward share that cache.

z is stored in the cache's first layer, so whatever generation does to a cache (reorder beams, repeat or select rows,
crop rejected tokens, reset) happens to z too.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, StaticLayer

from contextready.errors import ContextReadyError
from contextready.model.cache import KVCache
from contextready.model.padded import PaddedCache

HISTORY = 32
"""Number of newest tokens that can always be cropped. All tokens of the newest forward can be cropped too."""


class Carrying:
    """A cache layer that also holds what the newest positions pass on to the next one, (B, R, C), newest last."""

    carried_BRC: Tensor | None = None

    def remember(self, carried_BTC: Tensor) -> None:
        """Store what the newest positions pass on."""
        newest_B1C, held_BRC = carried_BTC[:, -1:], self.carried_BRC
        if not isinstance(self, StaticLayer):
            most = max(HISTORY, carried_BTC.shape[1]) + 1
            before = [] if held_BRC is None else [held_BRC]
            self.carried_BRC = torch.cat([*before, carried_BTC], dim=1)[:, -most:]
        elif held_BRC is None:
            # A static layer cannot be cropped. Its tensors keep their addresses, because compiled steps rely on them.
            self.carried_BRC = newest_B1C.clone()
        else:
            held_BRC.copy_(newest_B1C)

    def reset(self) -> None:
        """Forget everything."""
        super().reset()  # type: ignore[misc]
        if self.carried_BRC is not None and isinstance(self, StaticLayer):
            self.carried_BRC.zero_()
        else:
            self.carried_BRC = None

    def crop(self, amount: int) -> None:
        """Remove the newest tokens (keys, values and z): n of them for -n, or down to a length."""
        before = self.get_seq_length()  # type: ignore[attr-defined]
        removed = min(before, -amount if amount <= 0 else max(0, before - amount))
        kept = 0 if self.carried_BRC is None or removed == before else self.carried_BRC.shape[1] - removed
        if kept < 1 and removed < before and self.carried_BRC is not None:
            # Raised before anything is cropped, so that the cache stays consistent.
            raise ContextReadyError(
                f"Cannot crop {removed} tokens from a cache that keeps z of only the newest "
                f"{self.carried_BRC.shape[1]}; start a new cache and read the tokens again."
            )
        super().crop(amount)  # type: ignore[misc]
        self.carried_BRC = None if self.carried_BRC is None or kept < 1 else self.carried_BRC[:, :kept]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows to follow the beams."""
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        self._change(lambda carried: carried.index_select(0, beam_idx.to(carried.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        super().batch_repeat_interleave(repeats)  # type: ignore[misc]
        self._change(lambda carried: carried.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows."""
        super().batch_select_indices(indices)  # type: ignore[misc]
        self._change(lambda carried: carried[indices])

    def __reduce__(self) -> Any:
        return as_carrying, (type(self).__bases__[1], self.__dict__)

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.carried_BRC is not None:
            self.carried_BRC = change(self.carried_BRC)


@lru_cache
def _carrying(layer_class: Any) -> Any:
    return type(f"Carrying{layer_class.__name__}", (Carrying, layer_class), {})


def as_carrying(layer_class: Any, fields: dict[str, Any]) -> Any:
    """Create a layer of this class, with these fields, that also carries z."""
    carrying = _carrying(layer_class)
    layer = carrying.__new__(carrying)
    layer.__dict__ = fields
    return layer


def carrying_layer(cache: Cache) -> Any:
    """The layer of a cache that carries z; an empty cache gets one."""
    if not cache.layers:
        cache.layers.append(cache.layer_class_to_replicate())
    first = cache.layers[0]
    if not isinstance(first, Carrying):
        # A static layer's length is a tensor.
        if int(first.get_seq_length()) > 0:
            raise ContextReadyError(
                "This cache was filled by another model and holds no z; pass an empty cache, or one that this model "
                "returned."
            )
        cache.layers[0] = first = as_carrying(type(first), first.__dict__)
    return first


class Rewind:
    """Snapshot of a cache before the first pass of a forward, so that only the last pass leaves a trace in it."""

    def __init__(self, cache: Cache) -> None:
        self.cache, self.saved = cache, [_snapshot(layer) for layer in cache.layers]

    def __call__(self) -> None:
        """Restore the cache."""
        del self.cache.layers[len(self.saved) :]
        for layer, saved in zip(self.cache.layers, self.saved, strict=True):
            if not isinstance(layer, StaticLayer):
                layer.__dict__.clear()
                layer.__dict__.update(saved)
                continue
            # Static layers are written in place, so lengths and whatever a full window pushed out are copied back.
            for name, value in saved.items():
                held = getattr(layer, name)
                if isinstance(held, Tensor):
                    held.copy_(value)
                else:
                    setattr(layer, name, value)


def _snapshot(layer: Any) -> dict[str, Any]:
    if not isinstance(layer, StaticLayer):
        # These layers replace their tensors and never write into them.
        return dict(layer.__dict__)
    names = [name for name in ("cumulative_length", "cumulative_length_int") if hasattr(layer, name)]
    if layer.is_sliding and layer.is_initialized:
        names += ["keys", "values"]
    return {name: v.clone() if isinstance(v := getattr(layer, name), Tensor) else v for name in names}


@dataclass(eq=False)
class Feed:
    """What the passes of one forward share: the cache before them, and the other arguments of the model."""

    cache: Cache | None
    arguments: dict[str, Any]
    """attention_mask, position_ids, and whatever else was passed to forward."""
    rewind: Rewind | None = None
    outputs: Any = None
    """What the inner model returned in the newest pass."""
    used: bool = field(default=False, init=False)

    def begin(self) -> dict[str, Any]:
        """Arguments of the next pass; undoes what an earlier pass wrote to the cache."""
        if self.used and self.rewind is not None:
            self.rewind()
        self.used = True
        return {"past_key_values": self.cache, "use_cache": self.cache is not None, **self.arguments}


def as_dynamic(past: KVCache | PaddedCache) -> Cache:
    """Create a Hugging Face cache with the contents of such a value; writing to it does not change the value."""
    cache = DynamicCache()
    # Layers have no window: the model's own mask hides older tokens, and any token can be rolled back.
    for keys, values in past.layers:
        layer = DynamicLayer()
        layer.dtype, layer.device = keys.dtype, keys.device
        layer.keys, layer.values, layer.is_initialized = keys, values, True
        cache.layers.append(layer)
    return cache
