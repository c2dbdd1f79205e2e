"""The report on how a prompt was read, and the error estimated from its last changes. Needs only Python."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, isfinite, isnan

from contextready.errors import ContextReadyError

STALLED = 0.9
"""Early passes whose changes shrink by less than this do not contract."""
ROUNDING = 2**-7
"""Smaller changes of z are mostly due to rounding if matrices and their inputs are in bf16 (2**-9 each)."""


def check_rate(rate: float) -> None:
    """Raise an error for a contraction rate for which no bound holds."""
    if not 0.0 <= rate < 1.0:
        raise ContextReadyError(f"The rate must be at least 0 and less than 1, but got {rate:.3g}.")


def a_posteriori_bound(rate: float, change: float) -> float:
    """Return the bound ‖c^(k) - c*‖ ≤ L / (1 - L) · ‖c^(k) - c^(k-1)‖, for a contraction rate L below 1."""
    check_rate(rate)
    return rate / (1.0 - rate) * change


def estimated_error(changes: Sequence[float]) -> float:
    """Estimate the error after the last of these changes: the smaller of that change and the a-posteriori bound.

    The rate of the bound is the ratio of the last two changes, so this is an estimate and not a proof.
    """
    if not changes:
        return inf
    rate = changes[-1] / changes[-2] if len(changes) > 1 and changes[-2] else 1.0
    return min(changes[-1], a_posteriori_bound(rate, changes[-1])) if rate < 1.0 else changes[-1]


def early_should_end(changes: Sequence[float], tolerance: float) -> bool:
    """Whether early passes or sweeps in bf16, which changed this much, should be followed by exact ones.

    They should if they stop contracting, or if the next one will probably change no more than the tolerance, or no more
    than rounding does.
    """
    if not changes or not isfinite(changes[-1]):
        return bool(changes)
    enough = max(tolerance, ROUNDING)
    if len(changes) < 2 or changes[-1] == 0.0:
        return changes[-1] <= enough
    rate = changes[-1] / changes[-2]
    return rate >= STALLED or rate * changes[-1] <= enough


def all_exact(changes: Sequence[float], tokens: int) -> bool:
    """Whether this many tokens are exact after these changes of passes 2, 3, …

    They are if T + 1 passes were made and no value overflowed, or if the last pass changed nothing at all.
    """
    return bool(changes) and (changes[-1] == 0.0 or (len(changes) == tokens and isfinite(changes[-1])))


@dataclass(frozen=True)
class ReadInfo:
    """How a prompt was read, what it cost, and how far the result is from exact."""

    solver: str
    """The solver that was used: sequential, jacobi, sweep, or plain for a model without a correction."""
    tokens: int
    seconds: float
    passes: float
    """The average number of passes through the blocks per token: 1 for sequential."""
    macs: int | None
    """Multiply-accumulates, or none if they are not known for this model."""
    plain_macs: int | None
    """Multiply-accumulates of one pass of the blocks over the same tokens without a correction."""
    changes: tuple[float, ...]
    """The largest change of any position's z, relative to its norm, in each pass or sweep after the first."""
    exact: bool
    """Whether the result equals the stream's, up to rounding."""
    note: str = ""
    """What was done differently from what was asked, and why."""
    bf16_passes: float = 0.0
    """How many of the passes multiplied in bf16; the others were made in the type of the model."""

    @property
    def certificate(self) -> float:
        """The estimated remaining error, relative to each position's norm; 0 if the result is exact."""
        return 0.0 if self.exact else estimated_error(self.changes)

    @property
    def cost(self) -> float | None:
        """The multiply-accumulates in units of one plain pass."""
        return None if self.macs is None or not self.plain_macs else self.macs / self.plain_macs


def joined(infos: Sequence[ReadInfo], seconds: float) -> ReadInfo:
    """Combine the reports on the parts of a prompt; the certificate is that of the worst part.

    The solver is that of the longest part.
    """
    # NaN counts as the worst.
    worst = max(infos, key=lambda info: inf if isnan(info.certificate) else info.certificate)
    tokens = sum(info.tokens for info in infos)
    return ReadInfo(
        solver=max(infos, key=lambda info: info.tokens).solver,
        tokens=tokens,
        seconds=seconds,
        passes=sum(info.passes * info.tokens for info in infos) / tokens,
        macs=_sum_of(infos, lambda info: info.macs),
        plain_macs=_sum_of(infos, lambda info: info.plain_macs),
        changes=worst.changes,
        exact=all(info.exact for info in infos),
        note=next((info.note for info in infos if info.note), ""),
        bf16_passes=sum(info.bf16_passes * info.tokens for info in infos) / tokens,
    )


def _sum_of(infos: Sequence[ReadInfo], part: Callable[[ReadInfo], int | None]) -> int | None:
    parts = [part(info) for info in infos]
    return None if None in parts else sum(one for one in parts if one is not None)
