"""Norms of outputs and their relative changes, which all solvers, tolerances and reports use.

A change is relative to the norm at its own position, because the head normalizes every position separately, and in
pretrained models a few positions have much larger norms than the others.
"""

import torch
from torch import Tensor


def norms(z_BTC: Tensor) -> Tensor:
    """Return the Euclidean norm of every position (B, T), at least in float32, because squares overflow in float16."""
    norms_BT: Tensor = torch.linalg.vector_norm(z_BTC, dim=-1, dtype=torch.promote_types(z_BTC.dtype, torch.float32))
    return norms_BT


@torch.no_grad()
def relative_changes(before_BTC: Tensor, z_BTC: Tensor) -> Tensor:
    """Return the change of every position's z (B, T), relative to its norm; an unchanged zero counts as 0."""
    change_BT = norms(z_BTC - before_BTC)
    return (change_BT / norms(z_BTC)).masked_fill(change_BT == 0.0, 0.0)


def largest_change(before_BTC: Tensor, z_BTC: Tensor, valid_BT: Tensor | None = None) -> float:
    """Return the largest relative change over all positions; positions that are not valid (padding) are ignored."""
    changes_BT = relative_changes(before_BTC, z_BTC)
    if valid_BT is not None:
        changes_BT = changes_BT.masked_fill(~valid_BT.bool(), 0.0)
    return float(changes_BT.max())
