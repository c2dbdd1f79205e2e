"""The paper's bounds, as plain functions of numbers and matrices."""

import math

import torch
from torch import Tensor

from contextready.errors import ContextReadyError
from contextready.solve.reading import a_posteriori_bound, check_rate


def warm_start_bound(rate: float, embedding_rate: float, embedding_change: float) -> float:
    """‖G(c*; e') - c*'‖ ≤ L M / (1 - L) · ‖e' - e‖: one pass from the old fixed point after the tokens changed."""
    return a_posteriori_bound(rate, embedding_rate * embedding_change)


def tracking_bound(rate: float, step_error: float) -> float:
    """‖b_t - π(s_t)‖ ≤ ε / (1 - L_h) for all t: a step that errs by ε never drifts further than this."""
    check_rate(rate)
    return step_error / (1.0 - rate)


def causal_contraction_bound(a_TT: Tensor, weights_T: Tensor | None = None) -> float:
    """L_w = max_t w_t Σ_{s<t} a_ts / w_s: a Lipschitz constant of G in the norm max_t w_t ‖c_t‖.

    `a_TT[t, s]` bounds ‖∂G_t/∂c_s‖. Weights that fall fast enough make any past-only G a contraction.
    """
    _check_past_only(a_TT)
    w_T = torch.ones_like(a_TT[0]) if weights_T is None else weights_T
    if w_T.shape != a_TT.shape[:1] or not bool((w_T > 0).all()):
        raise ContextReadyError("The weights must be one positive number for each position.")
    return (w_T * (a_TT / w_T).sum(dim=1)).max().item()


def path_sum_bound(a_TT: Tensor, first: float, corrections: int) -> Tensor:
    """‖c_t^(n) - c_t*‖ ≤ [Aⁿ (I - A)⁻¹ 1]_t · B for every position t, after n corrections from c^(0) = 0.

    B = `first` is max_t ‖G_t(0)‖. K passes of the blocks use K - 1 corrections.
    """
    _check_past_only(a_TT)
    if corrections < 0:
        raise ContextReadyError(f"corrections={corrections} is too small; give 0 or more.")
    T = a_TT.shape[0]
    ones_T = torch.ones_like(a_TT[0])
    paths_T = torch.linalg.solve_triangular(
        torch.eye(T, dtype=a_TT.dtype, device=a_TT.device) - a_TT, ones_T[:, None], upper=False
    )[:, 0]
    bound_T: Tensor = first * (torch.linalg.matrix_power(a_TT, corrections) @ paths_T)
    return bound_T


def receptive_field(layers: int, window: int, passes: int = 1) -> int:
    """How many positions before it an N-layer transformer with window W can see: N (W - 1).

    The window counts the token itself. (The paper's N · W counts it as if it did not, or bounds from above.) K parallel
    passes of a context-ready model see K times as far and one position more for each shift; its stream sees everything.
    """
    return passes * layers * (window - 1) + passes - 1


def layers_to_reach(distance: int, window: int) -> int:
    """How few layers of a windowed transformer can carry anything over that many positions."""
    if distance <= 0:
        return 0
    if window < 2:
        raise ContextReadyError("A window of 1 sees only the token itself, so no depth reaches further back.")
    return math.ceil(distance / (window - 1))


def _check_past_only(a_TT: Tensor) -> None:
    if a_TT.dim() != 2 or a_TT.shape[0] != a_TT.shape[1] or bool(a_TT.triu().any()) or bool((a_TT < 0).any()):
        raise ContextReadyError(
            "The matrix of Jacobian norms must be square, non-negative and zero on and above the diagonal."
        )
