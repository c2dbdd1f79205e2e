"""The cost of a model: multiply-accumulates, parameters and cache size, computed from its configuration.

The paper counts multiply-accumulates and calls them FLOPs; this module counts them too and calls them `macs`.
No modules are built, so that the cost of any model, even one with a million layers, is known at once.
"""

from dataclasses import dataclass

import torch

from contextready.formats.limits import check_memory
from contextready.model.config import ModelConfig, TransformerConfig
from contextready.model.correction import find_correction, gain_size
from contextready.model.macs import attention_macs, attention_macs_of, block_macs, correction_macs, ffn_macs


@dataclass(frozen=True)
class Account:
    """The cost of one model. Multiply-accumulates are per token unless stated otherwise."""

    config: ModelConfig
    macs_blocks: int
    """Matrix products of the blocks, including the extra FFN and excluding attention scores."""
    macs_correction: int
    macs_head: int
    parameters: int
    embedding_parameters: int
    correction_parameters: int

    @property
    def macs(self) -> int:
        """FLOPs per token in the paper's convention: blocks, correction and head, without attention scores."""
        return self.macs_blocks + self.macs_correction + self.macs_head

    @property
    def width_squared_coefficient(self) -> float:
        """Blocks and correction in units of C²: the paper's 144C², 152C², 44C², …"""
        return (self.macs_blocks + self.macs_correction) / self.config.width**2

    def macs_attention(self, context: int) -> int:
        """Attention scores and weighted sums of a token that attends to `context` positions, including itself."""
        return attention_macs(self.config, context)

    def macs_exact(self, context: int) -> int:
        """The cost of one streaming step at this context length, including attention."""
        return self.macs + self.macs_attention(context)

    def macs_sequence(self, tokens: int, passes: int = 1) -> int:
        """The cost of the forward pass over a sequence of T tokens in K passes, including attention.

        It consists of K passes of the blocks, K - 1 corrections and one head. Attention counts only causal pairs.
        """
        attention = attention_macs_of(self.config, 0, tokens)
        once = tokens * self.macs_head
        return once + passes * (tokens * self.macs_blocks + attention) + (passes - 1) * tokens * self.macs_correction

    def kv_bytes_per_token(self, dtype: torch.dtype = torch.float32) -> int:
        """Bytes of keys and values that a token adds to the cache (with a window, until the window is full)."""
        c = self.config
        return 2 * c.shared_heads * c.head_size * c.layers * dtype.itemsize

    def state_bytes(self, context: int, dtype: torch.dtype = torch.float32, history: int = 1) -> int:
        """Bytes of state per row after `context` tokens: keys, values and the carried z."""
        c = self.config
        held = context if c.window is None else min(context, c.window - 1 + history)
        carried = 0 if c.correction is None else min(context, history) + 1
        return held * self.kv_bytes_per_token(dtype) + carried * c.width * dtype.itemsize


def account(config: ModelConfig) -> Account:
    """Compute a model's cost from its configuration."""
    c, own = config, correction_parameters(config)
    embedding = c.vocab_size * c.width
    return Account(
        config=c,
        macs_blocks=block_macs(c),
        macs_correction=correction_macs(c.correction, c.width, ffn_macs(c)),
        macs_head=embedding,
        parameters=embedding + block_parameters(c) + head_parameters(c) + own,
        embedding_parameters=embedding,
        correction_parameters=own,
    )


def block_parameters(config: TransformerConfig) -> int:
    """Number of weights of all blocks, including the extra FFN with its norm."""
    c, attended = config, config.heads * config.head_size
    qkv = _linear(c.width, attended + 2 * c.shared_heads * c.head_size, c.bias or c.qkv_bias)
    qk_norms = 2 * c.head_size if c.qk_norm else 0
    attention = _block_norm(c) + qkv + qk_norms + _linear(attended, c.width, c.bias)
    ffn = _block_norm(c) + _ffn(c.width, c.width, c.bias, c.hidden_width)
    if c.ffn == "swiglu":
        ffn += _linear(c.width, c.hidden_width, c.bias)
    return c.layers * (attention + ffn) + (ffn if c.extra_ffn else 0)


def head_parameters(config: TransformerConfig) -> int:
    """Number of weights of the final norm and of the head, without those that it shares with the embedding."""
    c = config
    shared = c.vocab_size * c.width if c.tied_embeddings else 0
    return _block_norm(c) + _linear(c.width, c.vocab_size, c.head_bias) - shared


def correction_parameters(config: ModelConfig) -> int:
    """Number of weights of the correction alone; those that it shares with the last block are the block's."""
    parts, C, bias = find_correction(config.correction).parts, config.width, config.bias
    norms = sum(_norm(size * C, bias) for size in parts.norms.values())
    gain = gain_size(config.correction_gain, C)
    return norms + (_ffn(parts.network_inputs * C, C, bias) + gain if parts.has_network else 0)


def check_model_memory(config: ModelConfig) -> None:
    """Refuse a model whose weights alone are larger than the machine's memory, before any of them is allocated.

    Only weights in main memory count: not those on the meta device or a GPU, nor fake tensors.
    """
    probe = torch.empty(0)
    if probe.device.type == "cpu" and type(probe) is torch.Tensor:
        number = account(config).parameters
        what = f"A model with {number:,} parameters (width={config.width}, layers={config.layers})"
        check_memory(number * probe.dtype.itemsize, what, "choose a smaller width, vocab_size or number of layers.")


def _linear(inputs: int, outputs: int, bias: bool) -> int:
    return (inputs + bias) * outputs


def _norm(width: int, bias: bool) -> int:
    return (1 + bias) * width


def _block_norm(config: TransformerConfig) -> int:
    return _norm(config.width, config.bias and config.norm == "layer")


def _ffn(inputs: int, width: int, bias: bool, hidden: int | None = None) -> int:
    hidden = hidden or 4 * width
    return _linear(inputs, hidden, bias) + _linear(hidden, width, bias)
