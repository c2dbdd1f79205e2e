"""The training loss: cross-entropy of the last of K passes, for a context-ready model or its baseline."""

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from contextready.model.context_ready import ContextReady
from contextready.model.transformer import Transformer
from contextready.solve.gradients import continued, implicit_backward, passes_through, settle


class Loss(NamedTuple):
    """What a forward gave."""

    mean: Tensor
    """Cross-entropy per token."""
    residual: float | None
    """How much the last pass changed z in the first row, relative to the largest ‖z‖; none for one pass."""
    adjoint_steps: int = 0
    """Vector-Jacobian products an implicit gradient took."""


class Objective:
    """The loss and its gradient, with passes compiled or recomputed and the gradient cut short if asked for."""

    def __init__(
        self,
        model: Transformer | ContextReady,
        compiled: bool = False,
        recompute: bool = False,
        gradient: str = "unroll",
        truncated_passes: int = 1,
        adjoint_steps: int | None = None,
        adjoint_tolerance: float = 1e-3,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.model, self.gradient, self.autocast = model, gradient, autocast
        self.truncated_passes, self.adjoint_steps = truncated_passes, adjoint_steps
        self.adjoint_tolerance = adjoint_tolerance
        one_pass: Any = model.recur if isinstance(model, ContextReady) else model.blocks
        if compiled:
            one_pass = torch.compile(one_pass)
        if recompute:
            one_pass = partial(checkpoint, one_pass, use_reentrant=False)
        self.one_pass = one_pass

    def __call__(self, inputs_BT: Tensor, targets_BT: Tensor, passes: int, measure: bool = False) -> Loss:
        """The loss of K = `passes`, differentiable through all; `measure` also takes the residual of the last pass."""
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

    def backward(
        self, inputs_BT: Tensor, targets_BT: Tensor, passes: int, scale: float = 1.0, measure: bool = False
    ) -> Loss:
        """Accumulate `scale` times the gradient of the loss of K = `passes`; the loss comes back without a graph."""
        through = passes_through(self.gradient, self.truncated_passes, passes)
        if not isinstance(self.model, ContextReady) or through == passes:
            with self.autocast():
                loss = self(inputs_BT, targets_BT, passes, measure)
            (loss.mean * scale).backward()  # type: ignore[no-untyped-call]
            return Loss(loss.mean.detach(), loss.residual)
        return self._cut_short(self.model, inputs_BT, targets_BT, passes, through, scale, measure)

    def _cut_short(
        self,
        model: ContextReady,
        inputs_BT: Tensor,
        targets_BT: Tensor,
        passes: int,
        through: int,
        scale: float,
        measure: bool,
    ) -> Loss:
        """The first passes without a gradient, the last `through` with one; `implicit` goes on to the fixed point's."""
        implicit = self.gradient == "implicit"
        with self.autocast():
            e_BTC = model.backbone.embed(inputs_BT)
            before = settle(model, e_BTC.detach(), passes - through, self.one_pass)
            entered_BTC = before.carried_BTC.detach().requires_grad_(implicit)
            made = deque(continued(model, e_BTC, entered_BTC, through, self.one_pass), maxlen=2)
            last, earlier_BTC = made[-1], made[-2].z_BTC if len(made) > 1 else before.z_BTC
            # The implicit gradient needs dloss/dz by itself, so there the head's graph ends at z.
            z_BTC = last.z_BTC.detach().requires_grad_() if implicit else last.z_BTC
            mean = mean_cross_entropy(model.backbone.head(z_BTC), targets_BT)
        (mean * scale).backward()  # type: ignore[no-untyped-call]
        adjoint_steps = 0
        if implicit:
            assert z_BTC.grad is not None
            adjoint = implicit_backward(last, entered_BTC, z_BTC.grad, self.adjoint_steps, self.adjoint_tolerance)
            adjoint_steps = adjoint.steps
        residual = _relative_change(earlier_BTC[:1], last.z_BTC[:1]) if measure else None
        return Loss(mean.detach(), residual, adjoint_steps)


def mean_cross_entropy(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Nats per token, in float32 at least."""
    wide = torch.promote_types(logits_BTV.dtype, torch.float32)
    return F.cross_entropy(logits_BTV.flatten(0, 1).to(wide), targets_BT.flatten())


@torch.no_grad()
def _relative_change(before: Tensor, after: Tensor) -> float:
    return float((after - before).norm(dim=-1).max() / after.norm(dim=-1).max())
