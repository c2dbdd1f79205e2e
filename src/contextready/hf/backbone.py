"""Any pretrained causal language model of Hugging Face as a backbone: embed, blocks, head."""

import inspect
import threading
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from contextready.errors import ContextReadyError
from contextready.hf.cache import Feed, as_dynamic
from contextready.hf.structure import Structure, block_output
from contextready.model.cache import KVCache
from contextready.model.checks import check_tokens


class HFBackbone(nn.Module):
    """A causal language model as three functions; z is caught where its last block returns it."""

    def __init__(self, lm: Any, structure: Structure) -> None:
        super().__init__()
        self.lm, self.structure = lm, structure
        self._awaited: dict[int, Tensor | None] = {}
        try:
            structure.last_block(lm).register_forward_hook(self._catch)
            for name in structure.head:
                lm.get_submodule(name)
        except (AttributeError, IndexError, AssertionError):
            raise ContextReadyError(
                f"{type(lm).__name__} has no modules {structure.blocks}, {', '.join(structure.head)}, which its "
                "configuration names; convert the original model again with this version of transformers."
            ) from None
        self._positions = "position_ids" in inspect.signature(lm.base_model.forward).parameters

    @property
    def width(self) -> int:
        """C."""
        width: int = self.lm.get_input_embeddings().weight.shape[-1]
        return width

    @property
    def last_ffn(self) -> Any:
        """The feed-forward network of the last block, where the model is this package's own."""
        return self.lm.last_ffn

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """Look up the context-free embedding of every token: e (B, T, C)."""
        check_tokens(tokens_BT)
        e_BTC: Tensor = self.lm.get_input_embeddings()(tokens_BT)
        return e_BTC

    def blocks(self, x_BTC: Tensor, past: Feed | KVCache | None = None) -> tuple[Tensor, Any]:
        """Run the D blocks: z (B, T, C), before the final norm, and the cache after it.

        A `KVCache` is a value and stays what it is; the cache of a `Feed` is written to, anew by every pass.
        """
        T = x_BTC.shape[1]
        arguments: dict[str, Any]
        if isinstance(past, Feed):
            arguments = past.begin()
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
                "z lost its gradient inside the blocks, so the correction cannot learn; leave out what detaches them "
                "(gradient_checkpointing_kwargs={'use_reentrant': False} is safe)."
            )
        if isinstance(past, Feed):
            past.outputs = outputs
        elif past is not None:
            layers = arguments["past_key_values"].layers
            return z_BTC, past.advanced([(layer.keys, layer.values) for layer in layers], T)
        return z_BTC, past

    def head(self, z_BTC: Tensor) -> Tensor:
        """Predict: logits (B, T, V), by the model's own norm, projection and scaling."""
        return self.structure.logits(self.lm, z_BTC)

    def init_cache(self, batch_size: int, history: int = 1) -> KVCache:
        """A cache before the first token."""
        if batch_size < 1 or history < 0:
            raise ContextReadyError(
                f"A state of {batch_size} rows and history {history} was asked for; give at least 1 row and history 0."
            )
        rows = (batch_size, 1, 1, 1)
        return KVCache(tuple((k.repeat(rows), v.repeat(rows)) for k, v in self._no_kvs), 0, None, None)

    @cached_property
    def _no_kvs(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of no token, of the sizes that one token's turn out to have."""
        with torch.no_grad():
            cache = DynamicCache()
            x_11C = next(self.parameters()).new_zeros(1, 1, self.width)
            self.lm.base_model(inputs_embeds=x_11C, past_key_values=cache, use_cache=True)
        return [(layer.keys[:, :, :0], layer.values[:, :, :0]) for layer in cache.layers]

    def _catch(self, module: nn.Module, args: Any, output: Any) -> None:
        # Recomputation in a backward runs the block again, when nobody waits for z.
        key = _thread()
        if key in self._awaited:
            self._awaited[key] = block_output(output)


def _thread() -> int:
    """Who waits for z: threads may share a model; a compiled graph has one."""
    return 0 if torch.compiler.is_compiling() else threading.get_ident()
