"""Checkpoints: everything that a run needs to resume exactly where it stopped, in plain files without pickle.

    RUN/checkpoints/step-00001000/
        model.safetensors       weights
        config.json             settings of the model and the training
        tokenizer.json          a copy, so that the weights always come with their tokenizer
        optimizer.safetensors   optimizer moments, by the names of the weights
        rng.safetensors         states of torch's random number generators
        trainer.json            step, data position, best validation, states of the other generators
        pretrained.json         configuration of the Hugging Face model, if it is one
        manifest.json           size and SHA-256 of each file

With parallel=fsdp, weights and moments are in PyTorch's distributed format instead (`sharded.py`). A checkpoint is
written under a temporary name, flushed to disk and renamed, so every folder named step-… is complete. Runs write them
in `train/saving.py`.
"""

import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from contextready.data.shards import Data
from contextready.data.tokenizer import FILE as TOKENIZER_FILE
from contextready.data.tokenizer import Tokenizer
from contextready.errors import ContextReadyError
from contextready.files import (
    MANIFEST,
    check_name,
    check_sums,
    partial_name,
    remove,
    staged_folder,
    write_json,
    write_manifest,
)
from contextready.formats.safetensors_file import FLOATS, load_tensors, read_header, save_tensors
from contextready.model.config import ModelConfig
from contextready.model.context_ready import ContextReady
from contextready.model.shapes import weight_shapes
from contextready.model.transformer import Transformer
from contextready.runs.config import PretrainedModelConfig, build_model_settings
from contextready.runs.models import hugging_face, is_pretrained, rebuild_model
from contextready.runs.records import (
    FORMAT,
    check_description,
    must_list,
    other_generators,
    read_checkpoint_manifest,
    read_description,
    read_progress,
    read_settings,
)
from contextready.runs.records import Progress as Progress
from contextready.runs.sharded import METADATA, read_whole
from contextready.runs.tasks import task_from_dict

