"""A correction with its weights, in torch."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from contextready.errors import ContextReadyError
from contextready.model.correction import NO_CORRECTION, Correction, check_correction, find_correction, gain_size
from contextready.model.transformer import FFN, Block, init_weights

if TYPE_CHECKING:
    from contextready.model.context_ready import Backbone


class CorrectionModule(nn.Module):
    """The norms and the network that a correction's formula uses, and the formula applied to them."""

    def __init__(
        self,
        definition: Correction,
        backbone: "Backbone",
        bias: bool = False,
        scale: float = 1.0,
        gain: str | None = None,
        dropout: float = 0.0,
        weights: str = "gpt2",
    ) -> None:
        super().__init__()
        self.definition, self.width, self.scale, self.weights = definition, backbone.width, scale, weights
        self.carries_residual = definition.carries_residual
        parts, C = definition.parts, backbone.width
        for name, size in parts.norms.items():
            self.add_module(name, nn.LayerNorm(size * C, bias=bias))
        self.ffn = FFN(C, bias, inputs=parts.network_inputs * C) if parts.has_network else None
        self.gain = None if gain is None else nn.Parameter(torch.full((gain_size(gain, C),), scale))
        self.dropout = nn.Dropout(dropout)
        if parts.uses_last_block and not hasattr(backbone, "last_block"):
            raise ContextReadyError(
                f"correction={definition.name} works only with a native transformer; use correction=add."
            )
        # A tuple hides the weights from this module, so that they are listed and saved once, as the block's.
        self._shared: tuple[Block, ...] = (backbone.last_block,) if parts.uses_last_block else ()  # type: ignore[attr-defined]

    def forward(self, carried_BTC: Tensor, e_BTC: Tensor) -> Tensor | None:
        """Compute correction_t from the vector carried over from position t-1 and e_t; None adds nothing."""
        correction_BTC: Tensor | None = self.definition(self, carried_BTC, e_BTC)
        return correction_BTC

    def carry(self, x_BTC: Tensor, z_BTC: Tensor) -> Tensor:
        """Return the vector that a position passes to the next one, given the blocks' input x and output z."""
        return z_BTC - x_BTC if self.carries_residual else z_BTC

    def fits(self, backbone: "Backbone") -> bool:
        """Whether this correction fits the backbone: the width is the same, and shared weights are this backbone's."""
        shared = not self._shared or getattr(backbone, "last_block", None) is self._shared[0]
        return self.width == backbone.width and shared

    def LN(self, x: Tensor, name: str = "norm") -> Tensor:
        """Apply a layer norm of the formula."""
        normed: Tensor = getattr(self, name)(x)
        return normed

    def corr_ffn(self, x: Tensor) -> Tensor:
        """Apply the correction's own network."""
        assert self.ffn is not None
        out: Tensor = self.dropout(self.ffn(x))
        if self.gain is not None:
            return out * self.gain
        return out if self.scale == 1.0 else out * self.scale

    def last_ffn(self, x: Tensor) -> Tensor:
        """Apply the last block's network."""
        out: Tensor = self.dropout(self.shared_block.ffn(x))
        return out

    def last_norm(self, x: Tensor) -> Tensor:
        """Apply the norm in front of the last block's network."""
        normed: Tensor = self.shared_block.ffn_norm(x)
        return normed

    @property
    def shared_block(self) -> Block:
        """The block whose weights the formula uses."""
        return self._shared[0]

    def concat(self, z: Tensor, e: Tensor) -> Tensor:
        """Concatenate both values."""
        return torch.cat((z, e), dim=-1)

    def initialise(self, init: str) -> None:
        """Initialize the weights; with `init="zero"` the output layer starts at zero."""
        init_weights(self, self.weights)
        if self.gain is not None:
            nn.init.constant_(self.gain, self.scale)
        if init == "zero" and self.ffn is not None:
            for p in self.ffn.down.parameters():
                nn.init.zeros_(p)

    @property
    def is_untrained(self) -> bool:
        """Whether the output layer is still zero, so that nothing has been learned yet."""
        return self.ffn is not None and not bool(self.ffn.down.weight.any())


def build_correction(
    name: str | None,
    backbone: "Backbone",
    init: str = "random",
    bias: bool = False,
    scale: float = 1.0,
    gain: str | None = None,
    *,
    dropout: float = 0.0,
    weights: str = "gpt2",
) -> CorrectionModule:
    """Create a correction for this backbone, on its device and in its dtype; the name None means no correction.

    With `init="zero"` the output layer starts at zero, so the model starts out equal to the backbone. `scale` is a
    factor on the network's output. With `gain` (scalar or channel) the factor is learned and starts at `scale`.
    `dropout` applies to the embeddings, once for all passes, and to the network's output. `weights` is the backbone's
    `init`.
    """
    check_correction(name, init, scale, gain)
    # A transformer ignores the settings of a correction.
    gain, dropout = (None, 0.0) if name is None else (gain, dropout)
    correction = CorrectionModule(find_correction(name), backbone, bias, scale, gain, dropout=dropout, weights=weights)
    correction.initialise(init)
    return correction.to(next(backbone.parameters()))


def no_correction(backbone: "Backbone") -> CorrectionModule:
    """Return the empty correction, with which a context-ready model is just its backbone."""
    return CorrectionModule(NO_CORRECTION, backbone)


def has_bias(module: Any) -> bool:
    """Whether any part of a module has a bias."""
    return any(name.endswith("bias") for name in module.state_dict())
