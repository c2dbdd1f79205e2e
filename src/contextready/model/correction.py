"""The correction: what the previous position tells the next token before it enters the blocks.

Each variant is one small class; `CORRECTIONS` is the registry.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from contextready.errors import ContextReadyError
from contextready.model.transformer import FFN, init_weights
from contextready.settings import nearest

if TYPE_CHECKING:
    from contextready.model.context_ready import Backbone


class Correction(nn.Module):
    """What every variant is: a function of the vector carried from t-1 and the embedding at t."""

    macs_per_width_squared: int
    """Multiply-accumulates per token, in units of C²."""
    has_output_layer = True
    """Whether there is an output layer of its own, which can start at zero."""

    def __init__(self, backbone: "Backbone", bias: bool = False) -> None:
        super().__init__()
        self.width = backbone.width

    def fits(self, backbone: "Backbone") -> bool:
        """Whether this correction was made for such a backbone."""
        return self.width == backbone.width

    def carry(self, x_BTC: Tensor, z_BTC: Tensor) -> Tensor:
        """What a position leaves for the next one, given the block's input x and output z."""
        return z_BTC

    def forward(self, carried_BTC: Tensor, e_BTC: Tensor) -> Tensor:
        """correction_t from what t-1 carried over and e_t."""
        raise NotImplementedError


class Add(Correction):
    """corr_ffn(LN(z_{t-1} + e_t)): the paper's main form."""

    macs_per_width_squared = 8

    def __init__(self, backbone: "Backbone", bias: bool = False) -> None:
        super().__init__(backbone)
        self.norm = nn.LayerNorm(backbone.width, bias=bias)
        self.ffn = FFN(backbone.width, bias)

    def forward(self, carried_BTC: Tensor, e_BTC: Tensor) -> Tensor:
        """correction_t from z_{t-1} and e_t."""
        out: Tensor = self.ffn(self.norm(carried_BTC + e_BTC))
        return out


class Blind(Add):
    """corr_ffn(LN(z_{t-1})): the token itself is not seen."""

    def forward(self, carried_BTC: Tensor, e_BTC: Tensor) -> Tensor:
        """correction_t from z_{t-1} alone."""
        out: Tensor = self.ffn(self.norm(carried_BTC))
        return out


class Concat(Correction):
    """corr_ffn(LN([z_{t-1}; e_t])): both, side by side."""

    macs_per_width_squared = 12

    def __init__(self, backbone: "Backbone", bias: bool = False) -> None:
        super().__init__(backbone)
        self.norm = nn.LayerNorm(2 * backbone.width, bias=bias)
        self.ffn = FFN(backbone.width, bias, inputs=2 * backbone.width)

    def forward(self, carried_BTC: Tensor, e_BTC: Tensor) -> Tensor:
        """correction_t from [z_{t-1}; e_t]."""
        out: Tensor = self.ffn(self.norm(torch.cat((carried_BTC, e_BTC), dim=-1)))
        return out


class Memoryless(Add):
    """corr_ffn(LN(e_t)): an equally large network that sees no past, the control of a conversion."""

    def forward(self, carried_BTC: Tensor, e_BTC: Tensor) -> Tensor:
        """correction_t from e_t alone."""
        out: Tensor = self.ffn(self.norm(e_BTC))
        return out


class BlockHead(Correction):
    """z_{t-1} - x_{t-1}: no network, only what the blocks added to their input (ablation)."""

    macs_per_width_squared = 0
    has_output_layer = False

    def carry(self, x_BTC: Tensor, z_BTC: Tensor) -> Tensor:
        """The blocks' own residual."""
        return z_BTC - x_BTC

    def forward(self, carried_BTC: Tensor, e_BTC: Tensor) -> Tensor:
        """correction_t is what t-1 carried over."""
        return carried_BTC


class Tied(Correction):
    """FFN_D(LN(z_{t-1} + e_t)) with the weights of the last block's own FFN (ablation)."""

    macs_per_width_squared = 8
    has_output_layer = False

    def __init__(self, backbone: "Backbone", bias: bool = False) -> None:
        super().__init__(backbone)
        if not hasattr(backbone, "last_ffn"):
            raise ContextReadyError("correction=tied needs this package's own transformer; use correction=add.")
        self.norm = nn.LayerNorm(backbone.width, bias=bias)
        # In a tuple, so that the weights are listed and saved once, as the block's.
        self._shared = (backbone.last_ffn,)

    def fits(self, backbone: "Backbone") -> bool:
        """Only the very backbone whose weights it shares."""
        return getattr(backbone, "last_ffn", None) is self._shared[0]

    def forward(self, carried_BTC: Tensor, e_BTC: Tensor) -> Tensor:
        """correction_t from z_{t-1} and e_t."""
        out: Tensor = self._shared[0](self.norm(carried_BTC + e_BTC))
        return out


class Nothing(Correction):
    """No correction at all: lets a plain transformer run wherever a context-ready model does, not a variant."""

    macs_per_width_squared = 0
    has_output_layer = False

    def forward(self, carried_BTC: Tensor, e_BTC: Tensor) -> Tensor:
        """Nothing is added."""
        return torch.zeros_like(e_BTC)


CORRECTIONS: dict[str, type[Correction]] = {
    "add": Add,
    "concat": Concat,
    "blind": Blind,
    "memoryless": Memoryless,
    "block_head": BlockHead,
    "tied": Tied,
}


INITS = ("random", "zero")


def check_correction(kind: str, init: str) -> None:
    """Refuse an unknown correction, an unknown initialisation, or a pair that makes no sense."""
    if kind not in CORRECTIONS:
        raise ContextReadyError(f"Unknown correction '{kind}'; {nearest(kind, list(CORRECTIONS))}")
    if init not in INITS:
        raise ContextReadyError(f"Unknown correction_init '{init}'; {nearest(init, INITS)}")
    if init == "zero" and not CORRECTIONS[kind].has_output_layer:
        raise ContextReadyError(
            f"correction={kind} has no output layer of its own to start at zero; use correction_init=random."
        )


def build_correction(kind: str, backbone: "Backbone", init: str = "random", bias: bool = False) -> Correction:
    """Make a correction for this backbone, on its device and in its dtype.

    With `init="zero"` the output layer starts at zero, so the model starts as the backbone alone.
    """
    check_correction(kind, init)
    correction = CORRECTIONS[kind](backbone, bias)
    initialise(correction, init)
    return correction.to(next(backbone.parameters()))


def initialise(correction: Correction, init: str) -> None:
    """Give a correction the weights it starts with."""
    init_weights(correction)
    if init == "zero":
        assert isinstance(correction.ffn, FFN)
        nn.init.zeros_(correction.ffn.down.weight)
