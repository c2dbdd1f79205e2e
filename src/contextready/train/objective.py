"""The training loss: the cross-entropy after the last of K passes, or of the stream with gradient=bptt.

On request it also contains a convergence term, the mean squared change of the block inputs by one more pass.
"""

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from contextready.data.shards import IGNORED
from contextready.model.context_ready import ContextReady, Pass, shift_right
from contextready.runs.config import TrainConfig
from contextready.solve.bptt import DifferentiableStream
from contextready.solve.gradients import Adjoint, at_fixed_point, continued, passes_through, settle
from contextready.solve.norms import largest_change


class Loss(NamedTuple):
    """The result of a forward."""

    mean: Tensor
    """Cross-entropy per token."""
    total: Tensor
    """What is minimised: the cross-entropy, and the convergence term if it has a weight."""
    residual: float | None
    """How much the last pass changed the first row: the largest relative change of a position. None for a stream."""
    adjoint_steps: int = 0
    """The number of vector-Jacobian products of an implicit gradient, which is known after the backward."""


class Objective(nn.Module):
    """The loss as one differentiable graph, in any gradient mode, with compiled or recomputed passes if requested.

    It is a module so that DDP and FSDP can wrap it, with one forward and one backward per step.
    """

    def __init__(
        self,
        model: ContextReady,
        *,
        compiled: bool = False,
        recompute: bool = False,
        gradient: str = "unroll",
        truncated_passes: int = 1,
        adjoint_steps: int | None = None,
        adjoint_tolerance: float = 1e-3,
        convergence_weight: float = 0.0,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        super().__init__()
        self.model, self.gradient, self.autocast = model, gradient, autocast
        self.truncated_passes, self.adjoint_steps = truncated_passes, adjoint_steps
        self.adjoint_tolerance, self.convergence_weight = adjoint_tolerance, convergence_weight
        one_pass: Any = model.recur
        if compiled:
            one_pass = torch.compile(one_pass)
        if recompute:
            one_pass = partial(checkpoint, one_pass, use_reentrant=False)
        self.one_pass = one_pass
        self.stream: Callable[[Tensor], Tensor] | None = DifferentiableStream(model) if gradient == "bptt" else None
        self._adjoint_made = 0

    @classmethod
    def for_run(
        cls, model: ContextReady, train: TrainConfig, autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> "Objective":
        """Create the objective for these training settings."""
        return cls(
            model,
            compiled=train.compile,
            recompute=train.checkpoint_passes,
            gradient=train.gradient,
            truncated_passes=train.truncated_passes,
            adjoint_steps=train.adjoint_steps,
            adjoint_tolerance=train.adjoint_tolerance,
            convergence_weight=train.convergence_weight,
            autocast=autocast,
        )

    def forward(self, inputs_BT: Tensor, targets_BT: Tensor, passes: int | None, measure: bool = False) -> Loss:
        """Compute the loss with K = `passes`, or of the stream if it is None. `measure` also computes the residual."""
        with self.autocast():
            backbone = self.model.backbone
            e_BTC, residual = self.model.embed(inputs_BT), None
            if self.stream is not None:
                mean = mean_cross_entropy(backbone.head(self.stream(e_BTC)), targets_BT)
                return Loss(mean, mean, None)
            assert passes is not None
            last, earlier_BTC = self._passes(self.model, e_BTC, passes)
            if measure and earlier_BTC is not None:
                residual = largest_change(earlier_BTC[:1], last.z_BTC[:1])
            mean = mean_cross_entropy(backbone.head(last.z_BTC), targets_BT)
            total = mean if not self.convergence_weight else mean + self.convergence_weight * self._moved(e_BTC, last)
            return Loss(mean, total, residual)

    def _moved(self, e_BTC: Tensor, last: Pass) -> Tensor:
        """Return the mean squared change of the block inputs if there were one more pass."""
        correction_BTC = self.model.correction(shift_right(last.carried_BTC), e_BTC)
        if correction_BTC is None:
            return e_BTC.new_zeros(())
        moved_BTC: Tensor = e_BTC + correction_BTC - last.x_BTC.detach()
        return moved_BTC.to(torch.promote_types(moved_BTC.dtype, torch.float32)).square().mean()

    def _passes(self, model: ContextReady, e_BTC: Tensor, passes: int) -> tuple[Pass, Tensor | None]:
        """Return the last of K passes, differentiable as the gradient mode requires, and z one pass earlier."""
        through = passes_through(self.gradient, self.truncated_passes, passes)
        if through == passes:
            made = deque(islice(model.passes(e_BTC, recur=self.one_pass), passes), maxlen=2)
            return made[-1], made[-2].z_BTC if passes > 1 else None
        before = settle(model, e_BTC.detach(), passes - through, self.one_pass)
        implicit = self.gradient == "implicit"
        entered_BTC = before.carried_BTC.detach().requires_grad_(implicit and torch.is_grad_enabled())
        made = deque(continued(model, e_BTC, entered_BTC, through, self.one_pass), maxlen=2)
        last, earlier_BTC = made[-1], made[-2].z_BTC if len(made) > 1 else before.z_BTC
        if not implicit:
            return last, earlier_BTC
        # The adjoint cannot be more accurate than the point where it is taken, and without contraction it grows with
        # every product. So the number of products is limited to the number of passes.
        z_BTC = at_fixed_point(last, entered_BTC, self.adjoint_steps, passes, self.adjoint_tolerance, report=self._note)
        return last._replace(z_BTC=z_BTC), earlier_BTC

    def _note(self, adjoint: Adjoint) -> None:
        self._adjoint_made = adjoint.steps

    def backward(
        self,
        inputs_BT: Tensor,
        targets_BT: Tensor,
        passes: int | None,
        scale: float = 1.0,
        measure: bool = False,
        wrapped: nn.Module | None = None,
    ) -> Loss:
        """Accumulate `scale` times the gradient of the loss with K = `passes`, and return the loss without its graph.

        `wrapped` is the DDP or FSDP module around this objective, if there is one.
        """
        self._adjoint_made = 0
        loss: Loss = (wrapped or self)(inputs_BT, targets_BT, passes, measure)
        (loss.total * scale).backward()  # type: ignore[no-untyped-call]
        return Loss(loss.mean.detach(), loss.total.detach(), loss.residual, self._adjoint_made)


def mean_cross_entropy(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Return the cross-entropy in nats per token that counts, computed in at least float32.

    It is 0 if no token counts, as can happen in a batch of conversations with long questions.
    """
    wide = torch.promote_types(logits_BTV.dtype, torch.float32)
    total = F.cross_entropy(logits_BTV.flatten(0, 1).to(wide), targets_BT.flatten(), reduction="sum")
    return total / (targets_BT != IGNORED).sum().clamp(min=1)
