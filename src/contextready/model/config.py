"""The configuration of a model, checked when it is created.

The limits are far above any real model. They keep a wrong or hostile file from reaching tensors, lists and loops.
"""

from dataclasses import dataclass

from contextready.errors import ContextReadyError
from contextready.formats.limits import check_count, shown
from contextready.model.correction import check_correction

MOST = {"vocab_size": 2**31 - 1, "width": 2**20, "layers": 10**6, "heads": 2**20, "window": 2**31 - 1}
"""The largest value of each size."""
LARGEST_BASE = 1e18
"""The largest base of the rotary frequencies, whose powers fit into any floating-point format."""


@dataclass(frozen=True)
class TransformerConfig:
    """A decoder-only transformer with rotary positions: the paper's "roformer"."""

    vocab_size: int
    """V, the size of the vocabulary."""
    width: int
    """C, the width of the residual stream."""
    layers: int
    """Number of blocks: the paper's N for a transformer and D for a context-ready model."""
    heads: int
    """Number of attention heads; the head size, width / heads, must be even."""
    window: int | None = None
    """Number of positions that a token attends to, including itself; none means all."""
    extra_ffn: bool = False
    """Add a feed-forward layer after the last block, as in the paper's FLOP-matched Roformer-hFFN."""
    dropout: float = 0.0
    """Dropout probability at the input of the blocks and at the end of every residual branch."""
    bias: bool = False
    """Use biases in the linear layers and layer norms (never in the head)."""
    rope_base: float = 10_000.0
    """Base of the rotary frequencies."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "width", "layers", "heads"):
            check_count(name, getattr(self, name), 1, MOST[name])
        if self.width % self.heads:
            raise ContextReadyError(
                f"width={self.width} is not divisible by heads={self.heads}; choose heads among the divisors of width."
            )
        if self.head_size % 2:
            raise ContextReadyError(
                f"width={self.width} with heads={self.heads} gives an odd head size of {self.head_size}; "
                "rotary positions need an even one, so choose another number of heads."
            )
        if self.window is not None and self.window < 1:
            raise ContextReadyError(
                f"window must be at least 1 (it includes the token itself) or none, but got {shown(self.window)}."
            )
        if self.window is not None:
            check_count("window", self.window, 1, MOST["window"])
        if not 0.0 <= self.dropout < 1.0:
            raise ContextReadyError(f"dropout must be at least 0 and less than 1, but got {self.dropout}.")
        if not 1.0 < self.rope_base <= LARGEST_BASE:
            raise ContextReadyError(
                f"rope_base must be greater than 1 (usually 10000) and at most {LARGEST_BASE:g}, but got "
                f"{self.rope_base:g}."
            )

    @property
    def head_size(self) -> int:
        """The number of channels per attention head."""
        return self.width // self.heads


@dataclass(frozen=True)
class ModelConfig(TransformerConfig):
    """The configuration of a transformer or, if `correction` is set, of a context-ready model."""

    correction: str | None = None
    """The name of the correction, or none for a plain transformer."""
    correction_init: str = "random"
    """random or zero. With zero, the correction's output layer starts at zero, so the model starts as a transformer."""
    correction_scale: float = 1.0
    """Factor on the output of the correction's network. 1 is the paper; 0.02 is the size of new embeddings."""
    correction_gain: str | None = None
    """Learn the factor, starting at correction_scale: scalar (one number) or channel (one per channel)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # These are checked even without a correction, so that a misspelled value is reported.
        name = "add" if self.correction is None else self.correction
        check_correction(name, self.correction_init, self.correction_scale, self.correction_gain)
