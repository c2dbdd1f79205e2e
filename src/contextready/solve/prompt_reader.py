"""The settings for reading prompts. Needs only Python."""

from dataclasses import dataclass

from contextready.errors import ContextReadyError, nearest
from contextready.formats.limits import shown

SOLVERS = ("sweep", "jacobi", "sequential")
BF16_PASSES = ("auto", "on", "off")
TOLERANCE = 0.05
"""The accepted error of z, estimated from the last changes and relative to each position's norm. The true error is far
smaller, and greedy continuations equaled the stream's (docs/log.md)."""
CHUNK = 4096
"""The number of tokens solved at once, which limits the memory for long prompts."""
SHORTEST_SEGMENT = 8
"""Shorter segments would need so many more sweeps that their wider steps would not pay off."""
FEWEST_SEGMENTS = 4
"""With fewer segments, a plain pass and the usual three sweeps cost more than reading one token at a time."""


@dataclass(frozen=True)
class PromptReader:
    """The settings for reading prompts."""

    solver: str = "sweep"
    """sweep, jacobi or sequential."""
    tolerance: float = TOLERANCE
    """When to stop: jacobi's last pass must change no more than this, and sweep's estimated error must be within it."""
    segment: int | None = None
    """L, the length of sweep's segments; none chooses it for this hardware."""
    chunk: int = CHUNK
    """Prompts longer than this are solved chunk by chunk."""
    bf16_passes: str = "auto"
    """Whether early passes and sweeps over a prompt are made in bf16: on, off, or auto, which makes them for models in
    fp32 if the hardware multiplies bf16 natively."""

    def __post_init__(self) -> None:
        if self.solver not in SOLVERS:
            raise ContextReadyError(f"Unknown solver '{self.solver}'; {nearest(self.solver, SOLVERS)}")
        check_tolerance(self.tolerance)
        if self.bf16_passes not in BF16_PASSES:
            raise ContextReadyError(f"bf16_passes must be auto, on or off, but got {shown(self.bf16_passes)}.")
        if self.chunk < 1 or (self.segment is not None and self.segment < 1):
            raise ContextReadyError(
                f"chunk and segment must be at least 1, but got chunk={self.chunk} and segment={self.segment}."
            )


def check_tolerance(tolerance: float | None) -> None:
    """Raise an error if the tolerance is negative or NaN."""
    if tolerance is not None and not tolerance >= 0.0:
        raise ContextReadyError(f"tolerance must be at least 0 (for example 0.01), but got {tolerance}.")