FOLDER = "checkpoints"
PRETRAINED_FILE = "pretrained.json"
TOKENIZER_FILES = (TOKENIZER_FILE, "tokenizer_config.json")
STEP = re.compile(r"step-\d{8,18}")


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint, whose format and files have been checked."""

    folder: Path
    config: dict[str, Any]
    """The settings, as `RunConfig.as_dict` returns them."""
    progress: Progress
    sharded: bool
    """Whether weights and moments are in the distributed format, according to the manifest."""

    @property
    def model_config(self) -> ModelConfig | PretrainedModelConfig:
        """The settings of the model."""
        return build_model_settings(self.config["model"])

    @property
    def native_config(self) -> ModelConfig:
        """The settings of a native model; it is an error if this is a pretrained one."""
        config = self.model_config
        if isinstance(config, ModelConfig):
            return config
        raise ContextReadyError(
            f"{self.folder} holds a pretrained Hugging Face model, which is not supported here. Use it in Hugging Face "
            f"format instead: crt convert {self.folder} OUT"
        )

    @property
    def vocab_size(self) -> int:
        """The vocabulary size of the model."""
        config, described = self.model_config, self.described
        if isinstance(config, ModelConfig):
            return config.vocab_size
        assert described is not None
        return int(described["vocab_size"])

    @property
    def described(self) -> dict[str, Any] | None:
        """The configuration of a pretrained model, which is needed to rebuild it; None for a native model."""
        return read_description(self.folder / PRETRAINED_FILE) if "pretrained" in self.config["model"] else None

    @property
    def trained_length(self) -> int:
        """The number of tokens in the sequences that the model was trained on."""
        length: int = self.config["train"]["block_size"]
        return length

    def tokenizer(self) -> Tokenizer:
        """Load the tokenizer, with the conventions of the model that training started from."""
        if isinstance(self.model_config, ModelConfig):
            return Tokenizer.load(self.folder)
        loaded: Tokenizer = hugging_face().checkpoint_tokenizer(self)
        return loaded

    def must_have_learned_text(self) -> None:
        """Raise an error if the model knows only a task other than language modelling."""
        if "task" in self.config and isinstance(self.model_config, ModelConfig):
            task = task_from_dict(self.config["task"])
            raise ContextReadyError(
                f"{self.folder} was trained on {task.title}, not on text; use {task.command} for such models."
            )

    def places_of(self, path: str) -> list[Path]:
        """Return where a path in the settings may be: below the current folder, and where the run was started."""
        folder = Path(os.path.abspath(self.folder))
        run = folder.parents[1] if folder.parent.name == FOLDER else folder
        out = Path(self.config["train"].get("out") or "")
        places = [Path(path)]
        # A run in /a/runs/x with out=runs/x was started in /a.
        if out.parts and not out.is_absolute() and run.parts[-len(out.parts) :] == out.parts:
            started_in = run.parents[len(out.parts) - 1]
            if started_in / path != Path(path).absolute():
                places.append(started_in / path)
        return places

    def model(self) -> ContextReady:
        """Load the trained model on the CPU, in evaluation mode."""
        self.check_weights()
        model = rebuild_model(self.model_config, self.described)
        load_weights(model, self.tensors("model", shapes_of(named_weights(model))), self.folder)
        return model.eval()

    def check_weights(self) -> None:
        """Raise an error if the weights do not have the sizes that the settings imply, before a model is built."""
        self._must_be_plain()
        header, config = read_header(self._file("model")), self.model_config
        if isinstance(config, ModelConfig):
            # More weights than that differ anyway, and a hostile configuration may imply any number of them.
            header.check_fits(dict(islice(weight_shapes(config), 2 * len(header.tensors) + 100)))
        else:
            check_description(self.folder / PRETRAINED_FILE, header)

    def tensors(
        self,
        name: str,
        expected: Mapping[str, Sequence[int]] | None = None,
        dtypes: Iterable[str] = FLOATS,
    ) -> dict[str, Tensor]:
        """Load the tensors of one of the files: model, optimizer or rng.

        If names and shapes are expected, other ones are refused before anything is loaded.
        """
        if name != "rng":
            self._must_be_plain()
        return load_tensors(self._file(name), expected, dtypes)

    def saved_names(self, name: str) -> set[str]:
        """The names of the tensors in one of the files."""
        return set(read_header(self._file(name)).tensors)

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def _must_be_plain(self) -> None:
        if self.sharded:
            raise ContextReadyError(
                f"{self.folder} is a sharded checkpoint, whose metadata is a pickle. If you trust it, convert it to a "
                f"plain one with: crt unshard {self.folder} OUT"
            )


def open_checkpoint(path: Path, best: bool = False, verify: bool = True) -> Checkpoint:
    """Open a checkpoint, or the newest or best one of a run. `verify` compares the checksums of all files."""
    if not path.is_dir():
        raise ContextReadyError(f"There is no run or checkpoint at {path}.")
    folder = path
    if (path / FOLDER).is_dir():
        newest = newest_checkpoint(path)
        if newest is None:
            raise ContextReadyError(f"The run {path} has no checkpoint yet.")
        folder = _best_checkpoint(path, newest, verify) if best else newest
    elif (path / "metrics.jsonl").is_file():
        raise ContextReadyError(f"The run {path} has no checkpoint yet.")
    manifest = read_checkpoint_manifest(folder)
    if verify:
        check_sums(folder, manifest)
    config, progress = read_settings(folder / "config.json"), read_progress(folder / "trainer.json")
    if "pretrained" in config["model"]:
        must_list(folder, manifest, PRETRAINED_FILE)
    if progress.step != manifest["step"]:
        raise ContextReadyError(
            f"{folder / 'trainer.json'} is of step {progress.step}, but {MANIFEST} of step {manifest['step']}; the "
            "checkpoint is damaged."
        )
    return Checkpoint(folder, config, progress, METADATA in manifest["files"])


def _best_checkpoint(run: Path, newest: Path, verify: bool) -> Path:
    """Return the folder of the best checkpoint, which the newest one names."""
    manifest = read_checkpoint_manifest(newest)
    if verify:
        check_sums(newest, manifest, ["trainer.json"])
    step = read_progress(newest / "trainer.json").best_step
    if step is None:
        raise ContextReadyError(f"The run {run} has not been validated yet, so it has no best checkpoint.")
    best = step_folder(run, step)
    if not best.is_dir():
        raise ContextReadyError(f"The best checkpoint of {run}, {best.name}, is missing; use the newest one.")
    return best


def open_trained(path: Path, best: bool = False) -> Checkpoint:
    """Open a run, a checkpoint, or a folder with a model in Hugging Face format."""
    if not is_pretrained(path):
        return open_checkpoint(path, best)
    opened: Checkpoint = hugging_face().open_folder(path)
    return opened


def data_of(checkpoint: Checkpoint, folder: Path | None) -> Data:
    """Open the data to evaluate on: the data in `folder`, or by default the data that the model was trained on."""
    checkpoint.must_have_learned_text()
    data = Data(folder or _training_data(checkpoint), verify=["val"])
    data.tokenizer()
    if data.tokenizer_sha256 != checkpoint.progress.tokenizer_sha256:
        raise ContextReadyError(
            f"{data.folder} was prepared with another tokenizer than that of {checkpoint.folder}. Prepare the data "
            f"with: crt data prepare OUT FILES --tokenizer {checkpoint.folder}"
        )
    if data.vocab_size > checkpoint.vocab_size:
        raise ContextReadyError(
            f"{data.folder} has a vocabulary of {data.vocab_size:,}, but {checkpoint.folder} has only "
            f"{checkpoint.vocab_size:,}; pass other data with --data FOLDER."
        )
    return data


def _training_data(checkpoint: Checkpoint) -> Path:
    """Find the data that a model was trained on."""
    recorded, identity = checkpoint.config["train"]["data"], checkpoint.progress.data_identity
    if not recorded:
        raise ContextReadyError(f"{checkpoint.folder} does not record its training data; pass --data FOLDER.")
    places = checkpoint.places_of(recorded)
    found = [place for place in places if place.is_dir()]
    for place in found:
        if identity is None or Data(place, verify=()).identity == identity:
            return place
    if found:
        raise ContextReadyError(
            f"The data in {found[0]} is not the data that {checkpoint.folder} was trained on; pass --data FOLDER to "
            "choose the data to evaluate on."
        )
    raise ContextReadyError(
        f"The data that {checkpoint.folder} was trained on was not found at {' or '.join(map(str, places))}; pass its "
        "folder with --data FOLDER."
    )


def newest_checkpoint(run: Path) -> Path | None:
    """Return the folder of the newest checkpoint of a run, if it has one."""
    return max(all_checkpoints(run), key=_step, default=None)


def all_checkpoints(run: Path) -> list[Path]:
    """Return the folders of all checkpoints of a run, from the oldest to the newest."""
    found = [path for path in (run / FOLDER).glob("step-*") if STEP.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=_step)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def step_folder(run: Path, step: int) -> Path:
    """Return the folder of the checkpoint of this step."""
    return run / FOLDER / f"step-{step:08d}"


def write_tensors(folder: Path, weights: dict[str, Tensor], moments: dict[str, Tensor]) -> None:
    """Write weights and moments as safetensors."""
    save_tensors(folder / "model.safetensors", weights)
    save_tensors(folder / "optimizer.safetensors", moments)


def write_rest(
    folder: Path,
    config: dict[str, Any],
    progress: Progress,
    generators: dict[str, Tensor],
    tokenizer_folder: Path | None,
    *,
    described: dict[str, Any] | None = None,
) -> None:
    """Write everything in a checkpoint except weights and moments; the manifest comes last."""
    save_tensors(folder / "rng.safetensors", generators)
    if described is not None:
        write_json(folder / PRETRAINED_FILE, described)
    write_json(folder / "config.json", config)
    write_json(folder / "trainer.json", vars(progress) | {"rng": other_generators()})
    for file in TOKENIZER_FILES:
        if tokenizer_folder is not None and (tokenizer_folder / file).is_file():
            shutil.copyfile(tokenizer_folder / file, folder / file)
    write_manifest(folder, FORMAT, {"step": progress.step})


def unshard(path: Path, out: Path) -> Path:
    """Convert a sharded checkpoint, or the newest one of a run, to a plain checkpoint in `out`.

    This loads a pickle, which can run code, so use it on your own checkpoints only.
    """
    check_name(out)
    checkpoint = open_checkpoint(path)
    if not checkpoint.sharded:
        raise ContextReadyError(f"{checkpoint.folder} is already a plain checkpoint.")
    if out.exists():
        raise ContextReadyError(f"{out} already exists; choose another folder.")
    tensors = read_whole(checkpoint.folder)
    weights = {name.removeprefix("model/"): t for name, t in tensors.items() if name.startswith("model/")}
    moments = {name: t for name, t in tensors.items() if not name.startswith("model/")}
    config = checkpoint.config | {"train": checkpoint.config["train"] | {"parallel": "ddp"}}
    with staged_folder(out) as staging:
        write_tensors(staging, weights, moments)
        for file in ("rng.safetensors", "trainer.json", PRETRAINED_FILE, *TOKENIZER_FILES):
            if (checkpoint.folder / file).is_file():
                shutil.copyfile(checkpoint.folder / file, staging / file)
        write_json(staging / "config.json", config)
        write_manifest(staging, FORMAT, {"step": checkpoint.progress.step})
    return out


def named_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a model by their names in checkpoints."""
    if isinstance(model, ContextReady) and not model.is_recurrent and isinstance(model.backbone, Transformer):
        # The weights of a plain transformer are saved under its own names, without the prefix "backbone.".
        return dict(model.backbone.named_parameters())
    return dict(model.named_parameters())


