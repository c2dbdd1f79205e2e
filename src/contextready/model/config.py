"""The configuration of a model, checked when it is made."""

from dataclasses import dataclass

from contextready.errors import ContextReadyError
from contextready.model.correction import check_correction


@dataclass(frozen=True)
class TransformerConfig:
    """A decoder-only transformer with rotary positions: the paper's "roformer"."""

    vocab_size: int
    """V, the number of tokens."""
    width: int
    """C, the size of the residual stream."""
    layers: int
    """N of a transformer, D of a context-ready model."""
    heads: int
    """Attention heads; the head size, width / heads, must be even."""
    window: int | None = None
    """How many positions a token attends to, itself included; none: all of them."""
    extra_ffn: bool = False
    """One more feed-forward layer after the last block: the paper's FLOP-matched Roformer-hFFN."""
    dropout: float = 0.0
    """Dropped fraction at the input of the blocks and at the end of every residual branch."""
    bias: bool = False
    """Biases in the linear layers and layer norms (never in the head)."""
    rope_base: float = 10_000.0
    """Base of the rotary frequencies."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "width", "layers", "heads"):
            if getattr(self, name) < 1:
                raise ContextReadyError(f"{name}={getattr(self, name)} is too small; it must be at least 1.")
        if self.width % self.heads:
            raise ContextReadyError(
                f"width={self.width} is not divisible by heads={self.heads}; choose heads among the divisors of width."
            )
        if self.head_size % 2:
            raise ContextReadyError(
                f"width={self.width} with heads={self.heads} gives head size {self.head_size}, which is odd; "
                "rotary positions turn pairs, so choose heads for which width / heads is even."
            )
        if self.window is not None and self.window < 1:
            raise ContextReadyError(
                f"window={self.window} is too small; it counts the token itself, so give at least 1, or none."
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ContextReadyError(f"dropout={self.dropout} is not a fraction; give a number from 0 to below 1.")
        if not self.rope_base > 1.0:
            raise ContextReadyError(f"rope_base={self.rope_base} is too small; it must be above 1 (usual: 10000).")

    @property
    def head_size(self) -> int:
        """Channels of one attention head."""
        return self.width // self.heads


@dataclass(frozen=True)
class ModelConfig(TransformerConfig):
    """A transformer, or with `correction` set, a context-ready model around it."""

    correction: str | None = None
    """Which correction; none: a plain transformer."""
    correction_init: str = "random"
    """random, or zero: the correction's output layer starts at zero, so the model starts as its transformer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # Without a correction the initialisation is still checked, so that a misspelt one is told.
        check_correction("add" if self.correction is None else self.correction, self.correction_init)
