"""Fast backpropagation through the stream: the exact gradient of reading tokens from left to right.

With plain autograd, every token would copy the growing cache and update the gradient of every weight. Here all
intermediate results live in preallocated buffers, each token's backward computes the gradients of activations only, and
the gradient of a weight is a single product over all tokens at the end.

The price is a second implementation of the recurrence, forward and backward. `ContextReady.recur` is the definition. A
change there must be repeated here, and `tests/solve/test_bptt.py` compares the two for every correction. The formula of
the correction is not repeated: it is evaluated on `StepCorrection`.
"""

from typing import Any

import torch
from torch import Tensor, nn

from contextready.model.attention import Attend
from contextready.model.context_ready import ContextReady
from contextready.model.correction_module import CorrectionModule
from contextready.model.transformer import Block, Transformer
from contextready.solve.bptt_attention import StepAttention
from contextready.solve.bptt_correction import StepCorrection
from contextready.solve.bptt_parts import Gradients, Inner, PerToken, StepDropout, StepResidual, step_ffn


class DifferentiableStream:
    """Computes the outputs z of a model's stream over whole sequences, with gradients."""

    def __init__(self, model: ContextReady) -> None:
        self.model = model
        self._free: _Tape | None = None

    def __call__(self, e_BTC: Tensor) -> Tensor:
        """Return z (B, T, C) of embeddings that are read one at a time."""
        model = self.model
        if type(model.backbone) is not Transformer or type(model.correction) is not CorrectionModule:
            # Other backbones and corrections have no hand-written backward, so autograd differentiates their steps.
            return model.read(e_BTC, model.init_state(len(e_BTC)))[0]
        z_BTC: Tensor = _Read.apply(e_BTC, self, *model.parameters())  # type: ignore[no-untyped-call]
        return z_BTC

    def take_tape(self, e_BTC: Tensor) -> "_Tape":
        """Return a free tape, which reuses the buffers of an earlier step if they fit."""
        tape, self._free = self._free, None
        if tape is None or tape.made_for != _made_for(self.model, e_BTC):
            tape = _Tape(self.model, e_BTC)
        return tape

    def give_back(self, tape: "_Tape") -> None:
        """Keep the buffers for the next step."""
        self._free = tape


class _Read(torch.autograd.Function):
    """The stream as one node of the autograd graph, from embeddings and weights to z."""

    @staticmethod
    def forward(ctx: Any, e_BTC: Tensor, stream: DifferentiableStream, *parameters: nn.Parameter) -> Tensor:
        ctx.stream, ctx.parameters, ctx.tape = stream, parameters, stream.take_tape(e_BTC)
        ctx.versions = [p._version for p in parameters]
        z_BTC: Tensor = ctx.tape.forward(e_BTC)
        return z_BTC

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g_BTC: Tensor) -> tuple[Tensor | None, ...]:
        tape, ctx.tape = ctx.tape, None
        if tape is None:
            raise RuntimeError("The stream's backward can be called only once; run the forward again.")
        if ctx.versions != [p._version for p in ctx.parameters]:
            raise RuntimeError("A weight was changed in place between the stream's forward and its backward.")
        de_BTC = tape.backward(g_BTC)
        gradients: dict[Tensor, Tensor] = {}
        for parameter, gradient in tape.gather():
            # The tied correction shares the weights of a block, so they get two gradients.
            gradients[parameter] = gradients[parameter] + gradient if parameter in gradients else gradient
        ctx.stream.give_back(tape)
        return de_BTC, None, *(gradients.get(p) for p in ctx.parameters)


def _made_for(model: ContextReady, e_BTC: Tensor) -> tuple[Any, ...]:
    parts = [(id(part), part.training, part.p if isinstance(part, nn.Dropout) else 0.0) for part in model.modules()]
    return e_BTC.shape, e_BTC.dtype, e_BTC.device, parts


class _Tape:
    """All steps of one stream, and everything that their backward needs."""

    def __init__(self, model: ContextReady, e_BTC: Tensor) -> None:
        backbone = model.backbone
        assert isinstance(backbone, Transformer)
        T, C = e_BTC.shape[1:]
        self.made_for = _made_for(model, e_BTC)
        self.e, self.x = PerToken(e_BTC, C), PerToken(e_BTC, C)
        self.correction = StepCorrection(model.correction, self.e)
        self.drop = StepDropout(backbone.input_dropout)
        self.entered = self.x.like(C) if self.drop.p > 0.0 else self.x
        attend = Attend(backbone.config, e_BTC)
        self.layers: list[StepResidual] = []
        for block in backbone.layers:
            assert isinstance(block, Block)
            attention = StepAttention(block.attn, self.e, attend, min(backbone.config.window or T, T))
            self._add(block.attn_norm, attention, block.dropout)
            self._add(block.ffn_norm, step_ffn(block.ffn, self.e), block.dropout)
        if backbone.extra_ffn is not None and backbone.extra_norm is not None:
            self._add(backbone.extra_norm, step_ffn(backbone.extra_ffn, self.e), backbone.dropout)

    def _add(self, norm: nn.Module, inner: Inner, dropout: nn.Dropout) -> None:
        h = self.layers[-1].y if self.layers else self.entered
        self.layers.append(StepResidual(h, norm, inner, dropout))

    def begin(self) -> None:
        """Read the current weights."""
        self.correction.begin()
        for layer in self.layers:
            layer.begin()

    def forward(self, e_BTC: Tensor) -> Tensor:
        self.begin()
        self.e.all.copy_(e_BTC.transpose(0, 1))
        z, carried_BC = self.layers[-1].y, torch.zeros_like(self.e.at[0])
        for t, x_BC in enumerate(self.x.at):
            torch.add(self.e.at[t], self.correction.forward(t, carried_BC), out=x_BC)
            if self.entered is not self.x:
                self.entered.at[t].copy_(self.drop.forward(x_BC))
            for layer in self.layers:
                layer.forward(t)
            carried_BC = self.correction.carry(x_BC, z.at[t])
        # Always a copy, because the buffers are reused.
        return z.all.transpose(0, 1).clone(memory_format=torch.contiguous_format)

    def backward(self, g_BTC: Tensor) -> Tensor:
        dz_TBC = g_BTC.transpose(0, 1).contiguous()
        dcarried_BC, embeddings = torch.zeros_like(dz_TBC[0]), []
        for t in reversed(range(len(dz_TBC))):
            dx_carried_BC, dz_BC = self.correction.carry_backward(dcarried_BC)
            dh_BC = dz_TBC[t] + dz_BC
            for layer in reversed(self.layers):
                dh_BC = layer.backward(t, dh_BC)
            dx_BC = self.drop.backward(dh_BC)
            if dx_carried_BC is not None:
                dx_BC = dx_BC + dx_carried_BC
            dcarried_BC, de_BC = self.correction.backward(t, dx_BC)
            embeddings.append(dx_BC if de_BC is None else dx_BC + de_BC)
        return torch.stack(embeddings[::-1], dim=1)

    def gather(self) -> Gradients:
        """Yield the gradient of every weight, each as one product over all tokens."""
        yield from self.correction.gather()
        for layer in self.layers:
            yield from layer.gather()
