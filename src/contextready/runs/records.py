"""The files of a checkpoint besides its tensors, read as checked values: one dataclass per file."""

import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from contextready.errors import ContextReadyError
from contextready.files import MANIFEST, Manifest, read_json, read_manifest
from contextready.formats.record import Count, read_record
from contextready.formats.safetensors_file import Header
from contextready.model.config import ModelConfig
from contextready.runs.config import RENAMED, PretrainedModelConfig, TrainConfig, with_new_names
from contextready.runs.sharded import METADATA
from contextready.runs.tasks import task_from_dict

FORMAT = "contextready-checkpoint"
NEEDED_FILES = ("config.json", "trainer.json", "rng.safetensors")
"""Files that every checkpoint has, besides its weights and moments."""
LARGEST_SETTINGS = 1 << 20
LARGEST_PROGRESS = 1 << 20
LARGEST_DESCRIPTION = 16 << 20
"""Bytes of config.json, trainer.json and pretrained.json."""
WORDS = 624
"""Size of the state of a Mersenne twister."""
Word = Annotated[int, range(1 << 32)]
Macs = Annotated[int, range(1 << 100)]
"""Multiply-accumulates of a long training exceed 64 bits."""


@dataclass(frozen=True)
class CheckpointManifest(Manifest):
    """The manifest of a checkpoint."""

    step: Count


@dataclass
class Progress:
    """The progress of a run."""

    step: Count = 0
    sequences: Count = 0
    """Position in the data: the number of training sequences read so far."""
    skipped_tokens: Count = 0
    """By how much they were shorter than the block size together, as with a curriculum over length."""
    seconds: float = 0.0
    """Time spent on optimizer steps."""
    macs: Macs = 0
    """Multiply-accumulates spent on optimizer steps."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """fp32 or bf16; with precision=auto, the choice made when the run began."""
    best_step: Count | None = None
    best_loss: float | None = None
    data_identity: str | None = None
    tokenizer_sha256: str | None = None
    solved: bool = False
    """Whether the last validation found the task solved."""


@dataclass(frozen=True)
class Generators:
    """The states of the random number generators of Python and numpy."""

    python: tuple[Literal[3], list[Word], float | None]
    numpy: tuple[Literal["MT19937"], list[Word], Annotated[int, range(WORDS + 1)], Annotated[int, range(2)], float]

    def __post_init__(self) -> None:
        # The last word of Python's state is the position in the others.
        if len(self.python[1]) != WORDS + 1 or self.python[1][-1] > WORDS or len(self.numpy[1]) != WORDS:
            raise ContextReadyError("a state has the wrong length; the file is damaged.")

    def restore(self) -> None:
        """Set both generators to these states."""
        version, words, gauss = self.python
        random.setstate((version, tuple(words), gauss))
        algorithm, keys, position, has_gauss, last = self.numpy
        np.random.set_state((algorithm, np.array(keys, dtype=np.uint32), position, has_gauss, last))


@dataclass(frozen=True)
class Settings:
    """The parts of config.json."""

    model: dict[str, Any]
    train: dict[str, Any]
    task: dict[str, Any] | None = None


@dataclass(frozen=True)
class Description:
    """The contents of pretrained.json: what is needed to rebuild a Hugging Face model besides the settings."""

    base_config: dict[str, Any]
    vocab_size: Annotated[int, range(1, 1 << 31)]
    structure: dict[str, Any]
    correction_bias: bool
    generation_config: dict[str, Any]
    correction_scale: float = 1.0
    native: bool = False
    """Whether the weights are those of a native transformer."""


def read_checkpoint_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a checkpoint, and check the sizes of its files."""
    manifest = read_manifest(folder, FORMAT, "a run or checkpoint", CheckpointManifest)
    tensors = () if METADATA in manifest["files"] else ("model.safetensors", "optimizer.safetensors")
    must_list(folder, manifest, *NEEDED_FILES, *tensors)
    return manifest


def must_list(folder: Path, manifest: dict[str, Any], *names: str) -> None:
    """Raise an error if the manifest of a checkpoint does not list these files."""
    for name in names:
        if name not in manifest["files"]:
            raise ContextReadyError(f"{folder / MANIFEST} does not list {name}; the checkpoint is damaged.")


def read_settings(path: Path) -> dict[str, Any]:
    """Read the settings of a run, as `RunConfig.as_dict` returns them; settings that did not exist yet are added."""
    value = read_json(path, LARGEST_SETTINGS)
    if not isinstance(value, dict) or not {"model", "train"} <= value.keys():
        raise ContextReadyError(f"{path} does not contain the settings of a run; the file is damaged.")
    parts = read_record(Settings, value, str(path))
    model_class = PretrainedModelConfig if "pretrained" in parts.model else ModelConfig
    model = read_record(model_class, parts.model, f"{path}, model")
    try:
        named = with_new_names(parts.train)
        if parts.task is not None:
            task_from_dict(parts.task)
    except ContextReadyError as error:
        raise ContextReadyError(f"{path}: {error}") from None
    if named.get("out") == "":
        named["out"] = "."  # a checkpoint that was converted from another format has no folder of its own
    train = read_record(TrainConfig, named, f"{path}, train", extra=True)
    settings = {"model": _completed(parts.model, model), "train": _completed(parts.train, train)}
    return settings if parts.task is None else settings | {"task": parts.task}


def read_progress(path: Path) -> Progress:
    """Read trainer.json without the generators."""
    value = read_json(path, LARGEST_PROGRESS)
    if isinstance(value, dict):
        value.pop("rng", None)
    return read_record(Progress, value, str(path))


def other_generators() -> dict[str, Any]:
    """Return the present states of the generators of Python and numpy, for trainer.json."""
    algorithm, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [algorithm, keys.tolist(), position, has_gauss, gauss],  # type: ignore[union-attr]
    }


def read_generators(path: Path) -> Generators:
    """Read the generators in trainer.json."""
    value = read_json(path, LARGEST_PROGRESS)
    return read_record(Generators, value.get("rng") if isinstance(value, dict) else None, f"{path}, rng")


def read_description(path: Path) -> dict[str, Any]:
    """Read pretrained.json."""
    value: dict[str, Any] = read_json(path, LARGEST_DESCRIPTION)
    read_record(Description, value, str(path), extra=True)
    return value


def check_description(path: Path, header: Header) -> None:
    """Refuse a description of a model that is far larger than its weights, before the model is built."""
    described = read_description(path)["base_config"]
    largest = max((size for info in header.tensors.values() for size in info.shape), default=0)
    for config in (described, *(inner for inner in described.values() if isinstance(inner, dict))):
        for keys, most in ((SIZES, largest), (INNER_SIZES, 64 * largest), (NUMBERS, len(header.tensors))):
            for key in keys:
                if isinstance(config.get(key), int) and config[key] > most:
                    raise ContextReadyError(
                        f"{path}, base_config, {key} does not fit the weights in {header.path}; the checkpoint is "
                        "damaged."
                    )


SIZES = ("vocab_size", "hidden_size", "n_embd", "d_model")
INNER_SIZES = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "head_dim", "num_attention_heads")
NUMBERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
"""Sizes in configurations of transformers that are a dimension of some weight, or at most the number of weights."""


def _completed(saved: dict[str, Any], settings: Any) -> dict[str, Any]:
    """The saved values, and the defaults of settings that did not exist when they were saved."""
    known = {RENAMED.get(key, key) for key in saved}
    return {key: value for key, value in asdict(settings).items() if key not in known} | saved
