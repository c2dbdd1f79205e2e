"""The parts of a transformer, forward and backward, one position at a time, with preallocated buffers.

All parts have the same functions: `begin` reads the current weights, `forward` is called for t = 0 … T-1, `backward`
for t = T-1 … 0, and `gather` yields the gradients of the weights. Attention is in `bptt_attention.py`.
"""

# ruff: noqa: D102  (the text above describes these functions)

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from contextready.model.transformer import FFN, GatedFFN

aten = torch.ops.aten
Gradients = Iterator[tuple[Tensor, Tensor]]
"""Pairs of a weight and its gradient."""


class PerToken:
    """One vector per token: all of them (T, B, width), and a view of each position, created once."""

    def __init__(self, like_BT: Tensor, width: int) -> None:
        B, T = like_BT.shape[:2]
        self.all = like_BT.new_empty(T, B, width)
        self.at = self.all.unbind(0)

    def like(self, width: int) -> "PerToken":
        """Create a PerToken of another width for the same tokens."""
        return PerToken(self.all.transpose(0, 1), width)

    @property
    def flat(self) -> Tensor:
        """All vectors (T · B, width)."""
        return self.all.flatten(0, 1)


class StepLinear:
    """A linear layer. The next part writes its gradient to dy; `gather` needs all inputs again."""

    def __init__(self, linear: nn.Linear, like: PerToken, order: Tensor | None = None) -> None:
        self.linear, self.order = linear, order
        self.y, self.dy = like.like(linear.out_features), like.like(linear.out_features)

    def begin(self) -> None:
        weight, bias, order = self.linear.weight, self.linear.bias, self.order
        self.weight: Tensor = weight if order is None else weight[order]
        self.bias: Tensor | None = bias if order is None or bias is None else bias[order]
        self.transposed = self.weight.t()

    def forward(self, t: int, x_BC: Tensor) -> Tensor:
        if self.bias is None:
            return torch.mm(x_BC, self.transposed, out=self.y.at[t])
        return torch.addmm(self.bias, x_BC, self.transposed, out=self.y.at[t])

    def backward(self, t: int, out: Tensor | None = None) -> Tensor:
        return torch.mm(self.dy.at[t], self.weight, out=out)

    def gather(self, x: Tensor) -> Gradients:
        yield self.linear.weight, self._unordered(self.dy.flat.t() @ x)
        if self.linear.bias is not None:
            yield self.linear.bias, self._unordered(self.dy.flat.sum(0))

    def _unordered(self, tensor: Tensor) -> Tensor:
        return tensor if self.order is None else torch.empty_like(tensor).index_copy_(0, self.order, tensor)


class StepNorm:
    """A layer norm. The next part writes its gradient to dy."""

    def __init__(self, norm: nn.LayerNorm, x: PerToken) -> None:
        self.norm, self.x, self.dy = norm, x, x.like(x.all.shape[2])

    def begin(self) -> None:
        n = self.norm
        self.weight, self.bias = n.weight, n.bias
        self.moments: list[tuple[Tensor, Tensor]] = []

    def forward(self, t: int) -> Tensor:
        y_BC, *moments = self._forward(self.x.at[t])
        self.moments.append((moments[0], moments[1]))
        return y_BC

    def backward(self, t: int) -> Tensor:
        """Return the gradient of the input, given dy."""
        return self._backward(self.dy.at[t], self.x.at[t], *self.moments[t], [True, False, False])[0]

    def gather(self) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Return the outputs of all tokens, recomputed to save memory, and the gradients of the weights."""
        y, mean, rstd = self._forward(self.x.flat)
        wanted = [False, True, self.bias is not None]
        _, *gradients = self._backward(self.dy.flat, self.x.flat, mean, rstd, wanted)
        return y, [(p, g) for p, g in zip((self.weight, self.bias), gradients, strict=True) if p is not None]

    def _forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.native_layer_norm(x, self.norm.normalized_shape, self.weight, self.bias, self.norm.eps)

    def _backward(self, dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, wanted: list[bool]) -> tuple[Tensor, ...]:
        out: tuple[Tensor, ...] = aten.native_layer_norm_backward(
            dy, x, self.norm.normalized_shape, mean, rstd, self.weight, self.bias, wanted
        )
        return out


class StepRMSNorm:
    """An RMS norm. The next part writes its gradient to dy."""

    def __init__(self, norm: nn.RMSNorm, x: PerToken) -> None:
        self.norm, self.x, self.dy = norm, x, x.like(x.all.shape[2])

    def begin(self) -> None:
        self.weight = self.norm.weight
        self.scales: list[Tensor] = []

    def forward(self, t: int) -> Tensor:
        x_BC = self.x.at[t]
        self.scales.append(rms_scale(x_BC, self.norm.eps))
        return x_BC * self.scales[t] * self.weight

    def backward(self, t: int) -> Tensor:
        """Return the gradient of the input, given dy."""
        return rms_backward(self.dy.at[t] * self.weight, self.x.at[t], self.scales[t])

    def gather(self) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Return the outputs of all tokens, recomputed to save memory, and the gradient of the weight."""
        normed = self.x.flat * rms_scale(self.x.flat, self.norm.eps)
        return normed * self.weight, [(self.weight, (self.dy.flat * normed).sum(0))]


