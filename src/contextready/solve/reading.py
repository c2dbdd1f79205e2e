"""How a prompt was read, and what its last changes say about the error. Needs nothing but Python."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from contextready.errors import ContextReadyError


def check_rate(rate: float) -> None:
    """Refuse a rate for which no bound holds."""
    if not 0.0 <= rate < 1.0:
        raise ContextReadyError(f"The bound needs a rate from 0 to below 1, and it is {rate:.3g}.")


def a_posteriori_bound(rate: float, change: float) -> float:
    """‖c^(k) - c*‖ ≤ L / (1 - L) · ‖c^(k) - c^(k-1)‖, for a contraction rate L below 1."""
    check_rate(rate)
    return rate / (1.0 - rate) * change


def estimated_error(changes: Sequence[float]) -> float:
    """The error after the last of these changes: no more than that change, or the a-posteriori bound at their rate.

    The rate is the ratio of the last two changes: an estimate, not a proof.
    """
    if not changes:
        return inf
    rate = changes[-1] / changes[-2] if len(changes) > 1 and changes[-2] else 1.0
    return min(changes[-1], a_posteriori_bound(rate, changes[-1])) if rate < 1.0 else changes[-1]


@dataclass(frozen=True)
class ReadInfo:
    """How a prompt was read: what it cost, and how far from exact the result is."""

    solver: str
    """What did the work: sequential, jacobi, sweep, or plain where there is no correction."""
    tokens: int
    seconds: float
    passes: float
    """Passes through the blocks that a token made, on average: 1 for sequential."""
    macs: int | None
    """Multiply-accumulates spent, or none where a model's are not known."""
    plain_macs: int | None
    """What one plain pass of the blocks over the same tokens, without any correction, spends."""
    changes: tuple[float, ...]
    """The largest change of a position's z by each pass or sweep after the first, relative to its norm."""
    exact: bool
    """Whether the result is the stream's, to rounding."""
    note: str = ""
    """What was done otherwise than asked, and why."""

    @property
    def certificate(self) -> float:
        """What is left of the error, as the changes tell it, relative to each position's norm: 0 where exact."""
        return 0.0 if self.exact else estimated_error(self.changes)

    @property
    def cost(self) -> float | None:
        """The arithmetic in units of one plain pass."""
        return None if self.macs is None or not self.plain_macs else self.macs / self.plain_macs
