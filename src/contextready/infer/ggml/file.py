"""The exported model: one GGUF file with weights, sizes and tokenizer, written with torch and read without it."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from dataclasses import fields as fields_of
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from contextready.errors import ContextReadyError, nearest
from contextready.extras import require
from contextready.files import staged_file
from contextready.formats.gguf_file import GgufTensor, read_gguf_file
from contextready.formats.limits import check_range, shown
from contextready.infer.ggml.tokenizer_fields import read_tokenizer, write_tokenizer
from contextready.model.config import TransformerConfig
from contextready.model.correction import CORRECTIONS, NO_CORRECTION, find_correction

if TYPE_CHECKING:
    from torch import Tensor

    from contextready.data.tokenizer import Tokenizer
    from contextready.model.context_ready import ContextReady

ARCHITECTURE = "contextready"
FORMATS = (1, 2)
"""The versions of the format that can be read. Version 2 says how channels rotate; older programs must not guess it."""
TYPES = ("f32", "f16", "q8_0", "q4_0")
ROPES = ("geometric", "integer")
"""The rotary angles that a file can describe."""
LONGEST = 1 << 31
"""The most tokens in a training sequence."""


@dataclass(frozen=True)
class ExportedConfig(TransformerConfig):
    """The configuration of the model in a file."""

    correction: str | None = None
    """Name of the correction; None for a plain transformer."""
    correction_bias: bool = False
    """Whether the correction has biases, independently of the backbone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rope not in ROPES:
            raise ContextReadyError(f"Unknown rope '{shown(self.rope)}'; update contextready to read this file.")
        if self.correction is not None and self.correction not in CORRECTIONS:
            raise ContextReadyError(f"Unknown correction '{self.correction}'; update contextready to read this file.")

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every tensor, in the order of the file."""
        C, V = self.width, self.vocab_size
        yield "embedding.weight", (V, C)
        for i in range(self.layers):
            yield from self._norm(f"layers.{i}.attn_norm", C, self.bias)
            yield from self._linear(f"layers.{i}.attn.qkv", 3 * C, C, self.bias)
            yield from self._linear(f"layers.{i}.attn.out", C, C, self.bias)
            yield from self._norm(f"layers.{i}.ffn_norm", C, self.bias)
            yield from self._ffn(f"layers.{i}.ffn", C, self.bias)
        if self.extra_ffn:
            yield from self._norm("extra_norm", C, self.bias)
            yield from self._ffn("extra_ffn", C, self.bias)
        yield from self._norm("final_norm", C, self.bias)
        yield from self._linear("unembedding", V, C, self.head_bias)
        parts = find_correction(self.correction).parts
        for name, size in parts.norms.items():
            yield from self._norm(f"correction.{name}", size * C, self.correction_bias)
        if parts.has_network:
            yield from self._ffn("correction.ffn", parts.network_inputs * C, self.correction_bias)

    def _norm(self, name: str, size: int, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.weight", (size,)
        if bias:
            yield f"{name}.bias", (size,)

    def _linear(self, name: str, outputs: int, inputs: int, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.weight", (outputs, inputs)
        if bias:
            yield f"{name}.bias", (outputs,)

    def _ffn(self, name: str, inputs: int, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield from self._linear(f"{name}.up", 4 * self.width, inputs, bias)
        yield from self._linear(f"{name}.down", self.width, 4 * self.width, bias)


# Name of each field in a file: GGUF's standard name if there is one.
FIELDS = {
    "vocab_size": "vocab_size",
    "width": "embedding_length",
    "layers": "block_count",
    "heads": "attention.head_count",
    "window": "attention.sliding_window",
    "extra_ffn": "extra_ffn",
    "bias": "bias",
    "rope_base": "rope.freq_base",
    "rope": "rope.type",
    "head_bias": "head_bias",
    "correction": "correction",
    "correction_bias": "correction_bias",
}
FIELD_TYPES = {
    **dict.fromkeys(("extra_ffn", "bias", "head_bias", "correction_bias"), bool),
    **{"rope_base": float, "rope": str, "correction": str},
}
IN_TRAINING = ("dropout", "attention_dropout", "dropout_at", "init")
"""Settings that change nothing in an exported model."""
OPTIONAL = ("window", "correction", "rope", "head_bias")
"""Fields that are absent from files whose model has their default."""


@dataclass(frozen=True)
class Exported:
    """An exported model: its configuration and its weights, which stay in the file until they are used."""

    path: Path
    config: ExportedConfig
    trained_length: int
    """Number of tokens in a training sequence."""
    fields: dict[str, Any]
    """Everything that the file says, of which the tokenizer is checked when it is loaded."""
    weights: dict[str, GgufTensor]

    @property
    def parameters(self) -> int:
        """Total number of parameters."""
        return sum(prod(weight.shape) for weight in self.weights.values())

    @property
    def type(self) -> str:
        """Type of the head's matrix, which is the requested type if the width allows it."""
        return self.weights["unembedding.weight"].type

    @property
    def step_bytes(self) -> int:
        """Bytes of weights read per predicted token: all but the embedding, of which only one row is read."""
        return sum(w.data.nbytes for name, w in self.weights.items() if name != "embedding.weight")

    def tokenizer(self) -> "Tokenizer":
        """Load the tokenizer that was exported with the model."""
        tokenizer = read_tokenizer(self.fields, str(self.path))
        if tokenizer is None:
            raise ContextReadyError(
                f"{self.path} contains no tokenizer, so it cannot be used with text; export a run whose data has a "
                "tokenizer."
            )
        return tokenizer


