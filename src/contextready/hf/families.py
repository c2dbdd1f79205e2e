"""Pretrained models that the native transformer computes exactly: Llama, Mistral, Qwen2, Qwen3 and SmolLM.

Their configurations and weights are translated in both directions, bit for bit. Models of other families, or with
settings that have no native form, stay as they are (`backbone.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from contextready.errors import ContextReadyError
from contextready.hf.base import BaseTransformerForCausalLM
from contextready.hf.proof import is_close
from contextready.hf.structure import evaluating, proof_tokens, refusing
from contextready.model.config import TransformerConfig
from contextready.model.context_ready import ContextReady
from contextready.model.correction_module import CorrectionModule
from contextready.model.shapes import backbone_shapes
from contextready.model.transformer import Transformer

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
"""The classes of these families by the types of their configurations."""
ROPES = {"default": "geometric", "linear": "linear", "llama3": "llama3"}
"""Native names of the kinds of rotary angles."""
OUTER: dict[str, tuple[str, ...]] = {
    "embedding": ("model.embed_tokens",),
    "final_norm": ("model.norm",),
    "unembedding": ("lm_head",),
}
IN_LAYERS: dict[str, tuple[str, ...]] = {
    "attn_norm": ("input_layernorm",),
    "attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.q_norm": ("self_attn.q_norm",),
    "attn.k_norm": ("self_attn.k_norm",),
    "attn.out": ("self_attn.o_proj",),
    "ffn_norm": ("post_attention_layernorm",),
    "ffn.gate": ("mlp.gate_proj",),
    "ffn.up": ("mlp.up_proj",),
    "ffn.down": ("mlp.down_proj",),
}
"""The modules whose weights, one after the other, are those of a native module."""


class NotNativeError(Exception):
    """A model has no native form; the message completes a sentence with the reason."""


@dataclass(frozen=True)
class Origin:
    """What is needed, besides its weights, to write a native model in the format that it came from."""

    base_config: dict[str, Any]
    vocab_size: int
    structure: dict[str, Any]
    generation_config: dict[str, Any]
    tokenizer: dict[str, str] | None
    """The settings of its tokenizer."""


class FromPretrained(ContextReady):
    """A native model with the weights of a pretrained one."""

    def __init__(self, backbone: Transformer, correction: CorrectionModule, origin: Origin) -> None:
        super().__init__(backbone, correction)
        self.origin = origin


def native_config(config: Any) -> TransformerConfig:
    """Translate a configuration; raises NotNativeError if the native transformer would not compute the same."""
    if config.model_type not in FAMILIES:
        raise NotNativeError("only Llama, Mistral, Qwen2, Qwen3 and SmolLM models have a native form")
    if getattr(config, "quantization_config", None) is not None:
        raise NotNativeError("its weights are quantized")
    if config.hidden_act not in ("silu", "swish"):
        raise NotNativeError(f"its activation {config.hidden_act} has no native form")
    if bool(getattr(config, "attention_bias", False)) != bool(getattr(config, "mlp_bias", False)):
        raise NotNativeError("it has biases in its attention or in its feed-forward networks, but not in both")
    try:
        return _translated(config)
    except (ContextReadyError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise NotNativeError(f"its configuration has no native form ({str(error).rstrip('.')})") from None


def _translated(config: Any) -> TransformerConfig:
    return TransformerConfig(
        vocab_size=config.vocab_size,
        width=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_width=getattr(config, "head_dim", None),
        window=_window(config),
        bias=bool(getattr(config, "attention_bias", False)),
        qkv_bias=config.model_type == "qwen2",
        qk_norm=config.model_type == "qwen3",
        norm="rms",
        norm_eps=float(config.rms_norm_eps),
        ffn="swiglu",
        ffn_width=config.intermediate_size,
        tied_embeddings=bool(config.tie_word_embeddings),
        attention_dropout=float(config.attention_dropout or 0.0),
        no_rope_every=_no_rope_every(getattr(config, "no_rope_layers", None)),
        **_rope(config),
    )


def _window(config: Any) -> int | None:
    """The sliding window, if all layers have it."""
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds:
        window: int | None = getattr(config, "sliding_window", None)
        return window
    if kinds == {"full_attention"}:
        return None
    if kinds == {"sliding_attention"} and config.sliding_window is not None:
        return int(config.sliding_window)
    raise NotNativeError("its layers attend in different ways")


def _rope(config: Any) -> dict[str, Any]:
    given = config.rope_parameters or {}
    kind = given.get("rope_type", "default")
    if kind not in ROPES:
        raise NotNativeError(f"its rope type {kind} has no native form")
    if (given.get("partial_rotary_factor") or 1.0) != 1.0:
        raise NotNativeError("it rotates only some of the channels of its heads")
    found: dict[str, Any] = {"rope": ROPES[kind], "rope_base": float(given["rope_theta"])}
    if kind != "default":
        found["rope_factor"] = float(given["factor"])
    if kind == "llama3":
        found |= {
            "rope_low": float(given["low_freq_factor"]),
            "rope_high": float(given["high_freq_factor"]),
            "rope_length": int(given.get("original_max_position_embeddings") or config.max_position_embeddings),
        }
    return found


def _no_rope_every(has_rope: list[int] | None) -> int | None:
    """The distance of layers without rotary positions, if it is always the same."""
    if has_rope is None or all(has_rope):
        return None
    every = [bool(one) for one in has_rope].index(False) + 1
    if any(bool(one) != ((layer + 1) % every != 0) for layer, one in enumerate(has_rope)):
        raise NotNativeError("its layers without rotary positions do not repeat at one distance")
    return every


def their_names(name: str) -> tuple[str, ...]:
    """Return the names of the weights that, one after the other, are the native weight of this name."""
    module, _, kind = name.rpartition(".")
    if module in OUTER:
        return tuple(f"{each}.{kind}" for each in OUTER[module])
    _, layer, inner = module.split(".", 2)
    return tuple(f"model.layers.{layer}.{each}.{kind}" for each in IN_LAYERS[inner])


def native_backbone(lm: Any) -> Transformer:
    """Make a native transformer of a pretrained model; raises NotNativeError with the reason if there is none.

    Weights that need not be joined share the memory of the model's.
    """
    if isinstance(lm, BaseTransformerForCausalLM):
        return lm.model.native
    config = native_config(lm.config)
    if type(lm).__name__ != FAMILIES[lm.config.model_type] or not type(lm).__module__.startswith("transformers."):
        raise NotNativeError(f"{type(lm).__name__} is not a class of transformers")
    theirs, shapes = dict(lm.named_parameters()), dict(backbone_shapes(config))
    if {part for name in shapes for part in their_names(name)} != theirs.keys():
        raise NotNativeError("it has other weights than its family")
    with torch.device("meta"):
        backbone = Transformer(config)
    for name, shape in shapes.items():
        parts = [theirs[part].detach() for part in their_names(name)]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        if joined.shape != shape:
            raise NotNativeError(f"its weights have other sizes than its configuration says (for example {name})")
        module, _, kind = name.rpartition(".")
        backbone.get_submodule(module).register_parameter(kind, nn.Parameter(joined))
    if config.tied_embeddings:
        backbone.unembedding.weight = backbone.embedding.weight
    _prove(lm, backbone)
    return backbone.train(lm.training)


def why_not_native(lm: Any) -> str | None:
    """Return the reason why a model has no native form, as the end of a sentence; None if it has one."""
    try:
        native_backbone(lm)
    except NotNativeError as reason:
        return str(reason)
    return None


@torch.no_grad()
def _prove(lm: Any, backbone: Transformer) -> None:
    """Compare the logits of both up to rounding."""
    tokens_1T = proof_tokens(lm)
    with evaluating(lm), evaluating(backbone):
        with refusing(lm):
            expected_1TV = lm(input_ids=tokens_1T, use_cache=False).logits
        z_1TC, _ = backbone.blocks(backbone.embed(tokens_1T))
        if not is_close(backbone.head(z_1TC), expected_1TV):
            raise NotNativeError("the native transformer computes other logits")


def fill(lm: Any, backbone: Transformer) -> None:
    """Copy the weights of a native transformer into a model of the family that it came from."""
    theirs: Mapping[str, Tensor] = dict(lm.named_parameters())
    with torch.no_grad():
        for name, weight in backbone.named_parameters():
            places = [theirs[part] for part in their_names(name)]
            for place, part in zip(places, torch.split(weight, [len(place) for place in places]), strict=True):
                place.copy_(part)
