"""The configuration of a model, checked when it is created.

The limits are far above any real model. They keep a wrong or hostile file from reaching tensors, lists and loops.
"""

from dataclasses import dataclass

from contextready.errors import ContextReadyError, nearest
from contextready.formats.limits import check_count, shown
from contextready.model.correction import check_correction

MOST = {
    "vocab_size": 2**31 - 1,
    "width": 2**20,
    "layers": 10**6,
    "heads": 2**20,
    "window": 2**31 - 1,
    "ffn_width": 2**22,
    "kv_heads": 2**20,
    "head_width": 2**20,
    "no_rope_every": 10**6,
    "rope_length": 2**31 - 1,
}
"""The largest value of each size."""
LARGEST_BASE = 1e18
"""The largest base of the rotary frequencies, whose powers fit into any floating-point format."""
DEFAULT_BASE = 10_000.0
LEAST_FACTOR, LARGEST_FACTOR = 1e-6, 1e6
"""The limits of factors of rotary positions, with which every frequency is finite."""
CHOICES = {
    "init": ("gpt2", "torch"),
    "rope": ("geometric", "integer", "linear", "llama3"),
    "dropout_at": ("input", "embedding"),
    "norm": ("layer", "rms"),
    "ffn": ("gelu", "swiglu"),
}
"""The values of each setting that is a word."""
OF_ROPE = {"rope_factor": ("linear", "llama3"), **dict.fromkeys(("rope_low", "rope_high", "rope_length"), ("llama3",))}
"""The kinds of rope to which each of these settings applies."""
MEANINGS = (
    *("heads", "kv_heads", "head_width", "window", "norm", "norm_eps", "rope_base", "rope"),
    *("rope_factor", "rope_low", "rope_high", "rope_length", "no_rope_every"),
)
"""Settings that change what weights mean without changing their shapes."""


