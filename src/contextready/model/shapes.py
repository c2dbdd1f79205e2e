"""The names and shapes of a model's weights, computed from its configuration without building it."""

from collections.abc import Iterator

from contextready.model.config import ModelConfig, TransformerConfig
from contextready.model.correction import find_correction, gain_size

Shape = tuple[str, tuple[int, ...]]


def weight_shapes(config: ModelConfig) -> Iterator[Shape]:
    """Yield the name and the shape of each weight, as a checkpoint names them.

    They are yielded one by one, so that a file can be compared with a configuration of a million layers at once.
    """
    # The weights of a plain transformer have its own names, without the prefix of the backbone.
    yield from backbone_shapes(config, "" if config.correction is None else "backbone.")
    yield from correction_shapes(config.correction, config.width, config.bias)
    if config.correction_gain is not None and find_correction(config.correction).parts.has_network:
        yield "correction.gain", (gain_size(config.correction_gain, config.width),)


def correction_shapes(name: str | None, width: int, bias: bool) -> Iterator[Shape]:
    """Yield the name and the shape of each weight of a correction, without that of its factor."""
    parts, C = find_correction(name).parts, width
    for norm, size in parts.norms.items():
        yield from _norm(f"correction.{norm}", size * C, bias)
    if parts.has_network:
        yield from _linear("correction.ffn.up", parts.network_inputs * C, 4 * C, bias)
        yield from _linear("correction.ffn.down", 4 * C, C, bias)


def backbone_shapes(config: TransformerConfig, prefix: str = "") -> Iterator[Shape]:
    """Yield the name and the shape of each weight of a transformer; the layers come last."""
    c, E = config, config.head_size
    yield f"{prefix}embedding.weight", (c.vocab_size, c.width)
    yield from _block_norm(f"{prefix}final_norm", c)
    for name, shape in _linear("unembedding", c.width, c.vocab_size, c.head_bias):
        # A tied head has the weight of the embedding, which is saved once.
        if not (c.tied_embeddings and name == "unembedding.weight"):
            yield f"{prefix}{name}", shape
    if c.extra_ffn:
        yield from _block_norm(f"{prefix}extra_norm", c)
        yield from _block_ffn(f"{prefix}extra_ffn", c)
    for i in range(c.layers):
        layer = f"{prefix}layers.{i}"
        yield from _block_norm(f"{layer}.attn_norm", c)
        yield from _linear(f"{layer}.attn.qkv", c.width, (c.heads + 2 * c.shared_heads) * E, c.bias or c.qkv_bias)
        if c.qk_norm:
            yield from _norm(f"{layer}.attn.q_norm", E, bias=False)
            yield from _norm(f"{layer}.attn.k_norm", E, bias=False)
        yield from _linear(f"{layer}.attn.out", c.heads * E, c.width, c.bias)
        yield from _block_norm(f"{layer}.ffn_norm", c)
        yield from _block_ffn(f"{layer}.ffn", c)


def _linear(name: str, inputs: int, outputs: int, bias: bool) -> Iterator[Shape]:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)


def _norm(name: str, width: int, bias: bool) -> Iterator[Shape]:
    yield f"{name}.weight", (width,)
    if bias:
        yield f"{name}.bias", (width,)


def _block_norm(name: str, config: TransformerConfig) -> Iterator[Shape]:
    yield from _norm(name, config.width, config.bias and config.norm == "layer")


def _block_ffn(name: str, config: TransformerConfig) -> Iterator[Shape]:
    for part in ("gate", "up") if config.ffn == "swiglu" else ("up",):
        yield from _linear(f"{name}.{part}", config.width, config.hidden_width, config.bias)
    yield from _linear(f"{name}.down", config.hidden_width, config.width, config.bias)
