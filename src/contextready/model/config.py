"""The configuration of a model, checked when it is created.

The limits are far above any real model. They keep a wrong or hostile file from reaching tensors, lists and loops.
"""

from dataclasses import dataclass

from contextready.errors import ContextReadyError, nearest
from contextready.formats.limits import check_count, shown
from contextready.model.correction import check_correction

MOST = {"vocab_size": 2**31 - 1, "width": 2**20, "layers": 10**6, "heads": 2**20, "window": 2**31 - 1}
"""The largest value of each size."""
LARGEST_BASE = 1e18
"""The largest base of the rotary frequencies, whose powers fit into any floating-point format."""
DEFAULT_BASE = 10_000.0
CHOICES = {"init": ("gpt2", "torch"), "rope": ("geometric", "integer"), "dropout_at": ("input", "embedding")}
"""The values of each setting that is a word."""


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
    """Dropout probability at the end of every residual branch and at the place that dropout_at names."""
    bias: bool = False
    """Use biases in the linear layers and layer norms. The head has its own setting."""
    rope_base: float = DEFAULT_BASE
    """Base of the rotary frequencies."""
    rope: str = "geometric"
    """Rotary angles per position: geometric (powers of rope_base) or integer (0, 1, 2, …; pairs of neighbours)."""
    head_bias: bool = False
    """Use a bias in the head."""
    attention_dropout: float = 0.0
    """Dropout probability of the attention weights."""
    dropout_at: str = "input"
    """input (of the blocks, new in every pass) or embedding (once per step, with a correction, and at its output)."""
    init: str = "gpt2"
    """Initial weights: gpt2 (normal, 0.02) or torch (PyTorch's defaults: embeddings normal, linear layers uniform)."""

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
        for name in ("dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ContextReadyError(f"{name} must be at least 0 and less than 1, but got {getattr(self, name)}.")
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                value = getattr(self, name)
                raise ContextReadyError(f"{name}={shown(value)} is unknown; {nearest(str(value), known)}")
        if not 1.0 < self.rope_base <= LARGEST_BASE:
            raise ContextReadyError(
                f"rope_base must be greater than 1 (usually 10000) and at most {LARGEST_BASE:g}, but got "
                f"{self.rope_base:g}."
            )
        if self.rope == "integer" and self.rope_base != DEFAULT_BASE:
            raise ContextReadyError(
                f"rope_base={self.rope_base:g} does not apply to rope=integer; leave rope_base out."
            )

    @property
    def input_dropout(self) -> float:
        """The dropout probability at the input of the blocks."""
        return self.dropout if self.dropout_at == "input" else 0.0

    @property
    def correction_dropout(self) -> float:
        """The dropout probability of the embeddings and of the correction, in a model with a correction."""
        return self.dropout if self.dropout_at == "embedding" else 0.0

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
