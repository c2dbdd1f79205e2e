"""Checkpoints: everything a run needs to go on as if it had never stopped, in plain files without pickle.

    RUN/checkpoints/step-00001000/
        model.safetensors       weights
        config.json             settings of model and training
        tokenizer.json          so that the weights are never without it
        optimizer.safetensors   moments, by the names of the weights
        rng.safetensors         state of torch's generators
        trainer.json            step, data position, best validation, other generators
        manifest.json           size and SHA-256 of each

A checkpoint is written aside, forced to disk and renamed, so every folder named step-… is whole.
"""

import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

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
from contextready.model.build import ModelConfig, build_model
from contextready.model.context_ready import ContextReady
from contextready.model.transformer import Transformer
from contextready.settings import build_settings

FORMAT = "contextready-checkpoint"
FOLDER = "checkpoints"
MOMENTS = ("step", "exp_avg", "exp_avg_sq")
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


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk, whole and of the right kind."""

    folder: Path
    config: dict[str, Any]
    """Settings, as `RunConfig.as_dict` gives them."""
    progress: Progress

    @property
    def model_config(self) -> ModelConfig:
        """The model's settings."""
        return build_settings(ModelConfig, self.config["model"])

    def model(self) -> Transformer | ContextReady:
        """The trained model, on the CPU and ready to evaluate."""
        model = build_model(self.model_config)
        load_weights(model, self.tensors("model"), self.folder)
        return model.eval()

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of one of its files."""
        from safetensors.torch import load_file

        return load_file(self.folder / f"{name}.safetensors")


def open_checkpoint(path: Path, best: bool = False) -> Checkpoint:
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
    check_sums(folder, manifest)
    return Checkpoint(folder, read_json(folder / "config.json"), _progress(folder))


def newest_checkpoint(run: Path) -> Path | None:
    """The folder of a run's newest checkpoint."""
    return max((run / FOLDER).glob("step-*"), default=None)


def step_folder(run: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return run / FOLDER / f"step-{step:08d}"


def save_checkpoint(
    run: Path,
    config: dict[str, Any],
    progress: Progress,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    tokenizer_folder: Path,
    keep: int,
) -> Path:
    """Write the checkpoint of this step, then delete the ones no longer kept."""
    from safetensors.torch import save_file

    folder = step_folder(run, progress.step)
    if not folder.exists():
        named = dict(model.named_parameters())
        with staged_folder(folder) as staging:
            save_file({name: p.detach().contiguous() for name, p in named.items()}, staging / "model.safetensors")
            save_file(_moments(named, optimizer), staging / "optimizer.safetensors")
            save_file(_torch_generators(device), staging / "rng.safetensors")
            write_json(staging / "config.json", config)
            write_json(staging / "trainer.json", vars(progress) | {"rng": _other_generators()})
            for file in TOKENIZER_FILES:
                if (tokenizer_folder / file).is_file():
                    shutil.copyfile(tokenizer_folder / file, staging / file)
            write_manifest(staging, FORMAT, {"step": progress.step})
    _prune(run, keep, progress.best_step)
    return folder


def restore(
    checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> Progress:
    """Put weights, moments and generators back as they were; returns where the run stood."""
    load_weights(model, checkpoint.tensors("model"), checkpoint.folder)
    moments = checkpoint.tensors("optimizer")
    for name, p in model.named_parameters():
        kept = {kind: moments[f"{kind}/{name}"] for kind in MOMENTS if f"{kind}/{name}" in moments}
        if kept:
            # AdamW keeps its count on the CPU unless fused on an accelerator, where it lies beside the weights.
            on_device = any(group.get("fused") for group in optimizer.param_groups)
            optimizer.state[p] = {
                kind: tensor if kind == "step" and not on_device else tensor.to(p.device)
                for kind, tensor in kept.items()
            }
    _restore_generators(checkpoint, device)
    return checkpoint.progress


def load_weights(model: nn.Module, tensors: dict[str, Tensor], where: Path) -> None:
    """Copy tensors into the parameters of the same names and shapes; anything amiss is refused."""
    named = dict(model.named_parameters())
    wrong = sorted(
        name
        for name in named.keys() | tensors.keys()
        if name not in named or name not in tensors or named[name].shape != tensors[name].shape
    )
    if wrong:
        raise ContextReadyError(
            f"The weights in {where} are of another model ({len(wrong)} differ, for example {wrong[0]})."
        )
    with torch.no_grad():
        for name, p in named.items():
            p.copy_(tensors[name])


def clear_leftovers(run: Path) -> None:
    """Remove what a killed process left half-written or half-deleted."""
    for leftover in (run / FOLDER).glob(partial_name(Path("*")).name):
        shutil.rmtree(leftover)


def _progress(folder: Path) -> Progress:
    saved = read_json(folder / "trainer.json")
    return Progress(**{key: value for key, value in saved.items() if key != "rng"})


def _prune(run: Path, keep: int, best_step: int | None) -> None:
    folders = sorted((run / FOLDER).glob("step-*"))
    kept = {*folders[-keep:], *([] if best_step is None else [step_folder(run, best_step)])}
    for folder in folders:
        if folder not in kept:
            remove_folder(folder)


def _moments(named: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{kind}/{name}": value.detach().contiguous()
        for name, p in named.items()
        for kind, value in optimizer.state.get(p, {}).items()
    }


def _torch_generators(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        states["device"] = torch.get_device_module(device).get_rng_state()
    return states


def _other_generators() -> dict[str, Any]:
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [kind, keys.tolist(), position, has_gauss, gauss],  # type: ignore[union-attr]
    }


def _restore_generators(checkpoint: Checkpoint, device: torch.device) -> None:
    states = checkpoint.tensors("rng")
    torch.set_rng_state(states["cpu"])
    if device.type != "cpu" and "device" in states:
        torch.get_device_module(device).set_rng_state(states["device"])
    others = read_json(checkpoint.folder / "trainer.json")["rng"]
    version, words, gauss = others["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = others["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
