"""The training loss: cross-entropy of the last of K passes, for a context-ready model or its baseline."""

from collections import deque
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from contextready.model.context_ready import ContextReady
from contextready.model.transformer import Transformer


class Loss(NamedTuple):
    """What a forward gave."""

    mean: Tensor
    """Cross-entropy per token."""
    residual: float | None
    """How much the last pass changed z in the first row, relative to the largest ‖z‖; none for one pass."""


class Objective:
    """One forward to the loss, with passes compiled or recomputed if asked for."""

    def __init__(self, model: Transformer | ContextReady, compiled: bool = False, recompute: bool = False) -> None:
        self.model = model
        one_pass: Any = model.recur if isinstance(model, ContextReady) else model.blocks
        if compiled:
            one_pass = torch.compile(one_pass)
        if recompute:
            one_pass = partial(checkpoint, one_pass, use_reentrant=False)
        self.one_pass = one_pass

    def __call__(self, inputs_BT: Tensor, targets_BT: Tensor, passes: int, measure: bool = False) -> Loss:
        """The loss of K = `passes`; `measure` also takes the residual of the last pass."""
        residual = None
        if isinstance(self.model, ContextReady):
            e_BTC = self.model.backbone.embed(inputs_BT)
            made = deque(islice(self.model.passes(e_BTC, recur=self.one_pass), passes), maxlen=2)
            z_BTC = made[-1].z_BTC
            if measure and passes > 1:
                residual = _relative_change(made[-2].z_BTC[:1], z_BTC[:1])
            logits_BTV = self.model.backbone.head(z_BTC)
        else:
            z_BTC, _ = self.one_pass(self.model.embed(inputs_BT))
            logits_BTV = self.model.head(z_BTC)
        return Loss(mean_cross_entropy(logits_BTV, targets_BT), residual)


def mean_cross_entropy(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Nats per token, in float32 at least."""
    wide = torch.promote_types(logits_BTV.dtype, torch.float32)
    return F.cross_entropy(logits_BTV.flatten(0, 1).to(wide), targets_BT.flatten())


@torch.no_grad()
def _relative_change(before: Tensor, after: Tensor) -> float:
    return float((after - before).norm(dim=-1).max() / after.norm(dim=-1).max())
