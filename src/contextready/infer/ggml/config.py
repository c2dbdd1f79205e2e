"""The configuration of an exported model, and the fields of a file that describe it."""

from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any

from contextready.errors import ContextReadyError
from contextready.formats.limits import check_range
from contextready.model.config import TransformerConfig
from contextready.model.correction import CORRECTIONS
from contextready.model.shapes import Shape, backbone_shapes, correction_shapes

ARCHITECTURE = "contextready"
FORMATS = (1, 2, 3)
"""The versions of the format that can be read. Older programs would misread what the later ones describe: version 2
says how channels rotate, and version 3 has the settings of Llama and other families."""
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
        if self.correction is not None and self.correction not in CORRECTIONS:
            raise ContextReadyError(f"Unknown correction '{self.correction}'; update contextready to read this file.")

    def tensors(self) -> Iterator[Shape]:
        """Name and shape of every tensor, in the order of the file."""
        yield from backbone_shapes(self)
        yield from correction_shapes(self.correction, self.width, self.correction_bias)


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
OF_FAMILIES = {
    "norm": "norm",
    "norm_eps": "attention.layer_norm_epsilon",
    "ffn": "ffn",
    "ffn_width": "feed_forward_length",
    "kv_heads": "attention.head_count_kv",
    "head_width": "attention.key_length",
    "qk_norm": "qk_norm",
    "qkv_bias": "qkv_bias",
    "tied_embeddings": "tied_embeddings",
    "rope_factor": "rope.scaling.factor",
    "rope_low": "rope.scaling.low_freq_factor",
    "rope_high": "rope.scaling.high_freq_factor",
    "rope_length": "rope.scaling.original_context_length",
    "no_rope_every": "no_rope_every",
}
"""The fields of version 3, which are absent from files whose model has their default."""
RMS_EPSILON = "attention.layer_norm_rms_epsilon"
"""GGUF's name of the epsilon of RMS norms."""
FIELD_TYPES = {
    **dict.fromkeys(("extra_ffn", "bias", "head_bias", "correction_bias"), bool),
    **dict.fromkeys(("qk_norm", "qkv_bias", "tied_embeddings"), bool),
    **dict.fromkeys(("rope_base", "norm_eps", "rope_factor", "rope_low", "rope_high"), float),
    **dict.fromkeys(("rope", "correction", "norm", "ffn"), str),
}
"""The types of the fields that are not whole numbers."""
IN_TRAINING = ("dropout", "attention_dropout", "dropout_at", "init")
"""Settings that change nothing in an exported model."""
OPTIONAL = ("window", "correction", "rope", "head_bias", *OF_FAMILIES)
"""Fields that are absent from files whose model has their default."""
DEFAULTS = {field.name: field.default for field in fields_of(ExportedConfig)}


def key_of(name: str, norm: str) -> str:
    """The key of a field in a file whose model has these norms."""
    known = RMS_EPSILON if (name, norm) == ("norm_eps", "rms") else (FIELDS | OF_FAMILIES)[name]
    return f"{ARCHITECTURE}.{known}"


def add_fields(writer: Any, config: ExportedConfig, trained_length: int) -> None:
    """Add a configuration to a `gguf.GGUFWriter`."""
    writer.add_uint32(f"{ARCHITECTURE}.format", format_of(config))
    writer.add_uint32(f"{ARCHITECTURE}.context_length", trained_length)
    add = {int: writer.add_uint32, float: writer.add_float64, bool: writer.add_bool, str: writer.add_string}
    for name in FIELDS | OF_FAMILIES:
        value = getattr(config, name)
        if name not in OPTIONAL or value != DEFAULTS[name]:
            expected = FIELD_TYPES.get(name, int)
            add[expected](key_of(name, config.norm), expected(value))


def format_of(config: ExportedConfig) -> int:
    """The first version of the format that describes this model."""
    if config.rope in ("linear", "llama3") or any(getattr(config, name) != DEFAULTS[name] for name in OF_FAMILIES):
        return FORMATS[2]
    return FORMATS[config.rope != DEFAULTS["rope"]]


def read_fields(fields: dict[str, Any], tensors: int, path: Path) -> tuple[ExportedConfig, int]:
    """Read the configuration and the trained length from the fields of a file with this many tensors."""
    damaged = f"{path} is damaged: its sizes do not describe a model"
    keys = {name: key_of(name, str(fields.get(f"{ARCHITECTURE}.norm"))) for name in FIELDS | OF_FAMILIES}
    try:
        known = {name: fields[key] for name, key in keys.items() if name not in OPTIONAL or key in fields}
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
