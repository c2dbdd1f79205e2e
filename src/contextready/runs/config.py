"""What a training run is: settings of the model and of the training, checked together."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from contextready.errors import ContextReadyError, nearest
from contextready.model.config import ModelConfig
from contextready.model.correction import check_correction
from contextready.runs.tasks import Task, split_task, task_as_dict, task_from_dict, task_keys
from contextready.settings import build_settings

PAPER_PASSES = 5
OF_MODE = {"truncated_passes": "truncated", "adjoint_steps": "implicit", "adjoint_tolerance": "implicit"}
"""Settings that only one gradient mode reads."""


@dataclass(frozen=True)
class TrainConfig:
    """How to train. `crt train RECIPE key=value …` sets any of these and any setting of the model."""

    data: str
    """Folder of prepared data (crt data prepare)."""
    out: str
    """Folder of the run; if it holds checkpoints, the run goes on from the newest."""
    init_from: str | None = None
    """Run or checkpoint whose weights to start from; a transformer's become the blocks of a context-ready model."""
    block_size: int = 256
    """T, tokens in a sequence."""
    batch_size: int = 64
    """Sequences in a forward pass, of all processes together."""
    accumulate: int = 1
    """Forward passes in a step: gradient accumulation."""
    steps: int = 100_000
    """Updates of the weights."""
    passes: int | None = None
    """K, block passes of a context-ready model (none: 5; gradient=bptt streams instead and has none)."""
    min_passes: int | None = 2
    """Draw K from min_passes (the paper's k_min) to passes anew each step; none: K is always `passes`."""
    gradient: str = "unroll"
    """unroll: through all passes; truncated: the last ones; implicit: the fixed point, in one; bptt: the stream."""
    truncated_passes: int = 1
    """J, how many of the last passes a truncated gradient goes through."""
    adjoint_steps: int | None = None
    """m, vector-Jacobian products of an implicit gradient; none: until one changes little, at most K; 0: one-step."""
    adjoint_tolerance: float = 1e-3
    """How little that is, relative to the adjoint's norm."""
    lr: float = 2e-4
    """Learning rate."""
    schedule: str = "constant"
    """constant, or cosine down to min_lr."""
    min_lr: float = 0.1
    """Where cosine ends, as a part of lr."""
    warmup: int = 1000
    """Steps over which the learning rate rises from zero."""
    weight_decay: float = 0.1
    """Decay of the matrices; vectors (norms, biases) have none."""
    beta1: float = 0.9
    """AdamW's first moment."""
    beta2: float = 0.95
    """AdamW's second moment."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    precision: str = "auto"
    """fp32, bf16 (autocast), or auto: bf16 where the hardware multiplies it natively."""
    compile: bool = False
    """Compile one pass with torch.compile."""
    checkpoint_passes: bool = False
    """Recompute each pass in the backward instead of keeping its activations."""
    seed: int = 0
    """Seed of weights, data order, K and dropout."""
    eval_every: int = 1000
    """Steps between validations."""
    eval_tokens: int | None = 262_144
    """Validation tokens, from the start of the split; none: all."""
    save_every: int = 1000
    """Steps between checkpoints."""
    keep: int = 2
    """Newest checkpoints to keep, besides the best."""
    log_every: int = 10
    """Steps between lines in metrics.jsonl."""
    tensorboard: bool = False
    """Write TensorBoard events into the run's folder."""
    wandb: str | None = None
    """Project of Weights & Biases to log to."""
    parallel: str = "ddp"
    """Under torchrun: ddp (the whole model in every process) or fsdp (a part of weights, gradients and moments)."""
    device: str = "auto"
    """cpu, cuda, mps, or auto."""
    verify_data: bool = True
    """Compare the data with its checksums before training."""

    def __post_init__(self) -> None:
        for name in (
            "block_size",
            "batch_size",
            "accumulate",
            "steps",
            "eval_every",
            "save_every",
            "keep",
            "log_every",
        ):
            _at_least(name, getattr(self, name), 1)
        for name in ("passes", "min_passes", "eval_tokens"):
            if getattr(self, name) is not None:
                _at_least(name, getattr(self, name), 1)
        _at_least("warmup", self.warmup, 0)
        _at_least("truncated_passes", self.truncated_passes, 1)
        if self.adjoint_steps is not None:
            _at_least("adjoint_steps", self.adjoint_steps, 0)
        if not 0.0 <= self.adjoint_tolerance < inf:
            raise ContextReadyError(f"adjoint_tolerance={self.adjoint_tolerance} is no distance; give 0 or more.")
        if not 0 <= self.seed < 2**63:
            raise ContextReadyError(f"seed={self.seed} is out of range; give a whole number from 0 to below 2**63.")
        for name in ("lr", "clip"):
            if not 0.0 < getattr(self, name) < inf:
                raise ContextReadyError(f"{name}={getattr(self, name)} is out of range; it must be above 0 and finite.")
        for name, most in (("weight_decay", inf), ("min_lr", 1.0), ("beta1", 0.9999999), ("beta2", 0.9999999)):
            if not 0.0 <= getattr(self, name) <= most or getattr(self, name) == inf:
                raise ContextReadyError(f"{name}={getattr(self, name)} is out of range; usual values are from 0 to 1.")
        _one_of("schedule", self.schedule, ("constant", "cosine"))
        _one_of("gradient", self.gradient, ("unroll", "truncated", "implicit", "bptt"))
        for key, mode in OF_MODE.items():
            if self.gradient != mode and getattr(self, key) != getattr(TrainConfig, key):
                raise ContextReadyError(
                    f"{key}={getattr(self, key)} is for gradient={mode}, and it is {self.gradient}."
                )
        if self.gradient == "implicit" and (self.compile or self.checkpoint_passes):
            raise ContextReadyError(
                "gradient=implicit goes through one pass again and again, which a compiled or recomputed pass cannot; "
                "leave compile and checkpoint_passes out."
            )
        if self.gradient == "bptt" and (self.compile or self.checkpoint_passes):
            raise ContextReadyError(
                "gradient=bptt makes no parallel pass to compile or recompute; leave compile and checkpoint_passes out."
            )
        _one_of("parallel", self.parallel, ("ddp", "fsdp"))
        _one_of("precision", self.precision, ("auto", "fp32", "bf16"))
        if self.gradient == "bptt" and self.precision == "bf16":
            raise ContextReadyError("gradient=bptt is exact and runs in fp32; leave precision=bf16 out.")

    @property
    def sequences_per_step(self) -> int:
        """Sequences that one update learns from."""
        return self.batch_size * self.accumulate

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one update learns from."""
        return self.sequences_per_step * self.block_size


@dataclass(frozen=True)
class PretrainedModelConfig:
    """A pretrained model of Hugging Face, made context-ready and trained further."""

    pretrained: str
    """Where it starts: a folder (crt convert makes one), a GGUF file, or a name on the Hugging Face Hub."""
    correction: str | None = "add"
    """Which correction; none: plain further training."""
    correction_init: str = "zero"
    """zero: the model starts as what it was; or random."""
    tune: str = "all"
    """all weights; correction: the pretrained ones stay; lora: they stay, beside low-rank adapters."""
    lora_rank: int = 8
    """Rank of the adapters of tune=lora, in every linear layer of the blocks."""

    def __post_init__(self) -> None:
        check_correction("add" if self.correction is None else self.correction, self.correction_init)
        _one_of("tune", self.tune, ("all", "correction", "lora"))
        _at_least("lora_rank", self.lora_rank, 1)
        if self.tune != "lora" and self.lora_rank != PretrainedModelConfig.lora_rank:
            raise ContextReadyError(f"lora_rank={self.lora_rank} is for tune=lora, and it is {self.tune}.")
        if self.correction is None and self.tune == "correction":
            raise ContextReadyError("tune=correction with correction=none leaves nothing to train; set tune=all.")


@dataclass(frozen=True)
class RunConfig:
    """A model and how to train it."""

    model: ModelConfig | PretrainedModelConfig
    train: TrainConfig
    task: Task | None = None
    """What it learns, if not text."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        settings = {"model": dataclasses.asdict(self.model), "train": dataclasses.asdict(self.train)}
        return settings if self.task is None else settings | {"task": task_as_dict(self.task)}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "RunConfig":
        """From such plain values; settings that are younger than they have their defaults."""
        train = build_settings(TrainConfig, with_new_names(saved["train"]))
        task = task_from_dict(saved["task"]) if "task" in saved else None
        return cls(build_model_settings(saved["model"]), train, task)


