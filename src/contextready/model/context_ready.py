"""The context-ready model: any backbone plus one correction. This file contains the method.

    correction_t = corr_ffn(LN(z_{t-1} + e_t)),   x_t = e_t + correction_t,   z_t = Block(x_t; x_<t),   z_{-1} = 0

Read left to right, the model is a recurrent network, exact in one pass per token (`stream`). For training it is
unrolled over all positions at once (`passes`). Both call `recur`, which defines the recurrence. Two other places repeat
it and are tested against it: the hand-written gradient (`solve/bptt.py`) and the exported graph
(`infer/ggml/graph.py`). Without a correction the model is a plain transformer.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from contextready.errors import ContextReadyError
from contextready.model.checks import check_carried, check_passes
from contextready.model.config import ModelConfig
from contextready.model.correction import NO_CORRECTION
from contextready.model.correction_module import CorrectionModule, build_correction, no_correction
from contextready.model.cost import check_model_memory
from contextready.model.state import State
from contextready.model.transformer import Transformer


class Backbone(Protocol):
    """A decoder-only language model as three functions, with its own kind of cache."""

    @property
    def width(self) -> int:
        """C, the width of the residual stream."""

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """Map tokens to context-free embeddings e (B, T, C)."""

    def blocks(self, x_BTC: Tensor, past: Any = None) -> tuple[Tensor, Any]:
        """Map block inputs to block outputs z (B, T, C), before the final norm; also return the cache after them."""

    def head(self, z_BTC: Tensor) -> Tensor:
        """Map block outputs to logits (B, T, V)."""

    def init_cache(self, batch_size: int, history: int = 1) -> Any:
        """Create an empty cache."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the weights."""


class Pass(NamedTuple):
    """The results of one pass through the blocks."""

    correction_BTC: Tensor | None
    """The correction that was added to the embeddings; none in the first pass of an unroll."""
    x_BTC: Tensor
    """Block inputs."""
    z_BTC: Tensor
    """Block outputs."""
    carried_BTC: Tensor
    """The vector that each position passes to the next one's correction: z, except for block_head."""
    cache: Any
    """The cache after this pass, if one was given."""


