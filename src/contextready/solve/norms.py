"""How large outputs are and how much they changed: the measure that every solver, tolerance and report shares.

A change is relative to the norm of the position it happens at: the head normalises every position by itself, and in
pretrained models a few positions have norms many times the others'.
"""

import torch
from torch import Tensor


def norms(z_BTC: Tensor) -> Tensor:
    """‖z‖ of every position (B, T), Euclidean, in float32 at least: squares of half-precision numbers overflow."""
    norms_BT: Tensor = torch.linalg.vector_norm(z_BTC, dim=-1, dtype=torch.promote_types(z_BTC.dtype, torch.float32))
    return norms_BT


@torch.no_grad()
def relative_changes(before_BTC: Tensor, z_BTC: Tensor) -> Tensor:
    """How much every position's z changed (B, T), relative to its norm; no change of nothing is 0."""
    change_BT = norms(z_BTC - before_BTC)
    return (change_BT / norms(z_BTC)).masked_fill(change_BT == 0.0, 0.0)


def largest_change(before_BTC: Tensor, z_BTC: Tensor, valid_BT: Tensor | None = None) -> float:
    """The largest relative change of any position; what is not valid (padding) does not count."""
    changes_BT = relative_changes(before_BTC, z_BTC)
    if valid_BT is not None:
        changes_BT = changes_BT.masked_fill(~valid_BT.bool(), 0.0)
    return float(changes_BT.max())
