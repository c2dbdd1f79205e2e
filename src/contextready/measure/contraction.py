"""How fast the corrections of a model settle: the paper's L̂, and the Jacobian of its correction operator.

G maps the corrections c of all positions to new ones: G_t(c) = correction(z_{t-1}(c), e_t).
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
    """L̂ and where it comes from."""

    rate: float
    """L̂: the largest ratio of any position."""
    norm_rate: float
    """The ratio of the largest changes, wherever they are: never above L̂, and far steadier."""
    ratios_BT: Tensor
    """The ratio of each row and position; NaN where the correction had settled already."""


@torch.no_grad()
def empirical_rate(model: ContextReady, tokens_BT: Tensor, corrections: int) -> EmpiricalRate:
    """L̂ = max_t ‖c_{K,t} - c_{K-1,t}‖ / ‖c_{K-1,t} - c_{K-2,t}‖ with K = `corrections` ≥ 2 and c_0 = 0.

    A diagnostic of this trajectory, not a Lipschitz constant. Positions whose denominator is rounding noise (the
    first ones are exact after a few passes) have no ratio and are left out; if all have settled, L̂ is 0.
    """
    if corrections < 2:
        raise ContextReadyError(
            f"corrections={corrections} is too small; the rate compares two changes, so give 2 or more."
        )
    newest = correction_trajectory(model, tokens_BT, corrections)[-3:]
    if torch.finfo(newest[-1].dtype).bits < 32:
        raise ContextReadyError(
            f"{newest[-1].dtype} drowns changes in rounding; measure the rate in float32 or float64."
        )
    before_BT = norms(newest[1] - newest[0])
    after_BT = norms(newest[2] - newest[1])
    noise = 100 * torch.finfo(before_BT.dtype).eps * norms(newest[2]).max()
    moving_BT = before_BT > noise
    ratios_BT = torch.where(moving_BT, after_BT / before_BT, torch.nan)
    if not bool(noise.isfinite()):
        return EmpiricalRate(torch.nan, torch.nan, ratios_BT)
    if not bool(moving_BT.any()):
        return EmpiricalRate(0.0, 0.0, ratios_BT)
    norm_rate = after_BT[moving_BT].max() / before_BT.max()
    return EmpiricalRate(ratios_BT[moving_BT].max().item(), norm_rate.item(), ratios_BT)


def correction_trajectory(model: ContextReady, tokens_BT: Tensor, corrections: int) -> list[Tensor]:
    """c^(0) = 0, c^(1), … c^(n): the corrections that passes 1 … n + 1 enter with."""
    e_BTC = model.backbone.embed(tokens_BT)
    results = islice(model.passes(e_BTC), corrections + 1)
    return [torch.zeros_like(e_BTC) if r.correction_BTC is None else r.correction_BTC for r in results]


def correction_operator(model: ContextReady, c_BTC: Tensor, e_BTC: Tensor) -> Tensor:
    """G(c; e): the corrections that follow when tokens enter the blocks as e + c."""
    out: Tensor = model.correction(shift_right(model.enter(e_BTC, c_BTC).carried_BTC), e_BTC)
    return out


def jacobian_norms(model: ContextReady, c_BTC: Tensor, e_BTC: Tensor, of: str = "correction") -> Tensor:
    """‖∂G_t/∂c_s‖ (or with `of="embedding"`, ‖∂G_t/∂e_s‖) at this point: (B, T, T), operator norms.

    Builds the whole Jacobian, (T C)² numbers a row: for small models and short sequences.
    """
    if of not in ("correction", "embedding"):
        raise ContextReadyError(f"of='{of}' is unknown; choose correction or embedding.")
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