class ContextReady(nn.Module):
    """A backbone whose input embeddings are corrected by the previous position's output."""

    def __init__(self, backbone: Backbone, correction: CorrectionModule | None = None) -> None:
        """Combine a backbone with a correction; without one, the model is the plain transformer."""
        super().__init__()
        correction = no_correction(backbone) if correction is None else correction
        if not correction.fits(backbone):
            raise ContextReadyError(
                "This correction belongs to another backbone; create one for this backbone with build_correction."
            )
        self.backbone = backbone
        self.correction = correction

    @property
    def is_recurrent(self) -> bool:
        """Whether there is a correction; without one, a single parallel pass is already exact."""
        return self.correction.definition is not NO_CORRECTION

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """Return the embeddings e (B, T, C), which stay the same in all passes, even if dropout applies to them."""
        e_BTC: Tensor = self.correction.dropout(self.backbone.embed(tokens_BT))
        return e_BTC

    def recur(self, e_BTC: Tensor, carried_BTC: Tensor | None, past: Any = None) -> Pass:
        """The recurrence: run the blocks on e_t + correction(z_{t-1}, e_t), for one position or for all at once.

        `carried_BTC[:, t]` is the vector carried over from position t - 1; none means no correction.
        """
        return self.enter(e_BTC, None if carried_BTC is None else self.correction(carried_BTC, e_BTC), past)

    def enter(self, e_BTC: Tensor, correction_BTC: Tensor | None, past: Any = None) -> Pass:
        """Run the blocks on embeddings plus a given correction, or on the embeddings alone."""
        x_BTC = e_BTC if correction_BTC is None else e_BTC + correction_BTC
        z_BTC, cache = self.backbone.blocks(x_BTC, past)
        return Pass(correction_BTC, x_BTC, z_BTC, self.correction.carry(x_BTC, z_BTC), cache)

    def passes(
        self,
        e_BTC: Tensor,
        past: Any = None,
        before_B1C: Tensor | None = None,
        cumulative: bool = False,
        recur: Callable[..., Pass] | None = None,
    ) -> Iterator[Pass]:
        """Yield passes 1, 2, 3, … of the parallel unroll over a sequence, or over the next chunk after `past`.

        `before_B1C` is the vector carried over from the position before the chunk. Every pass replaces the correction
        of the pass before; with `cumulative` it adds to it instead, an ablation whose fixed point differs from
        streaming. `recur` replaces the model's own, for example with a compiled or checkpointed version of it.
        """
        recur = recur or self.recur
        result = recur(e_BTC, None, past)
        while True:
            yield result
            base_BTC = result.x_BTC if cumulative else e_BTC
            result = recur(base_BTC, shift_right(result.carried_BTC, before_B1C), past)

    def forward(self, tokens_BT: Tensor, passes: int | None = None, cumulative: bool = False) -> Tensor:
        """Return the logits (B, T, V) after K = `passes` parallel passes; K = 1 is the backbone alone."""
        if passes is None:
            if self.is_recurrent:
                raise ContextReadyError(
                    "passes (the K of the unroll) is required, for example model(tokens, passes=5)."
                )
            passes = 1
        check_passes(passes)
        unroll = self.passes(self.embed(tokens_BT), cumulative=cumulative)
        return self.backbone.head(next(islice(unroll, passes - 1, None)).z_BTC)

    def stream(self, tokens_BT: Tensor, state: State) -> tuple[Tensor, State]:
        """Read the next T ≥ 1 tokens after `state` one at a time; return their exact logits and the new state."""
        e_BTC = self.embed(tokens_BT)
        self.check_state(state, e_BTC)
        z_BTC, state = self.read(e_BTC, state)
        return self.backbone.head(z_BTC), state

    def read(self, e_BTC: Tensor, state: State) -> tuple[Tensor, State]:
        """Read the next embeddings after `state` one at a time; return the block outputs z and the new state."""
        # Without a correction, tokens do not depend on the z before them, so all are read at once.
        step = 1 if self.is_recurrent else e_BTC.shape[1]
        outputs = []
        for e_BSC in torch.split(e_BTC, step, dim=1):
            result = self.recur(e_BSC, state.z_prev_B1C, state.cache)
            state = state.advanced(result.carried_BTC, result.cache)
            outputs.append(result.z_BTC)
        return torch.cat(outputs, dim=1), state

    def init_state(self, batch_size: int, history: int = 1) -> State:
        """Create the state before the first token. `history` is how many tokens can always be rolled back."""
        cache = self.backbone.init_cache(batch_size, history)
        nothing_B1C = next(self.backbone.parameters()).new_zeros(batch_size, 1, self.backbone.width)
        return State(cache, nothing_B1C, history)

    def check_state(self, state: State, e_BTC: Tensor) -> None:
        """Raise an error if these embeddings cannot follow the state (the backbone checks its own cache)."""
        if not isinstance(state, State):
            raise ContextReadyError("This is not a state of a context-ready model; create one with init_state.")
        check_carried(state.carried_BRC, e_BTC)


def shift_right(z_BTC: Tensor, before_B1C: Tensor | None = None) -> Tensor:
    """Shift z one position to the right, so that position t gets z_{t-1}; the first gets `before_B1C` or zero."""
    first_B1C = torch.zeros_like(z_BTC[:, :1]) if before_B1C is None else before_B1C
    return torch.cat((first_B1C, z_BTC[:, :-1]), dim=1)


def build_model(config: ModelConfig) -> ContextReady:
    """Create a newly initialized model on torch's default device and in its default dtype."""
    check_model_memory(config)
    backbone = Transformer(config)
    c = config
    correction = build_correction(
        c.correction,
        backbone,
        c.correction_init,
        c.bias,
        c.correction_scale,
        c.correction_gain,
        dropout=c.correction_dropout,
        weights=c.init,
    )
    return ContextReady(backbone, correction)
