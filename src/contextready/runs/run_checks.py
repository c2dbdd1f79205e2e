"""Checks of whole runs: whether several processes can train one, whether it can be resumed, and whether it fits."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from contextready.errors import ContextReadyError
from contextready.formats.limits import check_memory
from contextready.model.config import ModelConfig
from contextready.model.cost import account
from contextready.runs.config import RunConfig, section_of, with_new_names

FREE_ON_RESUME = {
    *("data", "out", "steps", "eval_every", "save_every", "keep", "log_every"),
    *("tensorboard", "wandb", "parallel", "device", "verify_data", "init_from"),
}
"""Settings that may change when a run is resumed."""
BYTES_PER_WEIGHT = 16
"""Memory per trained weight in fp32: the weight, its gradient and the two moments of AdamW."""
FEWEST_BYTES = 10
"""Activations that a block keeps for the backward, per token and channel: at least five values in bf16."""


def check_for_team(config: RunConfig, processes: int) -> None:
    """Raise an error if this number of processes cannot train this run together."""
    size = config.train.batch_size
    if size % processes:
        raise ContextReadyError(
            f"batch_size={size} cannot be split over {processes} processes; use a multiple of {processes}."
        )


def check_same_run(theirs: Mapping[str, Any], ours: RunConfig, where: str) -> None:
    """Raise an error if a checkpoint cannot be resumed because it has other settings."""
    # A run may be extended, except if the learning rate or K depends on the number of steps.
    staged = ours.train.pass_schedule is not None and len(ours.train.pass_schedule.stages) > 1
    free = FREE_ON_RESUME - ({"steps"} if ours.train.schedule == "cosine" or staged else set())
    if (theirs.get("task") is None) != (ours.task is None):
        raise ContextReadyError(f"{where} was trained on another task; choose another out=.")
    for part, settings in (("model", ours.model), ("train", ours.train), ("task", ours.task)):
        if settings is None:
            continue
        saved, defaults = with_new_names(section_of(theirs, part)), type(settings)
        mine = dataclasses.asdict(settings)
        # The gradient comes first, because the number of passes follows from it.
        for key in sorted(mine, key=lambda key: key != "gradient"):
            # A setting that did not exist when the checkpoint was written had its default.
            before = saved.get(key, getattr(defaults, key, None))
            if before != mine[key] and not (part == "train" and key in free):
                raise ContextReadyError(
                    f"{where} was trained with {key}={before}, not {key}={mine[key]}; "
                    f"set {key}={before} to resume it, or choose another out=."
                )


def check_run_memory(config: RunConfig, processes: int, on_cpu: bool) -> None:
    """Refuse to start a run that cannot fit into this machine's memory, before anything is allocated.

    Only what every run needs is counted, so a run that passes may still be too large: `crt plan` estimates the peak.
    Every process creates the whole model in main memory first. On a GPU (not `on_cpu`), only that is checked.
    """
    t, model = config.train, config.model
    if not isinstance(model, ModelConfig):
        return
    number = account(model).parameters
    sharded = t.parallel == "fsdp" and processes > 1
    weights = number * (BYTES_PER_WEIGHT if on_cpu and not sharded else BYTES_PER_WEIGHT // 4)
    check_memory(
        weights,
        f"Training {number:,} parameters (width={model.width}, layers={model.layers})",
        "choose a smaller width, vocab_size or number of layers (crt plan shows the memory in detail).",
    )
    tokens = -(-t.batch_size // processes) * t.block_size
    # Tokens and targets are always in main memory. Without a GPU, so are the embeddings, and what the backward needs.
    depth = 1 if t.pass_schedule is None else t.pass_schedule.most
    kept = 0 if t.checkpoint_passes or t.gradient != "unroll" else model.layers * depth
    per_token = 16 + (model.width * (2 + FEWEST_BYTES * kept) if on_cpu else 0)
    check_memory(
        weights + tokens * per_token,
        f"A forward pass with batch_size={t.batch_size}, block_size={t.block_size} and passes={t.passes}",
        "lower one of them, or split the batch with accumulate (crt plan shows the memory in detail).",
    )
