"""The fixed point by parallel passes, with the residual of every pass."""

from dataclasses import dataclass
from itertools import pairwise
from math import isfinite

import torch
from torch import Tensor, nn

from contextready.errors import ContextReadyError
from contextready.model.context_ready import ContextReady, check_passes
from contextready.model.state import State


@dataclass(frozen=True, eq=False)
class UnrollInfo:
    """How an unroll went. Norms are Euclidean per position; over positions and rows the largest counts."""

    residuals_KBT: Tensor
    """‖z_t^(k) - z_t^(k-1)‖ of each pass k = 2 … K, per row and position: (K - 1, B, T)."""
    scale: float
    """The largest ‖z_t^(K)‖, to which residuals are compared."""
    state: State | None
    """The state after the chunk, as the last pass left it, if a state was given."""
    tolerance: float | None
    """What was asked for, if anything."""
    has_fixed_point: bool
    """Whether the stream is what the passes settle on: not in the cumulative ablation, nor while dropout is redrawn."""
    last_change: float | None = None
    """How much the last pass changed a position's z at most, relative to its norm, where a tolerance was asked for."""

    @property
    def passes(self) -> int:
        """K, the passes made."""
        return len(self.residuals_KBT) + 1

    @property
    def relative_residuals(self) -> list[float]:
        """The largest residual of passes 2 … K, relative to the largest ‖z‖."""
        return [residual.max().item() / self.scale if self.scale else 0.0 for residual in self.residuals_KBT]

    @property
    def converged(self) -> bool:
        """Whether z is exact, or the last pass changed no position by more than the tolerance that was asked for."""
        return self.exact or (
            self.tolerance is not None and self.last_change is not None and self.last_change <= self.tolerance
        )

    @property
    def exact(self) -> bool:
        """Whether z is the fixed point, to rounding: T + 1 passes were made, whatever the contraction."""
        return self.has_fixed_point and isfinite(self.scale) and self.passes > self.residuals_KBT.shape[2]

    @property
    def rate(self) -> float | None:
        """What a pass multiplies the largest residual by: the worst of the last three; none before the third pass."""
        newest = self.relative_residuals[-4:]
        if len(newest) < 2:
            return None
        return max(after / before if before else 0.0 for before, after in pairwise(newest))

    @property
    def relative_error_bound(self) -> float | None:
        """The a-posteriori bound on the error of z, relative to the largest ‖z‖, at the measured rate.

        0 where z is exact; none where the rate is unknown or not below 1. The rate is measured on this trajectory,
        not a proven Lipschitz constant, so this is an estimate.
        """
        if self.exact:
            return 0.0
        rate = self.rate
        if rate is None or not rate < 1.0 or not self.has_fixed_point:
            return None
        return a_posteriori_bound(rate, self.relative_residuals[-1])


def unroll(
    model: ContextReady,
    tokens_BT: Tensor,
    passes: int | None = None,
    *,
    tolerance: float | None = None,
    state: State | None = None,
    cumulative: bool = False,
) -> tuple[Tensor, UnrollInfo]:
    """Iterate the parallel pass over a sequence, or over the next chunk after `state`: (z, info).

    Give `passes` (K) for a fixed number, or `tolerance` to stop when a pass changes no position's z by more than that,
    relative to its norm; with both, `passes` is the most that are made. T tokens are exact after
    T + 1 passes whatever the contraction, so a tolerance always ends there. `info.state` continues after the chunk.
    """
    if passes is None and tolerance is None:
        raise ContextReadyError("unroll needs passes (a fixed K), or a tolerance to reach, or both.")
    if tolerance is not None and not tolerance >= 0.0:
        raise ContextReadyError(f"tolerance={tolerance} is not a distance; give 0 or more, for example 1e-4.")
    if passes is not None:
        check_passes(passes)
    e_BTC = model.backbone.embed(tokens_BT)
    if state is not None:
        model.check_state(state, e_BTC)

    most = e_BTC.shape[1] + 1 if passes is None else passes
    all_passes = model.passes(e_BTC, state, cumulative)
    result = next(all_passes)
    residuals: list[Tensor] = []
    change: float | None = None
    while len(residuals) + 1 < most and (change is None or tolerance is None or not change <= tolerance):
        before_BTC, result = result.z_BTC.detach(), next(all_passes)
        z_BTC = result.z_BTC.detach()
        residuals.append(_norms(z_BTC - before_BTC))
        change = largest_change(before_BTC, z_BTC) if tolerance is not None else None
    info = UnrollInfo(
        residuals_KBT=torch.stack(residuals) if residuals else result.z_BTC.new_empty(0, *tokens_BT.shape),
        scale=_largest(result.z_BTC.detach()),
        last_change=change,
        state=None if state is None else state.advanced(result.carried_BTC, result.cache),
        tolerance=tolerance,
        has_fixed_point=not cumulative and not drops_out(model),
    )
    return result.z_BTC, info


def a_posteriori_bound(rate: float, residual: float) -> float:
    """‖c^(k) - c*‖ ≤ L / (1 - L) · ‖c^(k) - c^(k-1)‖, for a contraction rate L below 1."""
    check_rate(rate)
    return rate / (1.0 - rate) * residual


def check_rate(rate: float) -> None:
    """Refuse a rate for which no bound holds."""
    if not 0.0 <= rate < 1.0:
        raise ContextReadyError(f"The bound needs a rate from 0 to below 1, and it is {rate:.3g}.")


@torch.no_grad()
def largest_change(before_BTC: Tensor, z_BTC: Tensor, valid_BT: Tensor | None = None) -> float:
    """The largest change of a position's z, relative to its norm; what is not valid (padding) does not count."""
    # Each by its own norm: in pretrained models a few positions have norms many times the others'.
    change_BT = _norms(z_BTC - before_BTC) / _norms(z_BTC)
    if valid_BT is not None:
        change_BT = change_BT.masked_fill(~valid_BT.bool(), 0.0)
    # No change of nothing is none.
    return float(change_BT.masked_fill((z_BTC == before_BTC).all(dim=-1), 0.0).max())


def _largest(z_BTC: Tensor) -> float:
    return float(_norms(z_BTC).max())


def _norms(z_BTC: Tensor) -> Tensor:
    # Squares of half-precision numbers overflow, so norms are float32 at least.
    norms_BT: Tensor = torch.linalg.vector_norm(z_BTC, dim=-1, dtype=torch.promote_types(z_BTC.dtype, torch.float32))
    return norms_BT


def drops_out(model: nn.Module) -> bool:
    """Whether the model draws dropout masks now."""
    return any(isinstance(part, nn.Dropout) and part.training and part.p > 0 for part in model.modules())
