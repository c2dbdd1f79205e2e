"""Attention for the tokens of one call: rotary positions, masks, and the keys and values of earlier tokens.

`Attend` is the plain case of whole sequences. Caches (`cache.py`) and buffers (`buffer.py`) have their own subclasses.
Shapes in names: B batch, T tokens of this call, S keys attended to, H heads (of keys and values there may be fewer),
E head size.
"""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from contextready.model.config import TransformerConfig
from contextready.model.rope import PAIR_DIMS, angles

SHORT = 1 << 13
"""Tokens times head size up to which attention in float32 is faster than in bf16 when a CPU trains."""
KV = tuple[Tensor, Tensor]
"""Keys and values of one layer, each (B, heads, S, head size); the keys are already rotated."""


class Past(Protocol):
    """The keys and values of earlier tokens, which decide how the next tokens attend."""

    def attend(self, config: TransformerConfig, x_BTC: Tensor) -> "Attend":
        """Return the attention for these block inputs."""


class Attend:
    """Attention for the tokens of one call, shared by all layers. In this class they start at position 0."""

    def __init__(self, config: TransformerConfig, x_BTC: Tensor) -> None:
        T = x_BTC.shape[1]
        self.set_positions(config, torch.arange(T, device=x_BTC.device), x_BTC.dtype)
        self.causal = config.window is None or config.window >= T
        self.mask: Tensor | None = None if self.causal else causal_mask(T, 0, config.window, x_BTC.device)

    def set_positions(self, config: TransformerConfig, positions: Tensor, dtype: torch.dtype) -> None:
        """Set the positions of the tokens: (T,), or (B, T) if each row has its own."""
        self.cos, self.sin = rotary_angles(config, positions, dtype)
        self.pair_dim = PAIR_DIMS[config.rope]

    def rotate(self, x_BTHE: Tensor) -> Tensor:
        """Apply the rotary embedding to queries and keys."""
        return rotate(x_BTHE, self.cos, self.sin, self.pair_dim)

    def join(self, layer: int, k_BHTE: Tensor, v_BHTE: Tensor) -> KV:
        """Return a layer's new keys and values together with the earlier ones that these tokens may see."""
        return k_BHTE, v_BHTE

    def __call__(self, q_BHTE: Tensor, k_BHSE: Tensor, v_BHSE: Tensor, dropout: float = 0.0) -> Tensor:
        """Compute the attention output of every query, with this dropout probability of the attention weights."""

        def attend(q_BHTE: Tensor, k_BHSE: Tensor, v_BHSE: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(
                q_BHTE,
                k_BHSE,
                v_BHSE,
                attn_mask=self.mask,
                dropout_p=dropout,
                is_causal=self.causal,
                enable_gqa=are_shared(q_BHTE, k_BHSE),
            )

        if not faster_in_float32(q_BHTE, k_BHSE):
            return attend(q_BHTE, k_BHSE, v_BHSE)
        with torch.autocast("cpu", enabled=False):
            return attend(q_BHTE.float(), k_BHSE.float(), v_BHSE.float()).to(q_BHTE.dtype)

    def after(self) -> Any:
        """Return the cache after this call, if there is one."""
        return None


def are_shared(q_BHTE: Tensor, k_BHSE: Tensor) -> bool:
    """Whether groups of attention heads share keys and values."""
    return q_BHTE.shape[1] != k_BHSE.shape[1]


def faster_in_float32(q_BHTE: Tensor, k_BHSE: Tensor) -> bool:
    """Whether short sequences are trained in bf16 on a CPU, where the backward of attention is faster in float32.

    With 128 tokens it takes about a third of the time, casts included (`benchmarks/attention.py`).
    """
    narrow_on_cpu = q_BHTE.dtype == torch.bfloat16 and q_BHTE.device.type == "cpu"
    short = k_BHSE.shape[-2] * k_BHSE.shape[-1] <= SHORT
    return narrow_on_cpu and short and torch.is_grad_enabled() and q_BHTE.requires_grad


def causal_mask(tokens: int, past: int, window: int | None, device: torch.device) -> Tensor:
    """Return the mask (T, S) of the keys that each of `tokens` new tokens sees, after `past` earlier tokens."""
    keys = past + tokens
    distance_TS = torch.arange(past, keys, device=device)[:, None] - torch.arange(keys, device=device)
    mask_TS = distance_TS >= 0
    return mask_TS if window is None else mask_TS & (distance_TS < window)


def rotary_angles(config: TransformerConfig, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the cosine and sine of the rotary angles; their last dimension is half the head size."""
    # A float32 angle is off by 0.006 rad at position 100,000, so angles are float64 if the device supports it.
    exact = torch.float32 if positions.device.type == "mps" else torch.float64
    even = torch.arange(0, config.head_size, 2, device=positions.device, dtype=exact)
    radians = angles(config, positions[..., None].to(exact), even)
    return radians.cos().to(dtype), radians.sin().to(dtype)


def channel_pairs(x: Tensor, pair_dim: int) -> Tensor:
    """View a head's channels as the pairs that rotate together: (i, i + E/2), or the neighbours (2i, 2i + 1)."""
    return x.view(*x.shape[:-1], *((2, -1) if pair_dim == -2 else (-1, 2)))


def rotate(x_BTHE: Tensor, cos: Tensor, sin: Tensor, pair_dim: int) -> Tensor:
    """Rotate each pair of channels by its position's angle, in the dtype of x (narrower under autocast)."""
    cos, sin = (part[..., None, :].to(x_BTHE.dtype) for part in (cos, sin))
    first, second = channel_pairs(x_BTHE, pair_dim).unbind(pair_dim)
    return torch.stack((first * cos - second * sin, first * sin + second * cos), pair_dim).flatten(-2)
