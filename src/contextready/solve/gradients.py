"""Gradients that do not store all K passes: through the last few passes, or through the fixed point itself.

Let w = F(w) be the fixed point of the vectors that positions carry to the next ones, and z = H(w). The exact gradient
of a loss of z needs one differentiable pass and the adjoint μ = H'ᵀ g + F'ᵀ μ, where g = dloss/dz. F' is strictly
causal, so the iteration ends after T steps whatever the contraction. If the passes contract, it converges as fast as
they do.
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
    """The outcome of the adjoint iteration."""

    steps: int
    """m, the number of vector-Jacobian products."""
    residual: float | None
    """How much the last product changed μ, relative to its norm; none if m was given."""


def passes_through(gradient: str, truncated_passes: int, passes: int) -> int:
    """Return how many of the K passes are stored in the graph for this kind of gradient."""
    return {"unroll": passes, "truncated": min(truncated_passes, passes), "implicit": 1}[gradient]


def settle(model: ContextReady, e_BTC: Tensor, passes: int, recur: Callable[..., Pass] | None = None) -> Pass:
    """Run K ≥ 1 passes without gradients, all with the same dropout masks, and return the last one."""
    # With new masks in every pass there would be no fixed point.
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
    """Yield `passes` more passes with gradients, after one that left `carried_BTC`, all with the same dropout masks."""
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
    """Return z of one differentiable pass that started from `entered_BTC` (a leaf), with the fixed point's gradient.

    In the backward, the adjoint takes `steps` = m products; 0 gives the one-step, "Jacobian-free" gradient. If `steps`
    is none, it stops when its change is within `tolerance`, after `most` products, or after T, when it is exact. Then
    the pass is differentiated once. `report` receives the outcome.
    """
    outputs = [result.z_BTC, result.carried_BTC]
    limit = min(most, entered_BTC.shape[1]) if steps is None else steps

    def adjoint(g_BTC: Tensor) -> Tensor:
        mu_BTC, made, residual = torch.zeros_like(entered_BTC), 0, None
        while made < limit:
            # The gradient of the pass's input only; the gradients of weights are not touched.
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
    """Returns z unchanged. Its backward maps g = dloss/dz to the gradients of the pass's outputs: g and μ."""

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
    """Yield a function that resets the random generator to its present state, so that dropout masks repeat."""
    if not drops_out(model):
        yield lambda: None
        return
    module = torch if device.type == "cpu" else torch.get_device_module(device)
    moment = module.get_rng_state()
    yield lambda: module.set_rng_state(moment)
