"""What a run will need: memory of each process, and compute. Nothing is allocated."""

from dataclasses import dataclass

from contextready.errors import ContextReadyError
from contextready.model.config import ModelConfig
from contextready.model.cost import account
from contextready.runs.config import RunConfig, check_for_team
from contextready.train.cost import recomputed_macs, step_macs
from contextready.train.memory import step_bytes

FP32 = 4
MOMENTS_OF_ADAMW = 2


@dataclass(frozen=True)
class Plan:
    """Bytes of each process at the peak of a step, and the compute of a step."""

    gpus: int
    precision: str
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    """What the peak is above the others, at the largest K."""
    flops_per_step: float
    """Of all processes together, two for a multiply-accumulate."""

    @property
    def total(self) -> int:
        """All of it. What the framework and its kernels need for themselves comes on top."""
        return self.weights + self.gradients + self.optimizer + self.activations

    def seconds_per_step(self, tflops: float, utilisation: float) -> float:
        """The time of a step on GPUs of this peak, of which a part is reached."""
        if not tflops > 0.0 or not 0.0 < utilisation <= 1.0:
            raise ContextReadyError(
                f"{tflops:g} TFLOP/s at a utilisation of {utilisation:g} is no speed; give above 0, and 0 to 1."
            )
        return self.flops_per_step / (self.gpus * tflops * 1e12 * utilisation)


def make_plan(config: RunConfig, gpus: int) -> Plan:
    """Plan a run on this many GPUs (or processes)."""
    if gpus < 1:
        raise ContextReadyError(f"--gpus {gpus} is too few; give at least 1.")
    check_for_team(config, gpus)
    if not isinstance(config.model, ModelConfig):
        raise ContextReadyError(
            "crt plan is for this package's own models; for a pretrained one crt train --dry-run prints the cost."
        )
    t, cost = config.train, account(config.model)
    # Where "auto" is bf16 depends on the hardware; a GPU that trains at scale has it.
    bf16 = t.precision in ("auto", "bf16") and t.gradient != "bptt"
    whole, sharded = FP32 * cost.parameters, gpus > 1 and t.parallel == "fsdp"
    part = whole // gpus if sharded else whole
    gradients_stay = t.accumulate > 1 or (gpus > 1 and not sharded)
    # A sharded model is whole while a step uses it, beside the part that stays.
    weights = whole + part if sharded else whole
    peak = weights + step_bytes(config, t.batch_size // gpus, bf16, gradients_stay)
    if sharded:
        # When gradients are shared out, the whole weights are gone, and all gradients are there twice and once a part.
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
