"""The cost of a model: multiply-accumulates, parameters and cache size, computed without allocating weights.

The paper counts multiply-accumulates and calls them FLOPs; this module counts them too and calls them `macs`.
"""

from dataclasses import dataclass

import torch

from contextready.model.config import ModelConfig
from contextready.model.context_ready import build_model
from contextready.model.macs import attention_macs, attention_macs_of, block_macs, correction_macs


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
        return 2 * self.config.width * self.config.layers * dtype.itemsize

    def state_bytes(self, context: int, dtype: torch.dtype = torch.float32, history: int = 1) -> int:
        """Bytes of state per row after `context` tokens: keys, values and the carried z."""
        c = self.config
        held = context if c.window is None else min(context, c.window - 1 + history)
        carried = 0 if c.correction is None else min(context, history) + 1
        return held * self.kv_bytes_per_token(dtype) + carried * c.width * dtype.itemsize


def account(config: ModelConfig) -> Account:
    """Compute a model's cost from its configuration, on the meta device."""
    with torch.device("meta"):
        model = build_model(config)
    return Account(
        config=config,
        macs_blocks=block_macs(config),
        macs_correction=correction_macs(config.correction, config.width),
        macs_head=config.vocab_size * config.width,
        parameters=sum(p.numel() for p in model.parameters()),
        embedding_parameters=config.vocab_size * config.width,
        correction_parameters=sum(p.numel() for p in model.correction.parameters()),
    )
