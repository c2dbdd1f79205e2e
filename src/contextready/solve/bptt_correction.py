"""The correction's forward and backward, one position at a time, with preallocated buffers.

The formula is evaluated once, when the tape is created, and records a list of steps. Each step has the functions that
`bptt_parts.py` describes. In the backward, the steps run in reverse, and each passes its output's gradient to its
inputs.
"""

# ruff: noqa: D102  (the text above describes these functions)

from typing import Protocol

import torch
from torch import Tensor, nn

from contextready.model.correction_module import CorrectionModule
from contextready.model.transformer import FFN, GatedFFN
from contextready.solve.bptt_parts import Gradients, PerToken, StepDropout, step_ffn, step_norm


class Value:
    """A value in a formula: a vector at every position, and its gradient at the current position of the backward."""

    def __init__(self, formula: "StepCorrection", width: int, vectors: PerToken | None = None) -> None:
        self.formula, self.width, self.vectors = formula, width, vectors
        self.now: Tensor | None = None
        """The value at the current position, if it is not kept for all positions."""
        self.flat: Tensor | None = None
        """The values at all positions, if they are recomputed for the gradients of the weights."""
        self.gradient_place: PerToken | None = None
        """Where the gradient may be written directly, if the value is used only once."""
        self.uses = 0
        self._gradient: Tensor | None = None

    def __add__(self, other: "Value") -> "Value":
        return self.formula.add(self, other)

    def at(self, t: int) -> Tensor:
        value = self.now if self.vectors is None else self.vectors.at[t]
        assert value is not None
        return value

    def all(self) -> Tensor:
        values = self.flat if self.vectors is None else self.vectors.flat
        assert values is not None
        return values

    def give(self, gradient: Tensor) -> None:
        self._gradient = gradient if self._gradient is None else self._gradient + gradient

    def take(self) -> Tensor | None:
        gradient, self._gradient = self._gradient, None
        return gradient


class Step(Protocol):
    """One operation in a formula."""

    def begin(self) -> None: ...
    def forward(self, t: int) -> None: ...
    def backward(self, t: int) -> None: ...
    def gather(self) -> Gradients: ...


