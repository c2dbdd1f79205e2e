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
written aside, forced to disk and renamed, so every folder named step-… is whole.
"""

import random
import shutil
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from contextready.data.tokenizer import FILE as TOKENIZER_FILE
from contextready.errors import ContextReadyError
from contextready.extras import require
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
from contextready.hf.load import is_pretrained
from contextready.model.build import ModelConfig
from contextready.model.context_ready import ContextReady
from contextready.model.transformer import Transformer
from contextready.train.config import PretrainedModelConfig, build_model_settings
from contextready.train.models import describe_model, rebuild_model
from contextready.train.sharded import (
    METADATA,
    describe_saved,
    load_sharded,
    read_whole,
    save_sharded,
)
from contextready.train.team import Team

FORMAT = "contextready-checkpoint"
FOLDER = "checkpoints"
MOMENTS = ("step", "exp_avg", "exp_avg_sq")
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
        """Refuse a model of pointer chasing, where text is to be read or written."""
        if "task" in self.config:
            raise ContextReadyError(
                f"{self.folder} learned pointer chasing, not text; crt pointer scores such models as they learn."
            )

    def model(self) -> Transformer | ContextReady:
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
    require("transformers", "hf")
    from contextready.hf.folder import open_folder

    return open_folder(path)


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
    team: Team,
    tokenizer_folder: Path | None,
    keep: int,
) -> Path:
    """Write the checkpoint of this step, then delete the ones no longer kept. All processes call this."""
    folder = step_folder(run, progress.step)
    generators = _torch_generators(team)
    (exists,) = team.sum(float(team.is_first and folder.exists()))
    if not exists:
        named = dict(model.named_parameters())
        weights = {name: p.detach() for name, p in named.items()}
        moments = _moments(named, optimizer)
        sharded = config["train"]["parallel"] == "fsdp"
        with staged_folder(folder) if team.is_first else nullcontext(partial_name(folder)) as staging:
            team.wait()  # The first process has made the folder.
            if sharded:
                save_sharded(staging, {f"model/{name}": tensor for name, tensor in weights.items()} | moments)
            if team.is_first:
                if not sharded:
                    write_tensors(staging, weights, moments)
                described = describe_model(model, build_model_settings(config["model"]))
                write_rest(staging, config, progress, generators, tokenizer_folder, described)
        team.wait()
    if team.is_first:
        _prune(run, keep, progress.best_step)
    return folder


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


def restore(checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer, team: Team) -> Progress:
    """Put weights, moments and generators back as they were; returns where the run stood. All processes call this."""
    named = dict(model.named_parameters())
    if checkpoint.sharded:
        saved = describe_saved(checkpoint.folder)
        shapes = {name.removeprefix("model/"): saved[name][0] for name in saved if name.startswith("model/")}
        _check_shapes(named, shapes, checkpoint.folder)
        _empty_moments(named, optimizer, set(saved))
        weights = {f"model/{name}": p.detach() for name, p in named.items()}
        load_sharded(checkpoint.folder, weights | _moments(named, optimizer))
    else:
        load_weights(model, checkpoint.tensors("model"), checkpoint.folder)
        moments = checkpoint.tensors("optimizer")
        _empty_moments(named, optimizer, set(moments))
        for name, place in _moments(named, optimizer).items():
            _fill(place, moments[name])
    _restore_generators(checkpoint, team)
    return checkpoint.progress


def _empty_moments(named: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, saved: set[str]) -> None:
    """Places for the moments that were saved, as AdamW makes them at its first step."""
    # AdamW keeps its count on the CPU unless fused on an accelerator, where it lies beside the weights.
    on_device = any(group.get("fused") for group in optimizer.param_groups)
    for name, p in named.items():
        if f"step/{name}" in saved:
            device = p.device if on_device else torch.device("cpu")
            optimizer.state[p] = {
                "step": torch.zeros((), device=device),
                **{kind: torch.zeros_like(p.detach()) for kind in MOMENTS if kind != "step"},
            }


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


def load_weights(model: nn.Module, tensors: dict[str, Tensor], where: Path) -> None:
    """Copy tensors into the parameters of the same names and shapes; anything amiss is refused."""
    named = dict(model.named_parameters())
    _check_shapes(named, {name: tensor.shape for name, tensor in tensors.items()}, where)
    for name, p in named.items():
        _fill(p, tensors[name])


def _check_shapes(named: dict[str, nn.Parameter], saved: dict[str, torch.Size], where: Path) -> None:
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
def _fill(place: Tensor, tensor: Tensor) -> None:
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


def _prune(run: Path, keep: int, best_step: int | None) -> None:
    folders = sorted((run / FOLDER).glob("step-*"))
    kept = {*folders[-keep:], *([] if best_step is None else [step_folder(run, best_step)])}
    for folder in folders:
        if folder not in kept:
            remove_folder(folder)


def _moments(named: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{kind}/{name}": value.detach()
        for name, p in named.items()
        for kind, value in optimizer.state.get(p, {}).items()
    }


def _torch_generators(team: Team) -> dict[str, Tensor]:
    """The states of all processes' generators; the first one's have no number in their names."""
    mine = {"cpu": torch.get_rng_state()}
    if team.device.type != "cpu":
        mine["device"] = torch.get_device_module(team.device).get_rng_state()
    states = enumerate(team.gather(mine))
    return {name if rank == 0 else f"{name}.{rank}": state for rank, each in states for name, state in each.items()}


def _other_generators() -> dict[str, Any]:
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [kind, keys.tolist(), position, has_gauss, gauss],  # type: ignore[union-attr]
    }


def _restore_generators(checkpoint: Checkpoint, team: Team) -> None:
    states, number = checkpoint.tensors("rng"), "" if team.is_first else f".{team.rank}"
    if f"cpu{number}" in states:
        torch.set_rng_state(states[f"cpu{number}"])
    else:
        # This process was not there when the run was saved, so it draws masks of its own from here on.
        team.seed(checkpoint.config["train"]["seed"] + checkpoint.progress.step)
    if team.device.type != "cpu" and f"device{number}" in states:
        torch.get_device_module(team.device).set_rng_state(states[f"device{number}"])
    others = read_json(checkpoint.folder / "trainer.json")["rng"]
    version, words, gauss = others["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = others["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
