"""The memory per process and the compute that a run will need, without allocating anything."""

from dataclasses import dataclass

from contextready.errors import ContextReadyError
from contextready.model.config import ModelConfig
from contextready.model.cost import account
from contextready.runs.config import RunConfig
from contextready.runs.run_checks import check_for_team
from contextready.train.cost import recomputed_macs, step_macs
from contextready.train.memory import step_bytes

FP32 = 4
MOMENTS_OF_ADAMW = 2


@dataclass(frozen=True)
class Plan:
    """The bytes per process at the peak of a step, and the compute per step."""

    gpus: int
    precision: str
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    """What the peak, at the largest K, needs in addition to the others."""
    flops_per_step: float
    """Over all processes together, counting a multiply-accumulate as two."""

    @property
    def total(self) -> int:
        """The sum, without the memory that the framework and its kernels use themselves."""
        return self.weights + self.gradients + self.optimizer + self.activations

    def seconds_per_step(self, tflops: float, utilisation: float) -> float:
        """Return the time per step on GPUs with this peak speed, of which the fraction `utilisation` is reached."""
        return gpu_seconds(self.flops_per_step, tflops, utilisation) / self.gpus


def gpu_seconds(flops: float, tflops: float, utilisation: float) -> float:
    """Return the time on one GPU with this peak speed, of which the fraction `utilisation` is reached."""
    if not tflops > 0.0:
        raise ContextReadyError(f"--tflops must be greater than 0, but got {tflops:g}.")
    if not 0.0 < utilisation <= 1.0:
        raise ContextReadyError(f"--utilisation must be greater than 0 and at most 1, but got {utilisation:g}.")
    return flops / (tflops * 1e12 * utilisation)


def make_plan(config: RunConfig, gpus: int) -> Plan:
    """Plan a run on this many GPUs (or processes)."""
    if gpus < 1:
        raise ContextReadyError(f"--gpus must be at least 1, but got {gpus}.")
    check_for_team(config, gpus)
    if not isinstance(config.model, ModelConfig):
        raise ContextReadyError(
            "crt plan works for native models only; for a pretrained model, crt train … --dry-run prints the cost."
        )
    t, cost = config.train, account(config.model)
    # Whether "auto" means bf16 depends on the hardware. A GPU that is used at scale supports it.
    bf16 = t.precision in ("auto", "bf16") and t.gradient != "bptt"
    whole, sharded = FP32 * cost.parameters, gpus > 1 and t.parallel == "fsdp"
    part = whole // gpus if sharded else whole
    gradients_stay = t.accumulate > 1 or (gpus > 1 and not sharded)
    # During a step, a sharded model is gathered in full, in addition to its shard.
    weights = whole + part if sharded else whole
    peak = weights + step_bytes(config, t.batch_size // gpus, bf16, gradients_stay)
    if sharded:
        # When gradients are reduced, the full weights are gone, and there are two full gradients and a shard.
        peak = max(peak, part + 2 * whole + part)
    return Plan(
        gpus=gpus,
        precision="bf16" if bf16 else "fp32",
        parameters=cost.parameters,
        weights=weights,
        gradients=whole,
        optimizer=MOMENTS_OF_ADAMW * part,
        activations=peak - weights - whole,
        flops_per_step=2.0 * (step_macs(cost, t) + recomputed_macs(cost, t)),
    )