MODEL_KEYS = [field.name for field in dataclasses.fields(ModelConfig)]
PRETRAINED_KEYS = [field.name for field in dataclasses.fields(PretrainedModelConfig)]
TRAIN_KEYS = [field.name for field in dataclasses.fields(TrainConfig)]
FREE_ON_RESUME = {
    *("data", "out", "steps", "eval_every", "save_every", "keep", "log_every"),
    *("tensorboard", "wandb", "parallel", "device", "verify_data", "init_from"),
}


RENAMED = {"k_min": "min_passes"}
"""Settings that had other names, in files that were written then and in the paper."""


def with_new_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The same settings under the names they have now."""
    return {RENAMED.get(key, key): value for key, value in settings.items()}


def build_run(settings: Mapping[str, Any]) -> RunConfig:
    """Make a run from flat settings of model, training and task together; `vocab_size` must be among them for text."""
    task, settings = split_task(settings)
    config_class = PretrainedModelConfig if settings.get("pretrained") is not None else ModelConfig
    ours, others = (
        (PRETRAINED_KEYS, MODEL_KEYS) if config_class is PretrainedModelConfig else (MODEL_KEYS, PRETRAINED_KEYS)
    )
    for key in settings:
        if key in others and key not in ours:
            if key in MODEL_KEYS:
                raise ContextReadyError(f"{key}={settings[key]} is the pretrained model's own; leave {key} out.")
            raise ContextReadyError(
                f"{key}={settings[key]} is for a pretrained model; name one with pretrained=FOLDER, or leave {key} out."
            )
        if key not in ours and key not in TRAIN_KEYS:
            raise ContextReadyError(f"Unknown setting '{key}'; {nearest(key, [*ours, *TRAIN_KEYS, *task_keys()])}")
    model = build_model_settings({key: value for key, value in settings.items() if key in ours})
    train = build_settings(TrainConfig, {key: value for key, value in settings.items() if key in TRAIN_KEYS})
    return RunConfig(model, _settle_passes(model, train), task)


def build_model_settings(values: Mapping[str, Any]) -> ModelConfig | PretrainedModelConfig:
    """The settings of a model, of the kind that they are of."""
    if "pretrained" in values:
        return build_settings(PretrainedModelConfig, values)
    return build_settings(ModelConfig, values)


def _settle_passes(model: ModelConfig | PretrainedModelConfig, train: TrainConfig) -> TrainConfig:
    """Fill in K: a transformer makes one pass, a context-ready model the paper's five unless told otherwise."""
    if model.correction is None:
        if train.passes not in (None, 1):
            raise ContextReadyError(
                f"passes={train.passes} needs a correction; a transformer makes one pass, so leave passes out or set "
                "correction=add."
            )
        if train.gradient != "unroll":
            raise ContextReadyError(
                f"gradient={train.gradient} needs a correction; a transformer makes one pass, so leave gradient out or "
                "set correction=add."
            )
        return dataclasses.replace(train, passes=1, min_passes=None)
    if train.gradient == "bptt":
        # Recipes say how many passes their unroll makes; a stream makes none.
        return dataclasses.replace(train, passes=None, min_passes=None)
    passes = PAPER_PASSES if train.passes is None else train.passes
    if train.min_passes is not None and train.min_passes > passes:
        raise ContextReadyError(
            f"min_passes={train.min_passes} is above passes={passes}; lower min_passes, or set min_passes=none."
        )
    return dataclasses.replace(train, passes=passes)


