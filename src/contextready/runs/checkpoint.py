"""Checkpoints: everything a run needs to go on as if it had never stopped, in plain files without pickle.

    RUN/checkpoints/step-00001000/
        model.safetensors       weights
        config.json             settings of model and training
        tokenizer.json          so that the weights are never without it
        optimizer.safetensors   moments, by the names of the weights
        rng.safetensors         state of torch's generators
        trainer.json            step, data position, best validation, other generators
        pretrained.json         of a model of Hugging Face: its configuration
        manifest.json           size and SHA-256 of each

With parallel=fsdp weights and moments lie in PyTorch's distributed format instead (`sharded.py`). A checkpoint is
written aside, forced to disk and renamed, so every folder named step-… is whole. Runs write them in `train/saving.py`.
"""

import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from contextready.data.shards import Data
from contextready.data.tokenizer import FILE as TOKENIZER_FILE
from contextready.errors import ContextReadyError
from contextready.files import (
    check_sums,
    partial_name,
    read_json,
    read_manifest,
    remove_folder,
    staged_folder,
    write_json,
    write_manifest,
)
from contextready.model.config import ModelConfig
from contextready.model.context_ready import ContextReady
from contextready.model.transformer import Transformer
from contextready.runs.config import PretrainedModelConfig, build_model_settings
from contextready.runs.models import hugging_face, is_pretrained, rebuild_model
from contextready.runs.sharded import METADATA, read_whole
from contextready.runs.tasks import task_from_dict

FORMAT = "contextready-checkpoint"
FOLDER = "checkpoints"
PRETRAINED_FILE = "pretrained.json"
TOKENIZER_FILES = (TOKENIZER_FILE, "tokenizer_config.json")


@dataclass
class Progress:
    """Where a run stands."""

    step: int = 0
    sequences: int = 0
    """Data position: training sequences read so far."""
    seconds: float = 0.0
    """Time spent on updates."""
    macs: int = 0
    """Multiply-accumulates spent on updates."""
    precision: str = "fp32"
    """fp32 or bf16: what `auto` came to when the run began."""
    best_step: int | None = None
    best_loss: float | None = None
    data_identity: str | None = None
    tokenizer_sha256: str | None = None
    solved: bool = False
    """Whether the last validation left nothing to learn."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk, whole and of the right kind."""

    folder: Path
    config: dict[str, Any]
    """Settings, as `RunConfig.as_dict` gives them."""
    progress: Progress
    sharded: bool
    """Whether weights and moments are in the distributed format; its manifest says so, not a file that lies about."""

    @property
    def model_config(self) -> ModelConfig | PretrainedModelConfig:
        """The model's settings."""
        return build_model_settings(self.config["model"])

    @property
    def native_config(self) -> ModelConfig:
        """The model's settings, where it is this package's own."""
        config = self.model_config
        if isinstance(config, ModelConfig):
            return config
        raise ContextReadyError(
            f"{self.folder} holds a pretrained model of Hugging Face, for which this is not made; crt convert "
            f"{self.folder} OUT writes it in that format."
        )

    @property
    def vocab_size(self) -> int:
        """The tokens it knows."""
        config, described = self.model_config, self.described
        if isinstance(config, ModelConfig):
            return config.vocab_size
        assert described is not None
        return int(described["vocab_size"])

    @property
    def described(self) -> dict[str, Any] | None:
        """What a pretrained model is besides its settings and weights."""
        return read_json(self.folder / PRETRAINED_FILE) if "pretrained" in self.config["model"] else None

    def must_have_learned_text(self) -> None:
        """Refuse a model of another task, where text is to be read or written."""
        if "task" in self.config:
            task = task_from_dict(self.config["task"])
            raise ContextReadyError(
                f"{self.folder} learned {task.title}, not text; {task.command} scores such models as they learn."
            )

    def model(self) -> ContextReady:
        """The trained model, on the CPU and ready to evaluate."""
        model = rebuild_model(self.model_config, self.described)
        load_weights(model, self.tensors("model"), self.folder)
        return model.eval()

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of one of its files."""
        from safetensors.torch import load_file

        if self.sharded and name != "rng":
            raise ContextReadyError(
                f"{self.folder} is a sharded checkpoint, whose metadata is a pickle; if it is yours, make a plain one "
                f"with crt unshard {self.folder} OUT."
            )
        return load_file(self.folder / f"{name}.safetensors")


def open_checkpoint(path: Path, best: bool = False, verify: bool = True) -> Checkpoint:
    """Open a checkpoint's folder, or a run's: its newest, or its best by validation. Checksums are compared."""
    if not path.is_dir():
        raise ContextReadyError(f"There is no run or checkpoint at {path}.")
    folder = path
    if (path / FOLDER).is_dir():
        newest = newest_checkpoint(path)
        if newest is None:
            raise ContextReadyError(f"The run {path} has no checkpoint yet.")
        folder = newest
        if best:
            step = _progress(folder).best_step
            if step is None:
                raise ContextReadyError(
                    f"The run {path} has not been validated yet, so none of its checkpoints is best."
                )
            folder = step_folder(path, step)
    elif (path / "metrics.jsonl").is_file():
        raise ContextReadyError(f"The run {path} has no checkpoint yet.")
    manifest = read_manifest(folder, FORMAT, "a run or checkpoint")
    if verify:
        check_sums(folder, manifest)
    config = read_json(folder / "config.json")
    if not isinstance(config, dict) or not {"model", "train"} <= config.keys():
        raise ContextReadyError(f"{folder / 'config.json'} does not hold the settings of a run: it is damaged.")
    return Checkpoint(folder, config, _progress(folder), METADATA in manifest["files"])


def open_trained(path: Path, best: bool = False) -> Checkpoint:
    """Open a run or a checkpoint, or a folder with a model of Hugging Face."""
    if not is_pretrained(path):
        return open_checkpoint(path, best)
    opened: Checkpoint = hugging_face().open_folder(path)
    return opened


def data_of(checkpoint: Checkpoint, folder: Path | None) -> Data:
    """Data to evaluate on: what the model was trained on, or other data made with the same tokenizer."""
    checkpoint.must_have_learned_text()
    trained_on = checkpoint.config["train"]["data"]
    if folder is None and not trained_on:
        raise ContextReadyError(f"{checkpoint.folder} does not say what it was trained on; name data with --data.")
    data = Data(folder or Path(trained_on), verify=["val"])
    data.tokenizer()
    if data.tokenizer_sha256 != checkpoint.progress.tokenizer_sha256:
        raise ContextReadyError(
            f"The data {data.folder} was made with another tokenizer than the model {checkpoint.folder}; prepare it "
            f"again with crt data prepare --tokenizer {checkpoint.folder}."
        )
    if data.vocab_size > checkpoint.vocab_size:
        raise ContextReadyError(
            f"The data {data.folder} has {data.vocab_size:,} kinds of tokens and the model "
            f"{checkpoint.folder} knows {checkpoint.vocab_size:,}; evaluate it on its own data."
        )
    return data


def newest_checkpoint(run: Path) -> Path | None:
    """The folder of a run's newest checkpoint."""
    return max((run / FOLDER).glob("step-*"), default=None)


