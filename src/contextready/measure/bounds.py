"""The paper's bounds, as plain functions of numbers and matrices."""

import math

import torch
from torch import Tensor

from contextready.errors import ContextReadyError
from contextready.solve.reading import a_posteriori_bound, check_rate


def warm_start_bound(rate: float, embedding_rate: float, embedding_change: float) -> float:
    """‖G(c*; e') - c*'‖ ≤ L M / (1 - L) · ‖e' - e‖: the error of one pass from the old fixed point for new tokens."""
    return a_posteriori_bound(rate, embedding_rate * embedding_change)


def tracking_bound(rate: float, step_error: float) -> float:
    """‖b_t - π(s_t)‖ ≤ ε / (1 - L_h) for all t: steps with an error of ε never drift further than this."""
    check_rate(rate)
    return step_error / (1.0 - rate)


def causal_contraction_bound(a_TT: Tensor, weights_T: Tensor | None = None) -> float:
    """L_w = max_t w_t Σ_{s<t} a_ts / w_s: a Lipschitz constant of G in the norm max_t w_t ‖c_t‖.

    `a_TT[t, s]` bounds ‖∂G_t/∂c_s‖. Weights that decrease fast enough make any strictly causal G a contraction.
    """
    _check_past_only(a_TT)
    w_T = torch.ones_like(a_TT[0]) if weights_T is None else weights_T
    if w_T.shape != a_TT.shape[:1] or not bool((w_T > 0).all()):
        raise ContextReadyError("weights_T must hold one positive number per position.")
    return (w_T * (a_TT / w_T).sum(dim=1)).max().item()


def path_sum_bound(a_TT: Tensor, first: float, corrections: int) -> Tensor:
    """‖c_t^(n) - c_t*‖ ≤ [Aⁿ (I - A)⁻¹ 1]_t · B for every position t, after n corrections from c^(0) = 0.

    B = `first` is max_t ‖G_t(0)‖. K passes of the blocks use K - 1 corrections.
    """
    _check_past_only(a_TT)
    if corrections < 0:
        raise ContextReadyError(f"corrections must be at least 0, but got {corrections}.")
    T = a_TT.shape[0]
    ones_T = torch.ones_like(a_TT[0])
    paths_T = torch.linalg.solve_triangular(
        torch.eye(T, dtype=a_TT.dtype, device=a_TT.device) - a_TT, ones_T[:, None], upper=False
    )[:, 0]
    bound_T: Tensor = first * (torch.linalg.matrix_power(a_TT, corrections) @ paths_T)
    return bound_T


def receptive_field(layers: int, window: int, passes: int = 1) -> int:
    """Return how many earlier positions a token of an N-layer transformer with window W can depend on: N (W - 1).

    The window includes the token itself. (The paper's N · W counts a window without it, or is an upper bound.) With K
    parallel passes, a context-ready model sees K times as far, plus one position per shift. Its stream sees everything.
    """
    return passes * layers * (window - 1) + passes - 1


def layers_to_reach(distance: int, window: int) -> int:
    """Return how many layers a windowed transformer needs at least to carry information over this distance."""
    if distance <= 0:
        return 0
    if window < 2:
        raise ContextReadyError(
            "A window of 1 contains only the token itself, so no number of layers reaches further back."
        )
    return math.ceil(distance / (window - 1))


def _check_past_only(a_TT: Tensor) -> None:
    if a_TT.dim() != 2 or a_TT.shape[0] != a_TT.shape[1] or bool(a_TT.triu().any()) or bool((a_TT < 0).any()):
        raise ContextReadyError(
            "The matrix of Jacobian norms must be square, non-negative and zero on and above the diagonal."
        )