def check_for_team(config: RunConfig, processes: int) -> None:
    """Refuse what several processes cannot train together."""
    t = config.train
    if processes == 1:
        return
    if t.batch_size % processes:
        raise ContextReadyError(
            f"batch_size={t.batch_size} cannot be shared by {processes} processes; give a multiple of {processes}."
        )
    if config.model.correction is not None and t.passes is not None and (t.min_passes or t.passes) == 1:
        raise ContextReadyError(
            "K=1 leaves the correction without a gradient, for which several processes would wait; set min_passes=2 "
            "(or passes=2 or more), or train in one process."
        )


def check_same_run(theirs: Mapping[str, Any], ours: RunConfig, where: str) -> None:
    """Refuse to go on with a checkpoint of another configuration."""
    # The cosine's rate depends on how many steps there are; otherwise a run may be made longer.
    free = FREE_ON_RESUME - ({"steps"} if ours.train.schedule == "cosine" else set())
    if (theirs.get("task") is None) != (ours.task is None):
        raise ContextReadyError(f"{where} learned another task; choose another out=.")
    for part, settings in (("model", ours.model), ("train", ours.train), ("task", ours.task)):
        if settings is None:
            continue
        saved, defaults = with_new_names(theirs[part]), type(settings)
        mine = dataclasses.asdict(settings)
        # The gradient first: how many passes there are follows from it.
        for key in sorted(mine, key=lambda key: key != "gradient"):
            # A setting that is younger than the checkpoint had its default.
            before = saved.get(key, getattr(defaults, key, None))
            if before != mine[key] and not (part == "train" and key in free):
                raise ContextReadyError(
                    f"{where} was trained with {key}={before}, and {key}={mine[key]} is asked for now; "
                    f"set {key}={before} to go on with it, or choose another out=."
                )


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ContextReadyError(f"{name}={value} is too small; it must be at least {least}.")


def _one_of(name: str, value: str, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise ContextReadyError(f"{name}={value} is unknown; {nearest(value, valid)}")