def write_gguf(
    model: "ContextReady",
    path: str | Path,
    trained_length: int,
    type: str = "f16",
    tokenizer: "Tokenizer | None" = None,
    *,
    overwrite: bool = True,
    advance: Callable[[int, int], None] = lambda total, done: None,
) -> int:
    """Write a model to a file, completely or not at all, and return its size in bytes.

    `type` is the type of the matrices: f32, f16, q8_0 or q4_0. Norms and biases are always f32. A matrix whose row
    length is not a multiple of 32 cannot be quantised and is written in f16 instead, so that every width can be
    exported. `advance(total, done)` is called whenever `done` more of `total` bytes have been written.
    """
    check_type(type)
    if trained_length < 1:
        raise ContextReadyError(
            f"trained_length must be at least 1, but got {trained_length}; it is the length of the training sequences."
        )
    config, tensors = _describe(model)
    gguf = require("gguf", "ggml")
    target = Path(path)
    with staged_file(target) as staging, closing(gguf.GGUFWriter(staging, ARCHITECTURE)) as writer:
        # Only now is it certain that no other process is writing the same file.
        check_absent(target, overwrite)
        _add_fields(writer, config, trained_length, tokenizer)
        types = {name: _type_of(gguf, shape, type) for name, shape in config.tensors()}
        sizes = {name: prod(gguf.quant_shape_to_byte_shape(shape, types[name])) for name, shape in config.tensors()}
        for name, shape in config.tensors():
            writer.add_tensor_info(name, shape, np.dtype(np.float32), sizes[name], types[name])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        # One tensor at a time, so that memory never holds a quantised copy of the whole model.
        for name, _ in config.tensors():
            values = tensors[name].detach().float().cpu().numpy()
            writer.write_tensor_data(gguf.quantize(np.ascontiguousarray(values), types[name]))
            advance(sum(sizes.values()), sizes[name])
        writer.flush()
    return target.stat().st_size


def check_absent(path: Path, overwrite: bool) -> None:
    """Refuse to replace an existing file, unless that was requested."""
    if path.exists() and not overwrite:
        raise ContextReadyError(f"{path} already exists; delete it, choose another name, or pass --overwrite.")


def check_type(type: str) -> None:
    """Refuse an unknown type of matrices."""
    if type not in TYPES:
        raise ContextReadyError(f"Unknown type '{type}'; {nearest(type, TYPES)}")


def read_gguf(path: str | Path) -> Exported:
    """Open an exported model; its weights are memory-mapped, not read."""
    path = Path(path)
    if not path.exists():
        raise ContextReadyError(f"There is no exported model at {path}. Export one with: crt export RUN {path}")
    contents = read_gguf_file(path)
    fields = contents.fields
    architecture = fields.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise ContextReadyError(
            f"{path} contains another kind of model ({shown(architecture)}); only files written by crt export can be "
            "run."
        )
    if fields.get(f"{ARCHITECTURE}.format") not in FORMATS:
        raise ContextReadyError(
            f"{path} has format version {shown(fields.get(f'{ARCHITECTURE}.format'))}, but this version of "
            f"contextready reads {' and '.join(map(str, FORMATS))}; export it again, or update contextready."
        )
    config, trained_length = _read_fields(fields, len(contents.tensors), path)
    _check_weights(config, contents.tensors, path)
    return Exported(path, config, trained_length, fields, weights=contents.tensors)


def _describe(model: "ContextReady") -> "tuple[ExportedConfig, dict[str, Tensor]]":
    """The configuration of a model, and its tensors under the names used in the file."""
    from contextready.model.context_ready import ContextReady
    from contextready.model.correction_module import CorrectionModule, has_bias
    from contextready.model.transformer import Transformer

    if not isinstance(model, ContextReady) or type(model.backbone) is not Transformer:
        around = model.backbone if isinstance(model, ContextReady) else model
        raise ContextReadyError(
            f"A model around {type(around).__name__} cannot be exported; only native models (ContextReady around "
            "Transformer) can."
        )
    backbone, correction = model.backbone, model.correction
    definition = correction.definition
    if type(correction) is not CorrectionModule or definition not in (NO_CORRECTION, *CORRECTIONS.values()):
        own = definition if type(correction) is CorrectionModule else correction
        raise ContextReadyError(
            f"The correction {type(own).__name__} cannot be exported; use one of: {', '.join(CORRECTIONS)}."
        )
    _check_options(backbone.config)
    fields = (name for name in FIELDS if not name.startswith("correction"))
    config = ExportedConfig(
        **{name: getattr(backbone.config, name) for name in fields},
        correction=definition.name,
        correction_bias=has_bias(correction),
    )
    tensors = {name.removeprefix("backbone."): tensor for name, tensor in model.state_dict().items()}
    _fold_scale(tensors, correction.scale)
    if {name: tuple(tensor.shape) for name, tensor in tensors.items()} != dict(config.tensors()):
        raise ContextReadyError(
            "This model cannot be exported: its weights do not match its configuration. Export an unmodified model."
        )
    return config, tensors


