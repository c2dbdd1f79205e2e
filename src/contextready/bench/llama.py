"""Llama models for other programs: their shapes, their weights, and GGUF files that llama.cpp reads."""

from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from contextready.errors import ContextReadyError
from contextready.extras import require
from contextready.model.config import TransformerConfig
from contextready.model.transformer import Transformer

Array = npt.NDArray[np.float32]
Weights = Iterable[tuple[str, Array]]
"""Names as in a GGUF file, and arrays with their rows in the order of transformers."""

PRECISIONS = ("f32", "f16", "q8_0", "q4_0")

_BLOCK = 32  # weights that share a scale in Q8_0 and Q4_0; row lengths are multiples of it
_EMBEDDING = "token_embd.weight"
_OUTER = {"embedding": "token_embd", "final_norm": "output_norm", "unembedding": "output"}
_IN_LAYERS = {
    "attn_norm": "attn_norm",
    "attn.out": "attn_output",
    "ffn_norm": "ffn_norm",
    "ffn.gate": "ffn_gate",
    "ffn.up": "ffn_up",
    "ffn.down": "ffn_down",
}
"""Names in a GGUF file of the modules of the native transformer, except for queries, keys and values."""
_LLAMA = {"norm": "rms", "ffn": "swiglu"}
_FREE = (
    *("vocab_size", "width", "layers", "heads", "kv_heads", "head_width", "ffn_width", "tied_embeddings"),
    *("rope_base", "norm_eps", "dropout", "attention_dropout", "dropout_at", "init"),
)
"""Settings in which Llama models differ, or that do not matter here."""


def is_llama(config: TransformerConfig) -> bool:
    """Whether a native model has the architecture of Llama, which both programs run."""
    fixed = [field for field in fields(TransformerConfig) if field.name not in _FREE]
    return config.heads * config.head_size == config.width and all(
        getattr(config, field.name) == _LLAMA.get(field.name, field.default) for field in fixed
    )


class Shape(NamedTuple):
    """The shape of a Llama model."""

    layers: int
    width: int
    heads: int
    vocab_size: int
    ffn_width: int
    kv_heads: int
    tied: bool = False
    """Whether the head's matrix is the embedding."""
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5

    @classmethod
    def like(cls, config: TransformerConfig) -> "Shape":
        """The shape of this model if it is a Llama model, otherwise that of one with about as many weights."""
        sizes = config.layers, config.width, config.heads, config.vocab_size
        if not is_llama(config):
            # About as many weights as in the baseline's FFN (8C²), in whole blocks.
            return cls(*sizes, max(1, round(8 * config.width / 3 / _BLOCK)) * _BLOCK, config.heads)
        return cls(
            *sizes, config.hidden_width, config.shared_heads, config.tied_embeddings, config.rope_base, config.norm_eps
        )

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes (out, in) of all weights of the Llama model, by their names in a GGUF file."""
        C, H, V = self.width, self.ffn_width, self.vocab_size
        kv = C // self.heads * self.kv_heads
        layer = {
            "attn_norm": (C,),
            "attn_q": (C, C),
            "attn_k": (kv, C),
            "attn_v": (kv, C),
            "attn_output": (C, C),
            "ffn_norm": (C,),
            "ffn_gate": (H, C),
            "ffn_up": (H, C),
            "ffn_down": (C, H),
        }
        blocks = {f"blk.{i}.{name}.weight": size for i in range(self.layers) for name, size in layer.items()}
        head = {} if self.tied else {"output.weight": (V, C)}
        return {_EMBEDDING: (V, C), **blocks, "output_norm.weight": (C,), **head}


def weights_of(backbone: Transformer) -> Iterator[tuple[str, Array]]:
    """The weights of a native Llama model."""
    config = backbone.config
    sizes = config.heads * config.head_size, *[config.shared_heads * config.head_size] * 2
    for name, weight in backbone.state_dict().items():
        module, values = name.removesuffix(".weight"), weight.float().cpu()
        if module in _OUTER:
            if module != "unembedding" or not config.tied_embeddings:
                yield f"{_OUTER[module]}.weight", values.numpy()
            continue
        _, layer, inner = module.split(".", 2)
        if inner == "attn.qkv":
            for letter, part in zip("qkv", values.split(sizes), strict=True):
                yield f"blk.{layer}.attn_{letter}.weight", part.numpy()
        else:
            yield f"blk.{layer}.{_IN_LAYERS[inner]}.weight", values.numpy()


def random_weights(shape: Shape) -> Iterator[tuple[str, Array]]:
    """Weights as at the start of training: norms are 1, matrices are normal with standard deviation 0.02."""
    random = np.random.default_rng(0)
    for name, size in shape.tensors().items():
        matrix = len(size) == 2
        yield name, random.standard_normal(size, np.float32) * np.float32(0.02) if matrix else np.ones(size, np.float32)


def write_gguf(path: Path, shape: Shape, precision: str, weights: Weights) -> int:
    """Write a Llama model without a tokenizer as a GGUF file; returns the bytes of weights read per token."""
    gguf = require("gguf", "bench")
    check(shape, precision)
    quantization = gguf.GGMLQuantizationType[precision.upper()]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(shape.layers)
    writer.add_context_length(np.iinfo(np.int32).max)  # rotary positions set no limit
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(shape.ffn_width)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.width // shape.heads)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    writer.add_vocab_size(shape.vocab_size)
    writer.add_tokenizer_model("none")
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    expected, read = shape.tensors(), 0
    for name, weight in weights:
        if expected.pop(name, None) != weight.shape:
            raise ContextReadyError(
                f"{name} with shape {weight.shape} is not a weight of {shape}; give each weight once."
            )
        weight = _with_neighbours(name, weight, shape)
        stored = gguf.quantize(weight, quantization) if weight.ndim == 2 else weight
        writer.add_tensor(name, stored, raw_dtype=quantization if weight.ndim == 2 else None)
        read += stored[0].nbytes if name == _EMBEDDING and not shape.tied else stored.nbytes
    if expected:
        raise ContextReadyError(f"Weights of {shape} are missing: {', '.join(expected)}; give all of them.")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read


def _with_neighbours(name: str, weight: Array, shape: Shape) -> Array:
    """Put the rows of queries and keys into llama.cpp's order, in which the two rows of a rotation pair are neighbours.

    In transformers, and here, row j of a head belongs to row j + half.
    """
    heads = {"attn_q": shape.heads, "attn_k": shape.kv_heads}.get(name.split(".")[-2])
    if heads is None:
        return weight
    halves = weight.reshape(heads, 2, -1, shape.width)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def check(shape: Shape, precision: str = "f32") -> None:
    """Refuse invalid shapes, and precisions that the shape does not allow."""
    TransformerConfig(shape.vocab_size, shape.width, shape.layers, shape.heads)
    if precision not in PRECISIONS:
        raise ContextReadyError(f"Unknown precision '{precision}'; choose one of: {', '.join(PRECISIONS)}.")
    if precision.startswith("q") and shape.width % _BLOCK:
        raise ContextReadyError(
            f"width={shape.width} cannot be stored in {precision}, which needs a multiple of {_BLOCK}; choose another "
            "width, or f16 or f32."
        )
