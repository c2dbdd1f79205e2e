"""Gradients that do not keep K passes: through the last few, or through the fixed point itself.

At the fixed point w = F(w) of what positions carry to the next ones, with z = H(w), the exact gradient of a loss of z
needs one differentiable pass and the adjoint μ = H'ᵀ g + F'ᵀ μ, g = dloss/dz. F' is strictly causal, so the iteration
ends after T steps whatever the contraction, and converges as fast as the passes do where they contract.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from contextready.model.context_ready import ContextReady, Pass, shift_right
from contextready.solve.unroll import drops_out


class Adjoint(NamedTuple):
    """How the adjoint iteration went."""

    steps: int
    """Vector-Jacobian products made, m."""
    residual: float | None
    """How much the last of them changed μ, relative to its norm; none where m was given."""


def passes_through(gradient: str, truncated_passes: int, passes: int) -> int:
    """How many of K passes the graph of a gradient holds."""
    return {"unroll": passes, "truncated": min(truncated_passes, passes), "implicit": 1}[gradient]


def settle(model: ContextReady, e_BTC: Tensor, passes: int, recur: Callable[..., Pass] | None = None) -> Pass:
    """The last of K ≥ 1 passes, without a gradient, every pass with the same dropout masks."""
    # Masks redrawn at every pass would leave no fixed point to settle on.
    with torch.no_grad(), tied_dropout(model, e_BTC.device) as rewind:

        def again(*args: Any) -> Pass:
            rewind()
            return (recur or model.recur)(*args)

        last: deque[Pass] = deque(islice(model.passes(e_BTC, recur=again), passes), maxlen=1)
        rewind()
        return last[0]


def continued(
    model: ContextReady, e_BTC: Tensor, carried_BTC: Tensor, passes: int, recur: Callable[..., Pass] | None = None
) -> Iterator[Pass]:
    """`passes` more passes with a gradient, after one that left `carried_BTC`, with the masks of this moment."""
    with tied_dropout(model, e_BTC.device) as rewind:
        for _ in range(passes):
            rewind()
            result = (recur or model.recur)(e_BTC, shift_right(carried_BTC), None)
            carried_BTC = result.carried_BTC
            yield result


def at_fixed_point(
    result: Pass,
    entered_BTC: Tensor,
    steps: int | None,
    most: int,
    tolerance: float,
    *,
    report: Callable[[Adjoint], None],
) -> Tensor:
    """z of one differentiable pass that entered with `entered_BTC` (a leaf), with the gradient of the fixed point.

    In the backward the adjoint takes `steps` = m products (0: the one-step, "Jacobian-free" gradient), otherwise as
    many as bring its change to `tolerance`, at most `most` (and T: then it is exact); then the pass is gone through
    once. `report` is told.
    """
    outputs = [result.z_BTC, result.carried_BTC]
    limit = min(most, entered_BTC.shape[1]) if steps is None else steps

    def adjoint(g_BTC: Tensor) -> Tensor:
        mu_BTC, made, residual = torch.zeros_like(entered_BTC), 0, None
        while made < limit:
            # Only as far as what the pass entered with: no weight's gradient is touched.
            (new_BTC,) = torch.autograd.grad(
                outputs, entered_BTC, [g_BTC, mu_BTC], retain_graph=True, materialize_grads=True
            )
            before_BTC, mu_BTC, made = mu_BTC, new_BTC, made + 1
            if steps is None:
                change, size = float((mu_BTC - before_BTC).norm()), float(mu_BTC.norm())
                residual = change / size if size > 0.0 else 0.0
                if residual <= tolerance:
                    break
        report(Adjoint(made, residual))
        return mu_BTC

    z_BTC: Tensor = _FixedPoint.apply(*outputs, adjoint)  # type: ignore[no-untyped-call]
    return z_BTC


class _FixedPoint(torch.autograd.Function):
    """z as it is; its backward turns dloss/dz into the gradients of the pass's two outputs, g and the adjoint μ."""

    @staticmethod
    def forward(ctx: Any, z_BTC: Tensor, carried_BTC: Tensor, adjoint: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.adjoint = adjoint
        return z_BTC.view_as(z_BTC)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g_BTC: Tensor) -> tuple[Tensor | None, ...]:
        return g_BTC, ctx.adjoint(g_BTC), None


@contextmanager
def tied_dropout(model: nn.Module, device: torch.device) -> Iterator[Callable[[], None]]:
    """Give a function that puts the generator back to this moment, so that masks drawn after it repeat."""
    if not drops_out(model):
        yield lambda: None
        return
    module = torch if device.type == "cpu" else torch.get_device_module(device)
    moment = module.get_rng_state()
    yield lambda: module.set_rng_state(moment)