def load_weights(model: nn.Module, tensors: dict[str, Tensor], where: Path) -> None:
    """Copy tensors into the parameters of the same names. It is an error if names or shapes differ."""
    named = named_weights(model)
    check_shapes(named, shapes_of(tensors), where)
    for name, p in named.items():
        fill(p, tensors[name])


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    """Return the shapes of tensors by their names."""
    return {name: tensor.shape for name, tensor in tensors.items()}


def check_shapes(named: dict[str, nn.Parameter], saved: dict[str, torch.Size], where: Path) -> None:
    """Raise an error if the names or shapes of saved weights differ from those of the parameters."""
    wrong = sorted(
        name
        for name in named.keys() | saved.keys()
        if name not in named or name not in saved or named[name].shape != saved[name]
    )
    if wrong:
        raise ContextReadyError(
            f"The weights in {where} do not fit this model ({len(wrong)} differ, for example {wrong[0]})."
        )


@torch.no_grad()
def fill(place: Tensor, tensor: Tensor) -> None:
    """Copy a whole tensor into `place`, of which this process may hold only a shard."""
    if hasattr(place, "device_mesh"):
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(place, DTensor)
        tensor = distribute_tensor(tensor.to(place.device), place.device_mesh, place.placements)
    place.copy_(tensor)


def clear_leftovers(run: Path) -> None:
    """Remove checkpoints that a killed process left partly written or partly deleted."""
    for leftover in (run / FOLDER).glob(partial_name(Path("*")).name):
        remove(leftover)
