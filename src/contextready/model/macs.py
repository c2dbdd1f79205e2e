"""Multiply-accumulates of the parts of a transformer, computed from its configuration."""

from contextready.model.config import TransformerConfig
from contextready.model.correction import find_correction


def block_macs(config: TransformerConfig) -> int:
    """Matrix products of all blocks for one token, including the extra FFN and excluding attention scores."""
    return (12 * config.layers + (8 if config.extra_ffn else 0)) * config.width**2


def attention_macs(config: TransformerConfig, context: int) -> int:
    """Attention scores and weighted sums of a token that attends to `context` positions, including itself."""
    seen = context if config.window is None else min(context, config.window)
    return 2 * seen * config.width * config.layers


def attention_macs_of(config: TransformerConfig, first: int, end: int) -> int:
    """The sum of `attention_macs` over the tokens at positions `first` to `end` - 1."""
    return _up_to(config, end) - _up_to(config, first)


def _up_to(config: TransformerConfig, tokens: int) -> int:
    window = config.window or tokens
    short = min(tokens, window)
    pairs = short * (short + 1) // 2 + (tokens - short) * window
    return 2 * pairs * config.width * config.layers


def correction_macs(name: str | None, width: int) -> int:
    """Matrix products of a correction for one token."""
    return find_correction(name).parts.macs_per_width_squared * width**2
