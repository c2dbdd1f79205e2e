"""The settings of a training run: those of the model, the training and the task, checked together."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from contextready.errors import ContextReadyError, nearest
from contextready.formats.limits import check_count, shown
from contextready.model.checks import MOST_PASSES
from contextready.model.config import ModelConfig
from contextready.model.correction import CORRECTIONS, check_correction
from contextready.runs.passes import PassSchedule, joined_passes, parse_passes
from contextready.runs.tasks import Task, split_task, task_as_dict, task_from_dict, task_keys
from contextready.settings import build_settings

PAPER_PASSES = 5
DEFAULT_PASSES = {"truncated": "2@0.9,2..3@0.1", "unroll": f"2..{PAPER_PASSES}", "implicit": f"2..{PAPER_PASSES}"}
"""K for each gradient mode if it is not set. bptt makes no passes."""
PASSES_FROM_SCRATCH = "1@0.5,2@0.4,2..3@0.1"
"""The same for gradient=truncated, if the weights are new and the data is text: half of the steps as a transformer."""
DEFAULT_SCALE = 0.02
"""The factor on a new correction's output if it is not set: the size of newly initialised embeddings."""
AUTO = "auto"
"""The correction of a pretrained model if it is not set: chosen when the model is loaded."""
OF_MODE = {"truncated_passes": "truncated", "adjoint_steps": "implicit", "adjoint_tolerance": "implicit"}
"""Settings that apply to one gradient mode only."""
LIMITS = {
    "block_size": (1, 2**24),
    "batch_size": (1, 2**20),
    "accumulate": (1, 10**6),
    # The number in a checkpoint's name has eight digits.
    "steps": (1, 10**8 - 1),
    "truncated_passes": (1, MOST_PASSES),
    "adjoint_steps": (0, MOST_PASSES),
    "warmup": (0, 10**8),
    "eval_every": (1, 10**9),
    "eval_tokens": (1, 10**12),
    "save_every": (1, 10**9),
    "keep": (1, 10**6),
    "log_every": (1, 10**9),
}
"""The smallest and the largest value of every whole number, far beyond what a real run needs."""
LARGEST_RANK = 2**16


