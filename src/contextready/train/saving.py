"""Saving and restoring a run: weights, optimizer moments and random number generators, in all processes together.

The moments of AdamW are named here. `torch.distributed.checkpoint.state_dict` could name them, but it would also store
settings that are already in the run's configuration, under names that older checkpoints do not have.
"""

from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from contextready.errors import ContextReadyError
from contextready.files import partial_name, remove_folder, staged_folder, writing
from contextready.model.context_ready import ContextReady
from contextready.runs.checkpoint import (
    Checkpoint,
    Progress,
    all_checkpoints,
    check_shapes,
    fill,
    load_weights,
    named_weights,
    shapes_of,
    step_folder,
    write_rest,
    write_tensors,
)
from contextready.runs.config import RunConfig
from contextready.runs.models import describe_model
from contextready.runs.records import read_generators
from contextready.runs.sharded import describe_saved, load_sharded, save_sharded
from contextready.train.team import Team

MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def save_checkpoint(
    config: RunConfig,
    progress: Progress,
    model: ContextReady,
    optimizer: torch.optim.Optimizer,
    team: Team,
    tokenizer_folder: Path | None,
) -> Path:
    """Write the checkpoint of this step, then delete old ones. All processes must call this."""
    run = Path(config.train.out)
    folder = step_folder(run, progress.step)
    generators = _torch_generators(team)
    with writing(folder):
        (exists,) = team.sum(float(team.is_first and folder.exists()))
    if not exists:
        named = named_weights(model)
        weights = {name: p.detach() for name, p in named.items()}
        moments = _moments(named, optimizer)
        sharded = config.train.parallel == "fsdp"
        with staged_folder(folder) if team.is_first else nullcontext(partial_name(folder)) as staging:
            team.wait()  # until the first process has created the folder
            if sharded:
                save_sharded(staging, {f"model/{name}": tensor for name, tensor in weights.items()} | moments)
            if team.is_first:
                if not sharded:
                    write_tensors(staging, weights, moments)
                described = describe_model(model, config.model)
                write_rest(staging, config.as_dict(), progress, generators, tokenizer_folder, described=described)
        team.wait()
    if team.is_first:
        _prune(run, config.train.keep, progress.best_step)
    return folder


def _prune(run: Path, keep: int, best_step: int | None) -> None:
    """Delete all checkpoints except the newest `keep` and the best."""
    try:
        folders = all_checkpoints(run)
    except OSError as error:
        raise ContextReadyError(f"The old checkpoints of {run} could not be deleted: {error}.") from error
    kept = {*folders[-keep:], *([] if best_step is None else [step_folder(run, best_step)])}
    for folder in folders:
        if folder not in kept:
            remove_folder(folder)


def restore(checkpoint: Checkpoint, model: ContextReady, optimizer: torch.optim.Optimizer, team: Team) -> Progress:
    """Restore weights, moments and generators, and return the progress of the run. All processes must call this."""
    named = named_weights(model)
    if checkpoint.sharded:
        saved = describe_saved(checkpoint.folder)
        shapes = {name.removeprefix("model/"): saved[name][0] for name in saved if name.startswith("model/")}
        check_shapes(named, shapes, checkpoint.folder)
        _empty_moments(named, optimizer, set(saved))
        weights = {f"model/{name}": p.detach() for name, p in named.items()}
        load_sharded(checkpoint.folder, weights | _moments(named, optimizer))
    else:
        load_weights(model, checkpoint.tensors("model", shapes_of(named)), checkpoint.folder)
        saved_names = checkpoint.saved_names("optimizer")
        moments = checkpoint.tensors("optimizer", _moment_shapes(named, saved_names))
        _empty_moments(named, optimizer, saved_names)
        for name, place in _moments(named, optimizer).items():
            fill(place, moments[name])
    _restore_generators(checkpoint, team)
    return checkpoint.progress


def _empty_moments(named: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, saved: set[str]) -> None:
    """Allocate the saved moments, as AdamW does at its first step."""
    # AdamW keeps its step count on the CPU, or on the device of the weights if it is fused.
    on_device = any(group.get("fused") for group in optimizer.param_groups)
    for name, p in named.items():
        if f"step/{name}" in saved:
            device = p.device if on_device else torch.device("cpu")
            optimizer.state[p] = {
                "step": torch.zeros((), device=device),
                **{moment: torch.zeros_like(p.detach()) for moment in MOMENTS if moment != "step"},
            }


def _moment_shapes(named: dict[str, nn.Parameter], saved: set[str]) -> dict[str, torch.Size]:
    """Return the names and shapes of the moments of the weights that have any."""
    return {
        f"{moment}/{name}": torch.Size() if moment == "step" else p.shape
        for name, p in named.items()
        for moment in MOMENTS
        if f"step/{name}" in saved
    }


def _moments(named: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{moment}/{name}": value.detach()
        for name, p in named.items()
        for moment, value in optimizer.state.get(p, {}).items()
    }


def _torch_generators(team: Team) -> dict[str, Tensor]:
    """Return the states of the generators of all processes. The names of the first process have no number."""
    mine = {"cpu": torch.get_rng_state()}
    if team.device.type != "cpu":
        mine["device"] = torch.get_device_module(team.device).get_rng_state()
    states = enumerate(team.gather(mine))
    return {name if rank == 0 else f"{name}.{rank}": state for rank, each in states for name, state in each.items()}


def _restore_generators(checkpoint: Checkpoint, team: Team) -> None:
    states, number = checkpoint.tensors("rng"), "" if team.is_first else f".{team.rank}"
    others = read_generators(checkpoint.folder / "trainer.json")
    try:
        if f"cpu{number}" in states:
            torch.set_rng_state(states[f"cpu{number}"])
        else:
            # The run was saved with fewer processes, so this one draws its own dropout masks from here on.
            team.seed(checkpoint.config["train"]["seed"] + checkpoint.progress.step)
        if team.device.type != "cpu" and f"device{number}" in states:
            torch.get_device_module(team.device).set_rng_state(states[f"device{number}"])
    except (RuntimeError, TypeError, ValueError) as error:
        raise ContextReadyError(
            f"{checkpoint.folder / 'rng.safetensors'} does not hold states of torch's generators ({error}); the "
            "checkpoint is damaged."
        ) from None
    others.restore()