def rms_scale(x: Tensor, eps: float | None) -> Tensor:
    """Return the factor with which an RMS norm multiplies each vector before its weight."""
    assert eps is not None
    return (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def rms_backward(dnormed: Tensor, x: Tensor, scale: Tensor) -> Tensor:
    """Return the gradient of the vectors that an RMS norm multiplied by `scale`."""
    along = (dnormed * x).mean(-1, keepdim=True)
    return scale * (dnormed - x * (along * scale.square()))


def step_norm(norm: nn.Module, x: PerToken) -> StepNorm | StepRMSNorm:
    """Create the steps of a norm of either kind."""
    if isinstance(norm, nn.RMSNorm):
        return StepRMSNorm(norm, x)
    assert isinstance(norm, nn.LayerNorm)
    return StepNorm(norm, x)


class StepDropout:
    """Dropout with one mask per position."""

    def __init__(self, dropout: nn.Dropout) -> None:
        self.p = dropout.p if dropout.training else 0.0
        self.masks: list[Tensor] = []

    def forward(self, x_BC: Tensor) -> Tensor:
        if self.p == 0.0:
            return x_BC
        y_BC, mask_BC = torch.native_dropout(x_BC, self.p, True)
        self.masks.append(mask_BC)
        return y_BC

    def backward(self, dy_BC: Tensor) -> Tensor:
        if self.p == 0.0:
            return dy_BC
        dx_BC: Tensor = aten.native_dropout_backward(dy_BC, self.masks.pop(), 1.0 / (1.0 - self.p))
        return dx_BC


class StepFFN:
    """Linear, GELU, linear."""

    def __init__(self, ffn: FFN, like: PerToken) -> None:
        self.up, self.down = StepLinear(ffn.up, like), StepLinear(ffn.down, like)
        self.active, self.dy = like.like(ffn.up.out_features), self.down.dy

    def begin(self) -> None:
        self.up.begin()
        self.down.begin()

    def forward(self, t: int, x_BC: Tensor) -> Tensor:
        aten.gelu.out(self.up.forward(t, x_BC), out=self.active.at[t])
        return self.down.forward(t, self.active.at[t])

    def backward(self, t: int, out: Tensor) -> None:
        hidden = self.up.y
        if t == len(hidden.at) - 1:
            # Computes the derivatives for all tokens at once and overwrites their arguments.
            one = hidden.all.new_ones(()).expand_as(hidden.all)
            aten.gelu_backward.grad_input(one, hidden.all, grad_input=hidden.all)
        self.down.backward(t, out=self.up.dy.at[t]).mul_(hidden.at[t])
        self.up.backward(t, out=out)

    def gather(self, x: Tensor) -> Gradients:
        yield from self.up.gather(x)
        yield from self.down.gather(self.active.flat)


class StepGatedFFN:
    """SiLU of one linear layer times another, then linear."""

    def __init__(self, ffn: GatedFFN, like: PerToken) -> None:
        self.gate, self.up, self.down = (StepLinear(part, like) for part in (ffn.gate, ffn.up, ffn.down))
        self.active, self.dy = like.like(ffn.up.out_features), self.down.dy

    def begin(self) -> None:
        for part in (self.gate, self.up, self.down):
            part.begin()

    def forward(self, t: int, x_BC: Tensor) -> Tensor:
        gate, up = self.gate.forward(t, x_BC), self.up.forward(t, x_BC)
        torch.mul(aten.silu(gate), up, out=self.active.at[t])
        return self.down.forward(t, self.active.at[t])

    def backward(self, t: int, out: Tensor) -> None:
        gate, up = self.gate.y.at[t], self.up.y.at[t]
        dactive = self.down.backward(t)
        torch.mul(dactive, aten.silu(gate), out=self.up.dy.at[t])
        aten.silu_backward.grad_input(dactive * up, gate, grad_input=self.gate.dy.at[t])
        self.up.backward(t, out=out)
        out += self.gate.backward(t)

    def gather(self, x: Tensor) -> Gradients:
        yield from self.gate.gather(x)
        yield from self.up.gather(x)
        yield from self.down.gather(self.active.flat)


def step_ffn(ffn: nn.Module, like: PerToken) -> StepFFN | StepGatedFFN:
    """Create the steps of a feed-forward network of either kind."""
    if isinstance(ffn, GatedFFN):
        return StepGatedFFN(ffn, like)
    assert isinstance(ffn, FFN)
    return StepFFN(ffn, like)


class Inner(Protocol):
    """What a residual branch computes from the normalised residual stream."""

    dy: PerToken

    def begin(self) -> None: ...
    def forward(self, t: int, x_BC: Tensor) -> Tensor: ...
    def backward(self, t: int, out: Tensor) -> None: ...
    def gather(self, x: Tensor) -> Gradients: ...


class StepResidual:
    """A residual branch: h + dropout(inner(LN(h)))."""

    def __init__(self, h: PerToken, norm: nn.Module, inner: Inner, dropout: nn.Dropout) -> None:
        self.h, self.norm, self.inner, self.drop = h, step_norm(norm, h), inner, StepDropout(dropout)
        self.y = h.like(h.all.shape[2])

    def begin(self) -> None:
        self.norm.begin()
        self.inner.begin()

    def forward(self, t: int) -> None:
        branch_BC = self.drop.forward(self.inner.forward(t, self.norm.forward(t)))
        torch.add(self.h.at[t], branch_BC, out=self.y.at[t])

    def backward(self, t: int, dy_BC: Tensor) -> Tensor:
        self.inner.dy.at[t].copy_(self.drop.backward(dy_BC))
        self.inner.backward(t, out=self.norm.dy.at[t])
        return self.norm.backward(t).add_(dy_BC)

    def gather(self) -> Gradients:
        x, gradients = self.norm.gather()
        yield from gradients
        yield from self.inner.gather(x)