@dataclass(frozen=True)
class TrainConfig:
    """How to train. `crt train RECIPE key=value …` changes any of these settings, and any setting of the model."""

    data: str
    """Folder with prepared data (see crt data prepare)."""
    out: str
    """Folder of the run. If it contains checkpoints, training resumes from the newest one."""
    init_from: str | None = None
    """Run or checkpoint to take the initial weights from. A context-ready model can start from a transformer."""
    block_size: int = 256
    """T, the number of tokens per sequence."""
    batch_size: int = 64
    """Sequences per forward pass, over all processes together."""
    accumulate: int = 1
    """Forward passes per optimizer step (gradient accumulation)."""
    steps: int = 100_000
    """Optimizer steps."""
    passes: str | None = None
    """K, passes of a context-ready model: 2, 2..4 (drawn at each step), or 1@0.5,2..4@0.5 (fractions of all steps)."""
    gradient: str = "truncated"
    """Backpropagate through the last pass (truncated), all (unroll), the fixed point (implicit) or time (bptt)."""
    truncated_passes: int = 1
    """J, the number of last passes that gradient=truncated goes through."""
    adjoint_steps: int | None = None
    """m, vector-Jacobian products of gradient=implicit. none: until adjoint_tolerance is met, or K; 0: one-step."""
    adjoint_tolerance: float = 1e-3
    """Change of the adjoint at which gradient=implicit stops, as a fraction of the adjoint's norm."""
    convergence_weight: float = 0.0
    """Weight of the mean squared change of the block inputs by one more pass, as a term of the loss."""
    lr: float = 2e-4
    """Learning rate after the warmup."""
    correction_lr: float = 1.0
    """Learning rate of the correction, as a multiple of lr."""
    schedule: str = "constant"
    """Learning rate schedule after the warmup: constant, or cosine down to min_lr."""
    min_lr: float = 0.1
    """Final learning rate of the cosine schedule, as a fraction of lr."""
    warmup: int = 1000
    """Steps over which the learning rate rises linearly from zero."""
    weight_decay: float = 0.1
    """AdamW weight decay, of the weights that decay names."""
    decay: str = "matrices"
    """What is decayed: matrices (with embedding and head), or all (with norms and biases too)."""
    beta1: float = 0.9
    """AdamW decay rate of the first moment."""
    beta2: float = 0.95
    """AdamW decay rate of the second moment."""
    eps: float = 1e-8
    """AdamW term that keeps the denominator from being zero."""
    clip: float = 1.0
    """Clip the gradient to this norm."""
    precision: str = "auto"
    """fp32, bf16 (autocast), or auto: bf16 if the hardware supports it natively."""
    compile: bool = False
    """Compile the passes with torch.compile."""
    checkpoint_passes: bool = False
    """Save memory by recomputing each pass during the backward (activation checkpointing)."""
    seed: int = 0
    """Random seed of the weights, the data order, K and dropout."""
    eval_every: int = 1000
    """Steps between validations."""
    eval_tokens: int | None = 262_144
    """Validation tokens to score, from the start of the split. none: all."""
    save_every: int = 1000
    """Steps between checkpoints."""
    keep: int = 2
    """How many of the newest checkpoints to keep, in addition to the best."""
    log_every: int = 10
    """Steps between lines in metrics.jsonl."""
    tensorboard: bool = False
    """Also write TensorBoard events to the folder of the run."""
    wandb: str | None = None
    """Weights & Biases project to log to."""
    parallel: str = "ddp"
    """With torchrun: ddp (every process holds the whole model) or fsdp (model and optimizer are sharded)."""
    device: str = "auto"
    """Device to train on: cpu, cuda, mps or auto."""
    verify_data: bool = True
    """Check the data against its checksums before training."""

    def __post_init__(self) -> None:
        for name, (least, most) in LIMITS.items():
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), least, most)
        for name in ("data", "out", "init_from", "wandb", "device"):
            _check_text(name, getattr(self, name))
        if self.init_from == "":
            raise ContextReadyError("init_from is empty; name a run or checkpoint, or set init_from=none.")
        if self.wandb is not None and not self.wandb.strip():
            raise ContextReadyError("wandb is empty; name a Weights & Biases project, or set wandb=none.")
        if not 0.0 <= self.adjoint_tolerance < inf:
            raise ContextReadyError(
                f"adjoint_tolerance must be at least 0 and finite, but got {self.adjoint_tolerance}."
            )
        if not 0 <= self.seed < 2**63:
            raise ContextReadyError(f"seed must be from 0 to 2**63 - 1, but got {shown(self.seed)}.")
        for name in ("lr", "correction_lr", "clip", "eps"):
            if not 0.0 < getattr(self, name) < inf:
                raise ContextReadyError(f"{name} must be greater than 0 and finite, but got {getattr(self, name)}.")
        for name in ("weight_decay", "convergence_weight"):
            if not 0.0 <= getattr(self, name) < inf:
                raise ContextReadyError(f"{name} must be at least 0 and finite, but got {getattr(self, name)}.")
        if self.passes is not None:
            parse_passes(self.passes)
        if not 0.0 <= self.min_lr <= 1.0:
            raise ContextReadyError(f"min_lr must be from 0 to 1, a fraction of lr, but got {self.min_lr}.")
        for name in ("beta1", "beta2"):
            if not 0.0 <= getattr(self, name) <= 0.9999999:
                raise ContextReadyError(f"{name} must be at least 0 and less than 1, but got {getattr(self, name)}.")
        _one_of("schedule", self.schedule, ("constant", "cosine"))
        _one_of("decay", self.decay, ("matrices", "all"))
        _one_of("gradient", self.gradient, ("unroll", "truncated", "implicit", "bptt"))
        for key, mode in OF_MODE.items():
            if self.gradient != mode and getattr(self, key) != getattr(TrainConfig, key):
                raise ContextReadyError(
                    f"{key}={getattr(self, key)} needs gradient={mode}, but gradient={self.gradient}."
                )
        if self.gradient == "implicit" and (self.compile or self.checkpoint_passes):
            raise ContextReadyError(
                "gradient=implicit differentiates one pass repeatedly, so it cannot be compiled or recomputed; "
                "leave compile and checkpoint_passes out."
            )
        if self.gradient == "bptt" and (self.compile or self.checkpoint_passes):
            raise ContextReadyError(
                "gradient=bptt makes no parallel passes to compile or recompute; leave compile and checkpoint_passes "
                "out."
            )
        if self.convergence_weight and self.gradient in ("implicit", "bptt"):
            raise ContextReadyError(
                f"convergence_weight needs passes to compare, but gradient={self.gradient} has none; leave it "
                "out, or set gradient=truncated."
            )
        _one_of("parallel", self.parallel, ("ddp", "fsdp"))
        _one_of("precision", self.precision, ("auto", "fp32", "bf16"))
        if self.gradient == "bptt" and self.precision == "bf16":
            raise ContextReadyError("gradient=bptt computes in fp32 only; leave precision=bf16 out.")

    @property
    def pass_schedule(self) -> PassSchedule | None:
        """The stages of K; None with gradient=bptt, which makes no parallel passes."""
        return None if self.passes is None else parse_passes(self.passes)

    @property
    def sequences_per_step(self) -> int:
        """Sequences per optimizer step."""
        return self.batch_size * self.accumulate

    @property
    def tokens_per_step(self) -> int:
        """Tokens per optimizer step."""
        return self.sequences_per_step * self.block_size