@dataclass(frozen=True)
class TransformerConfig:
    """A decoder-only transformer with rotary positions: by default the paper's "roformer".

    The settings from `norm` on describe other families of models: Llama, Mistral, Qwen and SmolLM.
    """

    vocab_size: int
    """V, the size of the vocabulary."""
    width: int
    """C, the width of the residual stream."""
    layers: int
    """Number of blocks: the paper's N for a transformer and D for a context-ready model."""
    heads: int
    """Number of attention heads; the head size must be even."""
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
    """Rotary angles: geometric (powers of rope_base), integer (0, 1, 2, …), or scaled ones: linear or llama3."""
    head_bias: bool = False
    """Use a bias in the head."""
    attention_dropout: float = 0.0
    """Dropout probability of the attention weights."""
    dropout_at: str = "input"
    """input (of the blocks, new in every pass) or embedding (once per step, with a correction, and at its output)."""
    init: str = "gpt2"
    """Initial weights: gpt2 (normal, 0.02) or torch (PyTorch's defaults: embeddings normal, linear layers uniform)."""
    norm: str = "layer"
    """Norms: layer, or rms (without mean and bias) as in Llama. Those of a correction are always layer norms."""
    norm_eps: float = 1e-5
    """Epsilon of the norms."""
    ffn: str = "gelu"
    """Feed-forward networks: gelu, or swiglu (gated) as in Llama. That of a correction is always gelu."""
    ffn_width: int | None = None
    """Hidden width of the feed-forward networks; none means 4 × width."""
    kv_heads: int | None = None
    """Heads of keys and values, each shared by a group of attention heads; none means one for each."""
    head_width: int | None = None
    """Channels per attention head; none means width / heads."""
    qk_norm: bool = False
    """Normalize the queries and keys of every head with RMS norms, as in Qwen3."""
    qkv_bias: bool = False
    """Use biases for queries, keys and values, as in Qwen2."""
    tied_embeddings: bool = False
    """Use the embedding's weight in the head."""
    rope_factor: float = 1.0
    """Factor by which rope=linear stretches positions, and by which rope=llama3 stretches slow rotations."""
    rope_low: float = 1.0
    """With rope=llama3, rotations with fewer turns than this in rope_length tokens are stretched in full."""
    rope_high: float = 4.0
    """With rope=llama3, rotations with more turns than this in rope_length tokens stay as they are."""
    rope_length: int = 8192
    """With rope=llama3, the number of tokens in which turns are counted."""
    no_rope_every: int | None = None
    """Every layer of this number has no rotary positions, as in SmolLM3 (4: layers 4, 8, …); none: all have them."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "width", "layers", "heads"):
            check_count(name, getattr(self, name), 1, MOST[name])
        for name in ("ffn_width", "kv_heads", "head_width", "no_rope_every"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), 1, MOST[name])
        self._check_heads()
        if self.window is not None and self.window < 1:
            raise ContextReadyError(
                f"window must be at least 1 (it includes the token itself) or none, but got {shown(self.window)}."
            )
        if self.window is not None:
            check_count("window", self.window, 1, MOST["window"])
        for name in ("dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ContextReadyError(f"{name} must be at least 0 and less than 1, but got {getattr(self, name)}.")
        if not 0.0 < self.norm_eps < 1.0:
            raise ContextReadyError(f"norm_eps must be greater than 0 and less than 1, but got {self.norm_eps:g}.")
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                value = getattr(self, name)
                raise ContextReadyError(f"{name}={shown(value)} is unknown; {nearest(str(value), known)}")
        self._check_rope()

    def _check_heads(self) -> None:
        if self.head_width is None and self.width % self.heads:
            raise ContextReadyError(
                f"width={self.width} is not divisible by heads={self.heads}; choose heads among the divisors of width."
            )
        if self.head_size % 2:
            given = f"width={self.width} with heads={self.heads}" if self.head_width is None else "head_width"
            raise ContextReadyError(
                f"{given} gives an odd head size of {self.head_size}; "
                "rotary positions need an even one, so choose another number of heads."
            )
        if self.heads % self.shared_heads:
            raise ContextReadyError(
                f"heads={self.heads} is not divisible by kv_heads={self.kv_heads}; choose kv_heads among the divisors "
                "of heads."
            )

    def _check_rope(self) -> None:
        if not 1.0 < self.rope_base <= LARGEST_BASE:
            raise ContextReadyError(
                f"rope_base must be greater than 1 (usually 10000) and at most {LARGEST_BASE:g}, but got "
                f"{self.rope_base:g}."
            )
        if self.rope == "integer" and self.rope_base != DEFAULT_BASE:
            raise ContextReadyError(
                f"rope_base={self.rope_base:g} does not apply to rope=integer; leave rope_base out."
            )
        for name, kinds in OF_ROPE.items():
            value = getattr(self, name)
            if self.rope not in kinds and value != getattr(TransformerConfig, name):
                raise ContextReadyError(f"{name}={value:g} does not apply to rope={self.rope}; leave {name} out.")
        if not LEAST_FACTOR <= self.rope_factor <= LARGEST_FACTOR:
            raise ContextReadyError(
                f"rope_factor must be between {LEAST_FACTOR:g} and {LARGEST_FACTOR:g}, but got {self.rope_factor:g}."
            )
        if not LEAST_FACTOR <= self.rope_low < self.rope_high <= LARGEST_FACTOR:
            raise ContextReadyError(
                f"rope_low must be at least {LEAST_FACTOR:g} and less than rope_high, but got {self.rope_low:g} and "
                f"{self.rope_high:g}."
            )
        check_count("rope_length", self.rope_length, 1, MOST["rope_length"])

    def has_rope(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has rotary positions."""
        return self.no_rope_every is None or (layer + 1) % self.no_rope_every != 0

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
        return self.width // self.heads if self.head_width is None else self.head_width

    @property
    def shared_heads(self) -> int:
        """The number of heads of keys and values."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def hidden_width(self) -> int:
        """The hidden width of the feed-forward networks."""
        return 4 * self.width if self.ffn_width is None else self.ffn_width


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
