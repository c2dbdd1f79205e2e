"""Any pretrained Hugging Face causal language model as a backbone: embed, blocks, head."""

import inspect
import threading
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from contextready.errors import ContextReadyError
from contextready.hf.cache import Feed, as_dynamic
from contextready.hf.padding import pads_exactly
from contextready.hf.structure import Structure, block_output, find_blocks
from contextready.model.cache import KVCache
from contextready.model.checks import check_tokens
from contextready.model.padded import PaddedCache


class HFBackbone(nn.Module):
    """A causal language model as three functions; a hook on its last block captures z."""

    def __init__(self, lm: Any, structure: Structure) -> None:
        super().__init__()
        self.lm, self.structure = lm, structure
        self.tokenizer_settings: dict[str, str] | None = None
        """Of the model that training started from; checkpoints keep them."""
        self._awaited: dict[int, Tensor | None] = {}
        if not self._has(structure):
            raise ContextReadyError(
                f"{type(lm).__name__} does not have the modules that its configuration names ({structure.blocks}, "
                f"{', '.join(structure.head)}); convert the original model again with this version of transformers."
            )
        self._hook = structure.last_block(lm).register_forward_hook(self._catch)
        self._positions = "position_ids" in inspect.signature(lm.base_model.forward).parameters

    @torch.no_grad()
    def _has(self, structure: Structure) -> bool:
        """Whether the model has these parts, which a file may have named."""
        weight = self.lm.get_input_embeddings().weight
        try:
            logits = structure.logits(self.lm, weight.new_zeros(1, 1, weight.shape[-1]))
        except Exception:  # modules raise anything if they get what they do not expect
            return False
        return structure.blocks == find_blocks(self.lm) and isinstance(logits, Tensor) and logits.ndim == 3

    def unhook(self) -> None:
        """Leave the model as it was before; this object can no longer be used."""
        self._hook.remove()

    @property
    def width(self) -> int:
        """C, the size of the residual stream."""
        width: int = self.lm.get_input_embeddings().weight.shape[-1]
        return width

    @property
    def last_block(self) -> Any:
        """The last block, whose weights some corrections use; only native models have it."""
        return self.lm.last_block

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """Look up the context-free embedding of every token: e (B, T, C)."""
        check_tokens(tokens_BT)
        e_BTC: Tensor = self.lm.get_input_embeddings()(tokens_BT)
        return e_BTC

    @cached_property
    def steps_rows_together(self) -> bool:
        """Whether rows at different positions can be stepped in one forward, with a `PaddedCache`; tried once."""
        return pads_exactly(self)

    def blocks(self, x_BTC: Tensor, past: Feed | KVCache | PaddedCache | None = None) -> tuple[Tensor, Any]:
        """Run the D blocks; returns z (B, T, C), before the final norm, and the cache after these tokens.

        A `KVCache` or `PaddedCache` is a value and is not modified. The cache of a `Feed` is written in place, again by
        every pass.
        """
        T = x_BTC.shape[1]
        arguments: dict[str, Any]
        if isinstance(past, Feed):
            arguments = past.begin()
        elif isinstance(past, PaddedCache):
            arguments = {"past_key_values": as_dynamic(past), "use_cache": True, "position_ids": past.positions_B1}
            arguments["attention_mask"] = past.mask_BS
        elif past is not None:
            positions_1T = torch.arange(past.position, past.position + T, device=x_BTC.device)[None]
            arguments = {"past_key_values": as_dynamic(past), "use_cache": True, "position_ids": positions_1T}
        else:
            arguments = {"use_cache": False}
        if not self._positions:
            arguments.pop("position_ids", None)
        key = _thread()
        self._awaited[key] = None
        try:
            outputs = self.lm.base_model(inputs_embeds=x_BTC, **arguments)
        finally:
            z_BTC = self._awaited.pop(key)
        assert z_BTC is not None
        if x_BTC.requires_grad and torch.is_grad_enabled() and not z_BTC.requires_grad:
            raise ContextReadyError(
                "z lost its gradient inside the blocks, so the correction cannot learn; turn off what detaches it "
                "(gradient checkpointing is safe with gradient_checkpointing_kwargs={'use_reentrant': False})."
            )
        if isinstance(past, Feed):
            past.outputs = outputs
        elif past is not None:
            layers = [(layer.keys, layer.values) for layer in arguments["past_key_values"].layers]
            return z_BTC, past.advanced(layers) if isinstance(past, PaddedCache) else past.advanced(layers, T)
        return z_BTC, past

    def head(self, z_BTC: Tensor) -> Tensor:
        """Compute logits (B, T, V) with the model's own norm, projection and scaling."""
        return self.structure.logits(self.lm, z_BTC)

    def init_cache(self, batch_size: int, history: int = 1) -> KVCache:
        """Create an empty cache."""
        if batch_size < 1 or history < 0:
            raise ContextReadyError(
                f"A state needs at least 1 row and a history of at least 0, but got {batch_size} and {history}."
            )
        rows = (batch_size, 1, 1, 1)
        return KVCache(tuple((k.repeat(rows), v.repeat(rows)) for k, v in self._no_kvs), 0, None, None)

    @cached_property
    def _no_kvs(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of zero tokens, with the sizes found by running one token."""
        with torch.no_grad():
            cache = DynamicCache()
            x_11C = next(self.parameters()).new_zeros(1, 1, self.width)
            self.lm.base_model(inputs_embeds=x_11C, past_key_values=cache, use_cache=True)
        return [(layer.keys[:, :, :0], layer.values[:, :, :0]) for layer in cache.layers]

    def _catch(self, module: nn.Module, args: Any, output: Any) -> None:
        # Recomputation during backward runs the block again, when nothing waits for z.
        key = _thread()
        if key in self._awaited:
            self._awaited[key] = block_output(output)


def _thread() -> int:
    """Key of the caller that waits for z: threads may share a model, but a compiled graph belongs to one."""
    return 0 if torch.compiler.is_compiling() else threading.get_ident()
