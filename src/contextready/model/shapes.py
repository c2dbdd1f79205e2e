"""The names and shapes of a model's weights, computed from its configuration without building it."""

from collections.abc import Iterator

from contextready.model.config import ModelConfig
from contextready.model.correction import find_correction, gain_size

Shape = tuple[str, tuple[int, ...]]


def weight_shapes(config: ModelConfig) -> Iterator[Shape]:
    """Yield the name and the shape of each weight, as a checkpoint names them.

    They are yielded one by one, so that a file can be compared with a configuration of a million layers at once.
    """
    C, V, bias = config.width, config.vocab_size, config.bias
    # The weights of a plain transformer have its own names, without the prefix of the backbone.
    prefix = "" if config.correction is None else "backbone."
    yield f"{prefix}embedding.weight", (V, C)
    yield from _norm(f"{prefix}final_norm", C, bias)
    yield from _linear(f"{prefix}unembedding", C, V, config.head_bias)
    if config.extra_ffn:
        yield from _norm(f"{prefix}extra_norm", C, bias)
        yield from _ffn(f"{prefix}extra_ffn", C, C, bias)
    parts = find_correction(config.correction).parts
    for name, size in parts.norms.items():
        yield from _norm(f"correction.{name}", size * C, bias)
    if parts.has_network:
        yield from _ffn("correction.ffn", parts.network_inputs * C, C, bias)
        if config.correction_gain is not None:
            yield "correction.gain", (gain_size(config.correction_gain, C),)
    for i in range(config.layers):
        layer = f"{prefix}layers.{i}"
        yield from _norm(f"{layer}.attn_norm", C, bias)
        yield from _linear(f"{layer}.attn.qkv", C, 3 * C, bias)
        yield from _linear(f"{layer}.attn.out", C, C, bias)
        yield from _norm(f"{layer}.ffn_norm", C, bias)
        yield from _ffn(f"{layer}.ffn", C, C, bias)


def _linear(name: str, inputs: int, outputs: int, bias: bool) -> Iterator[Shape]:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)


def _norm(name: str, width: int, bias: bool) -> Iterator[Shape]:
    yield f"{name}.weight", (width,)
    if bias:
        yield f"{name}.bias", (width,)


def _ffn(name: str, inputs: int, width: int, bias: bool) -> Iterator[Shape]:
    yield from _linear(f"{name}.up", inputs, 4 * width, bias)
    yield from _linear(f"{name}.down", 4 * width, width, bias)