def _check_options(config: TransformerConfig) -> None:
    """Refuse a model with settings that a file cannot describe, such as those of Llama."""
    for field in fields_of(TransformerConfig):
        name, value = field.name, getattr(config, field.name)
        is_described = value in ROPES if name == "rope" else name in FIELDS or name in IN_TRAINING
        if not is_described and value != field.default:
            raise ContextReadyError(
                f"A model with {name}={str(value).lower()} cannot be exported yet; run it from its folder with the "
                "engine eager or compiled."
            )


def _fold_scale(tensors: "dict[str, Tensor]", scale: float) -> None:
    """Multiply the correction's output layer by its factor, so that the file needs none."""
    gain = tensors.pop("correction.gain", None)
    for name in ("correction.ffn.down.weight", "correction.ffn.down.bias"):
        if name in tensors and (gain is not None or scale != 1.0):
            factor = scale if gain is None else gain.view(-1, 1) if name.endswith("weight") else gain
            tensors[name] = tensors[name] * factor


def _add_fields(writer: Any, config: ExportedConfig, trained_length: int, tokenizer: "Tokenizer | None") -> None:
    writer.add_uint32(f"{ARCHITECTURE}.format", FORMATS[config.rope != ExportedConfig.rope])
    writer.add_uint32(f"{ARCHITECTURE}.context_length", trained_length)
    add = {int: writer.add_uint32, float: writer.add_float64, bool: writer.add_bool, str: writer.add_string}
    for name, key in FIELDS.items():
        value = getattr(config, name)
        if name not in OPTIONAL or value != getattr(ExportedConfig, name):
            expected = FIELD_TYPES.get(name, int)
            add[expected](f"{ARCHITECTURE}.{key}", expected(value))
    if tokenizer is not None:
        write_tokenizer(writer, tokenizer)


def _read_fields(fields: dict[str, Any], tensors: int, path: Path) -> tuple[ExportedConfig, int]:
    """Read the configuration and the trained length from the fields of a file with this many tensors."""
    damaged = f"{path} is damaged: its sizes do not describe a model"
    try:
        known = {name: fields[f"{ARCHITECTURE}.{key}"] for name, key in FIELDS.items() if _stated(fields, name, key)}
        trained_length = fields[f"{ARCHITECTURE}.context_length"]
    except KeyError as error:
        raise ContextReadyError(f"{path} is damaged: the field {error} is missing; export it again.") from None
    right = all(type(known[name]) is FIELD_TYPES.get(name, int) for name in known)
    if not right or type(trained_length) is not int:
        raise ContextReadyError(f"{damaged}; export it again.")
    try:
        # Every layer has tensors, so nothing that loops over the layers takes longer than the file is long.
        check_range("layers", known["layers"], 1, tensors)
        check_range("context_length", trained_length, 1, LONGEST)
        return ExportedConfig(**known), trained_length
    except ContextReadyError as error:
        raise ContextReadyError(f"{damaged} ({str(error).rstrip('.')}); export it again.") from None


def _stated(fields: dict[str, Any], name: str, key: str) -> bool:
    return name not in OPTIONAL or f"{ARCHITECTURE}.{key}" in fields


def _check_weights(config: ExportedConfig, weights: dict[str, GgufTensor], path: Path) -> None:
    """Refuse missing and additional tensors, and tensors of a shape or type that the engine cannot run."""
    expected = set()
    for name, shape in config.tensors():
        expected.add(name)
        weight = weights.get(name)
        if weight is None:
            raise ContextReadyError(f"{path} is damaged: the tensor {name} is missing; export it again.")
        if weight.shape != shape:
            raise ContextReadyError(
                f"{path} is damaged: the tensor {name} has shape {weight.shape} instead of {shape}; export it again."
            )
        if weight.type not in (TYPES if len(shape) == 2 else ("f32",)):
            raise ContextReadyError(
                f"{path} contains {name} as {weight.type}, which cannot be run; export it again with one of the types "
                f"{', '.join(TYPES)}."
            )
    other = next((name for name in weights if name not in expected), None)
    if other is not None:
        raise ContextReadyError(f"{path} is damaged: its configuration has no tensor {shown(other)}; export it again.")


def _type_of(gguf: Any, shape: tuple[int, ...], type: str) -> Any:
    """The type in which a tensor is written."""
    if len(shape) == 1:
        return gguf.GGMLQuantizationType.F32
    if type.startswith("q") and shape[-1] % 32:
        return gguf.GGMLQuantizationType.F16
    return gguf.GGMLQuantizationType[type.upper()]
