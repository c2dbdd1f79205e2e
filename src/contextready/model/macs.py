"""Multiply-accumulates of the parts of a transformer, computed from its configuration."""

from contextready.model.config import TransformerConfig
from contextready.model.correction import find_correction


def block_macs(config: TransformerConfig) -> int:
    """Matrix products of all blocks for one token, including the extra FFN and excluding attention scores."""
    c = config
    attention = 2 * (c.heads + c.shared_heads) * c.head_size * c.width
    return c.layers * attention + (c.layers + c.extra_ffn) * ffn_macs(c)


def ffn_macs(config: TransformerConfig) -> int:
    """Matrix products of one feed-forward network of the blocks for one token."""
    return (3 if config.ffn == "swiglu" else 2) * config.hidden_width * config.width


def attention_macs(config: TransformerConfig, context: int) -> int:
    """Attention scores and weighted sums of a token that attends to `context` positions, including itself."""
    seen = context if config.window is None else min(context, config.window)
    return seen * _pair_macs(config)


def attention_macs_of(config: TransformerConfig, first: int, end: int) -> int:
    """The sum of `attention_macs` over the tokens at positions `first` to `end` - 1."""
    return _up_to(config, end) - _up_to(config, first)


def _up_to(config: TransformerConfig, tokens: int) -> int:
    window = config.window or tokens
    short = min(tokens, window)
    pairs = short * (short + 1) // 2 + (tokens - short) * window
    return pairs * _pair_macs(config)


def _pair_macs(config: TransformerConfig) -> int:
    """Multiply-accumulates of one query and one key and value, in all layers."""
    return 2 * config.heads * config.head_size * config.layers


def correction_macs(name: str | None, width: int, last_ffn: int | None = None) -> int:
    """Matrix products of a correction for one token; some use the last block's network, which costs `last_ffn`."""
    return find_correction(name).parts.macs(width, last_ffn)