class StepCorrection:
    """Implements the operations of a formula as steps, and the formula as the list of them."""

    def __init__(self, correction: CorrectionModule, e: PerToken) -> None:
        self.correction, self.like, self.steps = correction, e, list[Step]()
        C = correction.width
        self.z, self.e = Value(self, C), Value(self, C, e)
        self.out: Value | None = correction.definition(self, self.z, self.e)

    def LN(self, x: Value, name: str = "norm") -> Value:
        return self._add_step(_Norm(self, self.correction.get_submodule(name), x))

    def corr_ffn(self, x: Value) -> Value:
        assert self.correction.ffn is not None
        out = self._add_step(_Network(self, self.correction.ffn, x))
        unscaled = self.correction.gain is None and self.correction.scale == 1.0
        return out if unscaled else self._add_step(_Scale(self, out))

    def last_ffn(self, x: Value) -> Value:
        return self._add_step(_Network(self, self.correction.shared_block.ffn, x))

    def last_norm(self, x: Value) -> Value:
        return self._add_step(_Norm(self, self.correction.shared_block.ffn_norm, x))

    def concat(self, z: Value, e: Value) -> Value:
        return self._add_step(_Concat(self, z, e))

    def add(self, a: Value, b: Value) -> Value:
        return self._add_step(_Add(self, a, b))

    def _add_step(self, step: "_Norm | _Network | _Scale | _Concat | _Add") -> Value:
        self.steps.append(step)
        return step.y

    def begin(self) -> None:
        for step in self.steps:
            step.begin()

    def forward(self, t: int, carried_BC: Tensor) -> Tensor:
        self.z.now = carried_BC
        for step in self.steps:
            step.forward(t)
        return torch.zeros_like(carried_BC) if self.out is None else self.out.at(t)

    def backward(self, t: int, dcorrection_BC: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of the carried vector and of the embedding."""
        if self.out is not None:
            self.out.give(dcorrection_BC)
        for step in reversed(self.steps):
            step.backward(t)
        dcarried_BC, de_BC = self.z.take(), self.e.take()
        return torch.zeros_like(dcorrection_BC) if dcarried_BC is None else dcarried_BC, de_BC

    def carry(self, x_BC: Tensor, z_BC: Tensor) -> Tensor:
        return self.correction.carry(x_BC, z_BC)

    def carry_backward(self, dcarried_BC: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return the gradients of x and z."""
        return -dcarried_BC if self.correction.carries_residual else None, dcarried_BC

    def gather(self) -> Gradients:
        for step in self.steps:
            yield from step.gather()


class _Add:
    def __init__(self, formula: StepCorrection, a: Value, b: Value) -> None:
        self.a, self.b = _used(a), _used(b)
        self.y = Value(formula, a.width, formula.like.like(a.width))

    def begin(self) -> None:
        pass

    def forward(self, t: int) -> None:
        torch.add(self.a.at(t), self.b.at(t), out=self.y.at(t))

    def backward(self, t: int) -> None:
        dy = self.y.take()
        assert dy is not None
        self.a.give(dy)
        self.b.give(dy)

    def gather(self) -> Gradients:
        yield from ()


class _Concat(_Add):
    def __init__(self, formula: StepCorrection, a: Value, b: Value) -> None:
        self.a, self.b = _used(a), _used(b)
        width = a.width + b.width
        self.y = Value(formula, width, formula.like.like(width))

    def forward(self, t: int) -> None:
        torch.cat((self.a.at(t), self.b.at(t)), dim=-1, out=self.y.at(t))

    def backward(self, t: int) -> None:
        dy = self.y.take()
        assert dy is not None
        da, db = torch.split(dy, [self.a.width, self.b.width], dim=-1)
        self.a.give(da)
        self.b.give(db)


class _Norm:
    def __init__(self, formula: StepCorrection, norm: nn.Module, x: Value) -> None:
        self.x, self.y = _used(x), Value(formula, x.width)
        self.norm = step_norm(norm, formula.like.like(x.width) if x.vectors is None else x.vectors)
        self.y.gradient_place = self.norm.dy

    def begin(self) -> None:
        self.norm.begin()

    def forward(self, t: int) -> None:
        if self.x.vectors is None:
            self.norm.x.at[t].copy_(self.x.at(t))
        self.y.now = self.norm.forward(t)

    def backward(self, t: int) -> None:
        dy = self.y.take()
        if dy is not None:
            self.norm.dy.at[t].copy_(dy)
        self.x.give(self.norm.backward(t))

    def gather(self) -> Gradients:
        self.y.flat, gradients = self.norm.gather()
        yield from gradients


class _Network:
    def __init__(self, formula: StepCorrection, ffn: FFN | GatedFFN, x: Value) -> None:
        self.x, self.ffn = _used(x), step_ffn(ffn, formula.like)
        self.drop = StepDropout(formula.correction.dropout)
        self.y = Value(formula, ffn.down.out_features, self.ffn.down.y)
        self.dx = formula.like.all.new_empty(formula.like.all.shape[1], x.width)

    def begin(self) -> None:
        self.ffn.begin()

    def forward(self, t: int) -> None:
        y_BC = self.ffn.forward(t, self.x.at(t))
        if self.drop.p > 0.0:
            # The backward does not need the output as it was before.
            y_BC.copy_(self.drop.forward(y_BC))

    def backward(self, t: int) -> None:
        dy = self.y.take()
        assert dy is not None
        self.ffn.dy.at[t].copy_(self.drop.backward(dy))
        if self.x.gradient_place is not None and self.x.uses == 1:
            self.ffn.backward(t, out=self.x.gradient_place.at[t])
        else:
            self.ffn.backward(t, out=self.dx)
            self.x.give(self.dx)

    def gather(self) -> Gradients:
        yield from self.ffn.gather(self.x.all())
        self.x.flat = None


class _Scale:
    """The factor on the output of the network: fixed or learned."""

    def __init__(self, formula: StepCorrection, x: Value) -> None:
        self.x, self.correction = _used(x), formula.correction
        self.y = Value(formula, x.width, formula.like.like(x.width))
        self.dy = None if self.correction.gain is None else formula.like.like(x.width)

    def begin(self) -> None:
        gain = self.correction.gain
        self.factor: Tensor | float = self.correction.scale if gain is None else gain.detach()

    def forward(self, t: int) -> None:
        torch.mul(self.x.at(t), self.factor, out=self.y.at(t))

    def backward(self, t: int) -> None:
        dy = self.y.take()
        assert dy is not None
        if self.dy is not None:
            self.dy.at[t].copy_(dy)
        self.x.give(dy * self.factor)

    def gather(self) -> Gradients:
        if self.dy is not None:
            gain = self.correction.gain
            assert gain is not None
            products = self.dy.flat * self.x.all()
            yield gain, products.sum().view(1) if len(gain) == 1 else products.sum(0)


def _used(x: Value) -> Value:
    x.uses += 1
    return x
