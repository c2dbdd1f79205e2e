"""Solves the fixed point with parallel passes, and reports how much every pass changed."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from contextready.errors import ContextReadyError
from contextready.model.checks import check_passes
from contextready.model.context_ready import ContextReady, Pass
from contextready.model.state import State
from contextready.solve.norms import relative_changes
from contextready.solve.prompt_reader import check_tolerance
from contextready.solve.reading import a_posteriori_bound


@dataclass(frozen=True, eq=False)
class UnrollInfo:
    """The outcome of an unroll. Changes are relative to the norm at their own position."""

    changes_KBT: Tensor
    """‖z_t^(k) - z_t^(k-1)‖ / ‖z_t^(k)‖ for passes k = 2 … K, per row and position: (K - 1, B, T)."""
    state: State | None
    """The state after the chunk, from the last pass, if a state was given."""
    tolerance: float | None
    """The tolerance that was given, if any."""
    has_fixed_point: bool
    """Whether the passes converge to the stream. They do not in the cumulative ablation, nor with active dropout."""

    @property
    def passes(self) -> int:
        """K, the number of passes."""
        return len(self.changes_KBT) + 1

    @property
    def changes(self) -> list[float]:
        """The largest change of any position in each of passes 2 … K."""
        return [float(change_BT.max()) for change_BT in self.changes_KBT]

    @property
    def converged(self) -> bool:
        """Whether z is exact, or the last pass changed no position by more than the given tolerance."""
        return self.exact or (self.tolerance is not None and self.passes > 1 and self.changes[-1] <= self.tolerance)

    @property
    def exact(self) -> bool:
        """Whether z is the fixed point up to rounding, which T + 1 passes always reach."""
        enough = self.passes > self.changes_KBT.shape[2]
        return self.has_fixed_point and enough and bool(self.changes_KBT[-1].isfinite().all())

    @property
    def rate(self) -> float | None:
        """The factor by which a pass changes the largest change: the worst of the last three, or none before pass 3."""
        newest = self.changes[-4:]
        if len(newest) < 2:
            return None
        return max(after / before if before else 0.0 for before, after in pairwise(newest))

    @property
    def error_bound(self) -> float | None:
        """The a-posteriori bound on the error of z, relative to each position's norm, at the measured rate.

        It is 0 if z is exact, and none if the rate is unknown or not below 1. The rate is measured on this trajectory
        and is not a proven Lipschitz constant, so this is an estimate.
        """
        if self.exact:
            return 0.0
        rate = self.rate
        if rate is None or not rate < 1.0 or not self.has_fixed_point:
            return None
        return a_posteriori_bound(rate, self.changes[-1])


def unroll(
    model: ContextReady,
    tokens_BT: Tensor,
    passes: int | None = None,
    *,
    tolerance: float | None = None,
    state: State | None = None,
    cumulative: bool = False,
) -> tuple[Tensor, UnrollInfo]:
    """Iterate the parallel pass over a sequence, or over the next chunk after `state`; return (z, info).

    Give `passes` (K) for a fixed number of passes, or `tolerance` to stop when a pass changes no position's z by more
    than that, relative to its norm. With both, `passes` is the maximum. T tokens are exact after T + 1 passes whatever
    the contraction, so a tolerance stops there at the latest. `info.state` is the state after the chunk.
    """
    if passes is None and tolerance is None:
        raise ContextReadyError("unroll needs passes (a fixed K), a tolerance, or both.")
    check_tolerance(tolerance)
    if passes is not None:
        check_passes(passes)
    e_BTC = model.embed(tokens_BT)
    if state is not None:
        model.check_state(state, e_BTC)
    past, before_B1C = (None, None) if state is None else (state.cache, state.z_prev_B1C)
    most = e_BTC.shape[1] + 1 if passes is None else passes
    result, changes_KBT = iterate(model.passes(e_BTC, past, before_B1C, cumulative), most, tolerance)
    info = UnrollInfo(
        changes_KBT=changes_KBT,
        state=None if state is None else state.advanced(result.carried_BTC, result.cache),
        tolerance=tolerance,
        has_fixed_point=not cumulative and not drops_out(model),
    )
    return result.z_BTC, info


def iterate(passes: Iterator[Pass], most: int, tolerance: float | None) -> tuple[Pass, Tensor]:
    """Run passes until one changes no position by more than the tolerance, and at most `most`.

    Returns the last pass, and the relative changes of passes 2 … K: (K - 1, B, T).
    """
    result = next(passes)
    changes: list[Tensor] = []
    while len(changes) + 1 < most and (not changes or tolerance is None or not bool((changes[-1] <= tolerance).all())):
        before_BTC, result = result.z_BTC.detach(), next(passes)
        changes.append(relative_changes(before_BTC, result.z_BTC.detach()))
    return result, torch.stack(changes) if changes else result.z_BTC.new_empty(0, *result.z_BTC.shape[:2])


def drops_out(model: nn.Module) -> bool:
    """Whether dropout is active in the model."""
    return any(isinstance(part, nn.Dropout) and part.training and part.p > 0 for part in model.modules())