def step_folder(run: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return run / FOLDER / f"step-{step:08d}"


def write_tensors(folder: Path, weights: dict[str, Tensor], moments: dict[str, Tensor]) -> None:
    """Weights and moments as safetensors."""
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    save_file({name: tensor.contiguous() for name, tensor in moments.items()}, folder / "optimizer.safetensors")


def write_rest(
    folder: Path,
    config: dict[str, Any],
    progress: Progress,
    generators: dict[str, Tensor],
    tokenizer_folder: Path | None,
    *,
    described: dict[str, Any] | None = None,
) -> None:
    """Everything of a checkpoint but weights and moments, and the manifest at last."""
    from safetensors.torch import save_file

    save_file(generators, folder / "rng.safetensors")
    if described is not None:
        write_json(folder / PRETRAINED_FILE, described)
    write_json(folder / "config.json", config)
    write_json(folder / "trainer.json", vars(progress) | {"rng": _other_generators()})
    for file in TOKENIZER_FILES:
        if tokenizer_folder is not None and (tokenizer_folder / file).is_file():
            shutil.copyfile(tokenizer_folder / file, folder / file)
    write_manifest(folder, FORMAT, {"step": progress.step})


def unshard(path: Path, out: Path) -> Path:
    """Write a plain checkpoint from a sharded one, or a run's newest. Its metadata is a pickle: only for your own."""
    checkpoint = open_checkpoint(path)
    if not checkpoint.sharded:
        raise ContextReadyError(f"{checkpoint.folder} is a plain checkpoint already.")
    if out.exists():
        raise ContextReadyError(f"{out} exists already; choose another folder.")
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
    """The parameters of a model under the names that checkpoints have for them."""
    if isinstance(model, ContextReady) and not model.is_recurrent and isinstance(model.backbone, Transformer):
        # A plain transformer's weights are saved under its own names, not as the backbone of something.
        return dict(model.backbone.named_parameters())
    return dict(model.named_parameters())


def load_weights(model: nn.Module, tensors: dict[str, Tensor], where: Path) -> None:
    """Copy tensors into the parameters of the same names and shapes; anything amiss is refused."""
    named = named_weights(model)
    check_shapes(named, {name: tensor.shape for name, tensor in tensors.items()}, where)
    for name, p in named.items():
        fill(p, tensors[name])


def check_shapes(named: dict[str, nn.Parameter], saved: dict[str, torch.Size], where: Path) -> None:
    """Refuse weights of another model than these parameters are of."""
    wrong = sorted(
        name
        for name in named.keys() | saved.keys()
        if name not in named or name not in saved or named[name].shape != saved[name]
    )
    if wrong:
        raise ContextReadyError(
            f"The weights in {where} are of another model ({len(wrong)} differ, for example {wrong[0]})."
        )


@torch.no_grad()
def fill(place: Tensor, tensor: Tensor) -> None:
    """Copy a whole tensor into its place, of which this process may hold a part."""
    if hasattr(place, "device_mesh"):
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(place, DTensor)
        tensor = distribute_tensor(tensor.to(place.device), place.device_mesh, place.placements)
    place.copy_(tensor)


def clear_leftovers(run: Path) -> None:
    """Remove what a killed process left half-written or half-deleted."""
    for leftover in (run / FOLDER).glob(partial_name(Path("*")).name):
        shutil.rmtree(leftover)


def _progress(folder: Path) -> Progress:
    saved = read_json(folder / "trainer.json")
    return Progress(**{key: value for key, value in saved.items() if key != "rng"})


def prune(run: Path, keep: int, best_step: int | None) -> None:
    """Delete the checkpoints that are no longer kept."""
    folders = sorted((run / FOLDER).glob("step-*"))
    kept = {*folders[-keep:], *([] if best_step is None else [step_folder(run, best_step)])}
    for folder in folders:
        if folder not in kept:
            remove_folder(folder)


def _other_generators() -> dict[str, Any]:
    algorithm, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [algorithm, keys.tolist(), position, has_gauss, gauss],  # type: ignore[union-attr]
    }
