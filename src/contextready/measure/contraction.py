"""How fast a model's corrections converge: the paper's L̂, and the Jacobian of the correction operator.

The operator G maps the corrections c of all positions to new ones: G_t(c) = correction(z_{t-1}(c), e_t).
"""

from functools import partial
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from contextready.errors import ContextReadyError
from contextready.model.context_ready import ContextReady, shift_right
from contextready.solve.norms import norms


class EmpiricalRate(NamedTuple):
    """L̂ and the ratios that it is computed from."""

    rate: float
    """L̂, the largest ratio of any position."""
    norm_rate: float
    """The ratio of the largest changes over all positions: never above L̂, and far less noisy."""
    ratios_BT: Tensor
    """The ratio at each row and position; NaN if the correction had already converged there."""
    channel_rate: float
    """The ratio of the largest changes of any single channel: the estimate in the author's public notebooks."""


@torch.no_grad()
def empirical_rate(model: ContextReady, tokens_BT: Tensor, corrections: int) -> EmpiricalRate:
    """L̂ = max_t ‖c_{K,t} - c_{K-1,t}‖ / ‖c_{K-1,t} - c_{K-2,t}‖ with K = `corrections` ≥ 2 and c_0 = 0.

    This is a diagnostic of one trajectory, not a Lipschitz constant. Positions whose denominator is rounding noise are
    left out (the first positions are exact after a few passes). If all have converged, L̂ is 0.
    """
    if corrections < 2:
        raise ContextReadyError(
            f"corrections must be at least 2, because the rate compares two changes, but got {corrections}."
        )
    newest = correction_trajectory(model, tokens_BT, corrections)[-3:]
    if torch.finfo(newest[-1].dtype).bits < 32:
        raise ContextReadyError(
            f"The rate cannot be measured in {newest[-1].dtype}, which rounds too much; use float32 or float64."
        )
    before_BT = norms(newest[1] - newest[0])
    after_BT = norms(newest[2] - newest[1])
    noise = 100 * torch.finfo(before_BT.dtype).eps * norms(newest[2]).max()
    moving_BT = before_BT > noise
    ratios_BT = torch.where(moving_BT, after_BT / before_BT, torch.nan)
    if not bool(noise.isfinite()):
        return EmpiricalRate(torch.nan, torch.nan, ratios_BT, torch.nan)
    if not bool(moving_BT.any()):
        return EmpiricalRate(0.0, 0.0, ratios_BT, 0.0)
    norm_rate = after_BT[moving_BT].max() / before_BT.max()
    channel_rate = (newest[2] - newest[1]).abs().max() / (newest[1] - newest[0]).abs().max()
    return EmpiricalRate(ratios_BT[moving_BT].max().item(), norm_rate.item(), ratios_BT, channel_rate.item())


def correction_trajectory(model: ContextReady, tokens_BT: Tensor, corrections: int) -> list[Tensor]:
    """Return c^(0) = 0, c^(1), … c^(n), the corrections used by passes 1 … n + 1."""
    e_BTC = model.embed(tokens_BT)
    results = islice(model.passes(e_BTC), corrections + 1)
    return [torch.zeros_like(e_BTC) if r.correction_BTC is None else r.correction_BTC for r in results]


def correction_operator(model: ContextReady, c_BTC: Tensor, e_BTC: Tensor) -> Tensor:
    """Return G(c; e), the new corrections after the blocks have been run on e + c."""
    out: Tensor = model.correction(shift_right(model.enter(e_BTC, c_BTC).carried_BTC), e_BTC)
    return out


def jacobian_norms(model: ContextReady, c_BTC: Tensor, e_BTC: Tensor, of: str = "correction") -> Tensor:
    """Return the operator norms ‖∂G_t/∂c_s‖, or ‖∂G_t/∂e_s‖ with `of="embedding"`, at this point: (B, T, T).

    This builds the whole Jacobian, (T C)² numbers per row, so it is only for small models and short sequences.
    """
    if of not in ("correction", "embedding"):
        raise ContextReadyError(f"of must be 'correction' or 'embedding', but got '{of}'.")
    rows = []
    for row in range(c_BTC.shape[0]):
        c_1TC, e_1TC = c_BTC[row : row + 1].detach(), e_BTC[row : row + 1].detach()
        if of == "correction":
            along, point = partial(correction_operator, model, e_BTC=e_1TC), c_1TC
        else:
            along, point = partial(correction_operator, model, c_1TC), e_1TC
        jacobian = torch.autograd.functional.jacobian(along, point)  # type: ignore[no-untyped-call]
        rows.append(torch.linalg.matrix_norm(jacobian[0, :, :, 0].permute(0, 2, 1, 3), ord=2))
    return torch.stack(rows)
