"""The exported model: one GGUF file with weights, sizes and tokenizer, written with torch and read without it."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from contextready.errors import ContextReadyError
from contextready.extras import require
from contextready.files import staged_file
from contextready.formats.gguf_file import GgufTensor, read_gguf_file
from contextready.formats.limits import shown
from contextready.infer.ggml.config import (
    ARCHITECTURE,
    FIELDS,
    FORMATS,
    OF_FAMILIES,
    ExportedConfig,
    add_fields,
    read_fields,
)
from contextready.infer.ggml.quantize import TYPES, Quantizer, check_type, type_of
from contextready.infer.ggml.tokenizer_fields import read_tokenizer, write_tokenizer
from contextready.model.correction import CORRECTIONS, NO_CORRECTION

if TYPE_CHECKING:
    from torch import Tensor

    from contextready.data.tokenizer import Tokenizer
    from contextready.model.context_ready import ContextReady


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
        return self.weights[self._head].type

    @property
    def step_bytes(self) -> int:
        """Bytes of weights read per predicted token: all but those of an embedding of which only one row is read."""
        rows = {"embedding.weight"} - {self._head}
        return sum(w.data.nbytes for name, w in self.weights.items() if name not in rows)

    @property
    def _head(self) -> str:
        return "embedding.weight" if self.config.tied_embeddings else "unembedding.weight"

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

    `type` is the type of the matrices: f32, f16, q8_0, q4_0 or q4_k. Norms and biases are always f32. A matrix whose
    row length is not a multiple of 32 (256 for q4_k) cannot be quantised and is written in f16 instead, so that every
    width can be exported. `advance(total, done)` is called whenever `done` more of `total` bytes have been written.
    """
    check_type(type)
    if trained_length < 1:
        raise ContextReadyError(
            f"trained_length must be at least 1, but got {trained_length}; it is the length of the training sequences."
        )
    config, tensors = describe(model)
    gguf, quantizer, target = require("gguf", "ggml"), Quantizer(), Path(path)
    with staged_file(target) as staging, closing(gguf.GGUFWriter(staging, ARCHITECTURE)) as writer:
        # Only now is it certain that no other process is writing the same file.
        check_absent(target, overwrite)
        add_fields(writer, config, trained_length)
        if tokenizer is not None:
            write_tokenizer(writer, tokenizer)
        types = {name: type_of(shape, type) for name, shape in config.tensors()}
        sizes = {name: quantizer.size(shape, types[name]) for name, shape in config.tensors()}
        for name, shape in config.tensors():
            number = quantizer.number(types[name])
            writer.add_tensor_info(name, shape, np.dtype(np.float32), sizes[name], number)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        # One tensor at a time, so that memory never holds a quantised copy of the whole model.
        for name, _ in config.tensors():
            values = tensors[name].detach().float().cpu().numpy()
            writer.write_tensor_data(quantizer.convert(np.ascontiguousarray(values), types[name]))
            advance(sum(sizes.values()), sizes[name])
        writer.flush()
    return target.stat().st_size


def check_absent(path: Path, overwrite: bool) -> None:
    """Refuse to replace an existing file, unless that was requested."""
    if path.exists() and not overwrite:
        raise ContextReadyError(f"{path} already exists; delete it, choose another name, or pass --overwrite.")


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
            f"contextready reads {FORMATS[0]} to {FORMATS[-1]}; export it again, or update contextready."
        )
    config, trained_length = read_fields(fields, len(contents.tensors), path)
    _check_weights(config, contents.tensors, path)
    return Exported(path, config, trained_length, fields, weights=contents.tensors)


def describe(model: "ContextReady") -> "tuple[ExportedConfig, dict[str, Tensor]]":
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
    fields = (name for name in FIELDS | OF_FAMILIES if not name.startswith("correction"))
    config = ExportedConfig(
        **{name: getattr(backbone.config, name) for name in fields},
        correction=definition.name,
        correction_bias=has_bias(correction),
    )
    tensors = {name.removeprefix("backbone."): tensor for name, tensor in model.state_dict().items()}
    _fold_scale(tensors, correction.scale)
    if config.tied_embeddings and backbone.unembedding.weight is backbone.embedding.weight:
        del tensors["unembedding.weight"]
    if {name: tuple(tensor.shape) for name, tensor in tensors.items()} != dict(config.tensors()):
        raise ContextReadyError(
            "This model cannot be exported: its weights do not match its configuration. Export an unmodified model."
        )
    return config, tensors


def _fold_scale(tensors: "dict[str, Tensor]", scale: float) -> None:
    """Multiply the correction's output layer by its factor, so that the file needs none."""
    gain = tensors.pop("correction.gain", None)
    for name in ("correction.ffn.down.weight", "correction.ffn.down.bias"):
        if name in tensors and (gain is not None or scale != 1.0):
            factor = scale if gain is None else gain.view(-1, 1) if name.endswith("weight") else gain
            tensors[name] = tensors[name] * factor


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