@dataclass(frozen=True)
class PretrainedModelConfig:
    """A pretrained Hugging Face model that gets a correction and is trained further."""

    pretrained: str
    """Model to start from: a folder (such as crt convert writes), a GGUF file, or a name on the Hugging Face Hub."""
    correction: str | None = AUTO
    """Correction to add. auto: as in the folder, or balanced if z is over 50 times e, else add. none: no correction."""
    correction_init: str = "zero"
    """zero (the model starts out computing the same as the pretrained one) or random."""
    correction_scale: float | None = None
    """Factor on the correction's output. none: as in the folder, or the root mean square of the embeddings."""
    correction_gain: str | None = None
    """Learn the factor, starting at correction_scale: scalar (one number) or channel (one per channel)."""
    tune: str = "all"
    """What to train: all, correction (the rest stays frozen) or lora (the correction and low-rank adapters)."""
    lora_rank: int = 8
    """Rank of the adapters that tune=lora adds to every linear layer of the blocks."""

    def __post_init__(self) -> None:
        name, scale = "add" if self.correction in (None, AUTO) else self.correction, self.correction_scale
        check_correction(name, self.correction_init, 1.0 if scale is None else scale, self.correction_gain)
        _one_of("tune", self.tune, ("all", "correction", "lora"))
        check_count("lora_rank", self.lora_rank, 1, LARGEST_RANK)
        _check_text("pretrained", self.pretrained)
        if not self.pretrained.strip():
            raise ContextReadyError("pretrained is empty; name a folder, a GGUF file or a model on the Hub.")
        if self.tune != "lora" and self.lora_rank != PretrainedModelConfig.lora_rank:
            raise ContextReadyError(f"lora_rank={self.lora_rank} needs tune=lora, but tune={self.tune}.")
        if self.correction is None and self.tune == "correction":
            raise ContextReadyError("tune=correction with correction=none leaves nothing to train; set tune=all.")


@dataclass(frozen=True)
class RunConfig:
    """A model, how to train it, and on what task."""

    model: ModelConfig | PretrainedModelConfig
    train: TrainConfig
    task: Task | None = None
    """The task, if it is not language modelling."""

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as plain values, for JSON."""
        settings = {"model": dataclasses.asdict(self.model), "train": dataclasses.asdict(self.train)}
        return settings if self.task is None else settings | {"task": task_as_dict(self.task)}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "RunConfig":
        """Create a run from the values that `as_dict` returns. Settings that did not exist yet get their defaults."""
        train = build_settings(TrainConfig, with_new_names(section_of(saved, "train")))
        task = task_from_dict(section_of(saved, "task")) if "task" in saved else None
        return cls(build_model_settings(section_of(saved, "model")), train, task)


MODEL_KEYS = [field.name for field in dataclasses.fields(ModelConfig)]
PRETRAINED_KEYS = [field.name for field in dataclasses.fields(PretrainedModelConfig)]
TRAIN_KEYS = [field.name for field in dataclasses.fields(TrainConfig)]
RENAMED = {"k_min": "min_passes"}
"""Old names of settings, which older files and the paper use."""


def with_new_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings under their current names, with K as one setting."""
    for old, new in RENAMED.items():
        if old in settings and new in settings:
            raise ContextReadyError(f"{old} and {new} are the same setting; remove one of the two.")
    return joined_passes({RENAMED.get(key, key): value for key, value in settings.items()})


def build_run(settings: Mapping[str, Any]) -> RunConfig:
    """Create a run from the settings of model, training and task in one mapping. Text needs `vocab_size` too."""
    task, settings = split_task(with_new_names(settings))
    config_class = PretrainedModelConfig if settings.get("pretrained") is not None else ModelConfig
    ours, others = (
        (PRETRAINED_KEYS, MODEL_KEYS) if config_class is PretrainedModelConfig else (MODEL_KEYS, PRETRAINED_KEYS)
    )
    for key in settings:
        if key in others and key not in ours:
            if key in MODEL_KEYS:
                raise ContextReadyError(
                    f"{key}={shown(settings[key])} cannot be set for a pretrained model; leave {key} out."
                )
            raise ContextReadyError(
                f"{key}={shown(settings[key])} needs a pretrained model; set pretrained=FOLDER, or leave {key} out."
            )
        if key not in ours and key not in TRAIN_KEYS:
            known = [*ours, *TRAIN_KEYS, *task_keys()]
            raise ContextReadyError(f"Unknown setting '{shown(key)}'; {nearest(key, known)}")
    if config_class is ModelConfig and task is None:
        settings = _begun_well(settings)
    model = build_model_settings({key: value for key, value in settings.items() if key in ours})
    train = build_settings(TrainConfig, {key: value for key, value in settings.items() if key in TRAIN_KEYS})
    if not train.out:
        raise ContextReadyError("out is empty; name a folder for the run, for example out=runs/mine.")
    if task is None and not train.data:
        raise ContextReadyError("data is empty; name a folder with prepared data, for example data=data/mini.")
    return RunConfig(model, _settle_passes(model, train, task), task)


def build_model_settings(values: Mapping[str, Any]) -> ModelConfig | PretrainedModelConfig:
    """Create the settings of a native or of a pretrained model, depending on the keys."""
    if "pretrained" in values:
        return build_settings(PretrainedModelConfig, values)
    return build_settings(ModelConfig, values)


def _begun_well(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in how a new correction begins: at zero, and of the size of new embeddings (docs/training.md says why).

    The defaults of `ModelConfig`, of tasks and of older files are the paper's instead.
    """
    filled, name = dict(settings), settings.get("correction")
    if isinstance(name, str) and name in CORRECTIONS and CORRECTIONS[name].parts.has_network:
        filled.setdefault("correction_init", "zero")
        filled.setdefault("correction_scale", DEFAULT_SCALE)
    return filled


def _settle_passes(model: ModelConfig | PretrainedModelConfig, train: TrainConfig, task: Task | None) -> TrainConfig:
    """Fill in K: a transformer makes one pass, and a context-ready model has a default for each gradient mode."""
    if model.correction is None:
        if train.passes not in (None, "1"):
            raise ContextReadyError(
                f"passes={train.passes} needs a correction; a transformer makes one pass, so leave passes out or set "
                "correction=add."
            )
        if train.gradient not in ("unroll", "truncated"):
            raise ContextReadyError(
                f"gradient={train.gradient} needs a correction; a transformer makes one pass, so leave gradient out or "
                "set correction=add."
            )
        for key in ("convergence_weight", "correction_lr"):
            if getattr(train, key) != getattr(TrainConfig, key):
                raise ContextReadyError(f"{key}={getattr(train, key)} needs a correction; leave it out.")
        # With a single pass, both are the same.
        return dataclasses.replace(train, passes="1", gradient="unroll", truncated_passes=1)
    if train.gradient == "bptt":
        # A recipe sets the number of passes for the other modes; bptt makes none.
        return dataclasses.replace(train, passes=None)
    default = DEFAULT_PASSES[train.gradient]
    if train.gradient == "truncated" and isinstance(model, ModelConfig) and train.init_from is None and task is None:
        default = PASSES_FROM_SCRATCH
    return dataclasses.replace(train, passes=train.passes or default)


def section_of(saved: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a part of the settings that a file contained."""
    part = saved.get(name) if isinstance(saved, Mapping) else None
    if not isinstance(part, Mapping):
        raise ContextReadyError(f"The saved settings of this run lack the part '{name}'; their file is damaged.")
    return part


def _check_text(name: str, value: str | None) -> None:
    """Raise an error for text that cannot be the name of a file or be saved in one."""
    if value is not None and ("\0" in value or any("\ud800" <= letter <= "\udfff" for letter in value)):
        raise ContextReadyError(f"{name} must be UTF-8 text without null characters; choose another name.")


def _one_of(name: str, value: str, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise ContextReadyError(f"{name}={shown(value)} is unknown; {nearest(value, valid)}")
