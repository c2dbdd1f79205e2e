"""How the tokens of one call attend: rotary positions, who may see whom, and what earlier tokens left.

`Attend` is the plain case, whole sequences. A cache (`cache.py`) and a buffer (`buffer.py`) bring their own.
Shapes in names: B batch, T tokens of this call, S keys attended to, H heads, E head size.
"""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from contextready.model.config import TransformerConfig

KV = tuple[Tensor, Tensor]
"""Keys and values of one layer, each (B, heads, S, head size), keys already rotated."""


class Past(Protocol):
    """What earlier tokens left: the blocks ask it how the next tokens attend."""

    def attend(self, config: TransformerConfig, x_BTC: Tensor) -> "Attend":
        """How these block inputs attend after it."""


class Attend:
    """Attention of the tokens of one call, the same for every layer; here they begin at position 0."""

    def __init__(self, config: TransformerConfig, x_BTC: Tensor) -> None:
        T = x_BTC.shape[1]
        self.set_positions(config, torch.arange(T, device=x_BTC.device), x_BTC.dtype)
        self.causal = config.window is None or config.window >= T
        self.mask: Tensor | None = None if self.causal else causal_mask(T, 0, config.window, x_BTC.device)

    def set_positions(self, config: TransformerConfig, positions: Tensor, dtype: torch.dtype) -> None:
        """Where the tokens are: (T,), or (B, T) where each row has its own positions."""
        self.cos, self.sin = rotary_angles(config, positions, dtype)

    def rotate(self, x_BTRHE: Tensor) -> Tensor:
        """Turn queries and keys by their positions' angles."""
        return rotate(x_BTRHE, self.cos, self.sin)

    def join(self, layer: int, k_BHTE: Tensor, v_BHTE: Tensor) -> KV:
        """A layer's new keys and values together with the earlier ones that these tokens may see."""
        return k_BHTE, v_BHTE

    def __call__(self, q_BHTE: Tensor, k_BHSE: Tensor, v_BHSE: Tensor) -> Tensor:
        """The values that each query finds."""
        return F.scaled_dot_product_attention(q_BHTE, k_BHSE, v_BHSE, attn_mask=self.mask, is_causal=self.causal)

    def after(self) -> Any:
        """The cache after this call, if there is one."""
        return None


def causal_mask(tokens: int, past: int, window: int | None, device: torch.device) -> Tensor:
    """Which keys each of `tokens` new tokens sees (T, S), after `past` earlier ones."""
    keys = past + tokens
    distance_TS = torch.arange(past, keys, device=device)[:, None] - torch.arange(keys, device=device)
    mask_TS = distance_TS >= 0
    return mask_TS if window is None else mask_TS & (distance_TS < window)


def rotary_angles(config: TransformerConfig, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary angles of positions, in a last dimension of half the head size."""
    # A float32 angle is off by 0.006 rad at position 100,000, so angles are float64 where the device has it.
    exact = torch.float32 if positions.device.type == "mps" else torch.float64
    half = torch.arange(0, config.head_size, 2, device=positions.device, dtype=exact) / config.head_size
    angles = positions[..., None].to(exact) / config.rope_base**half
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x_BTRHE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (channel i, channel i + E/2) by its position's angle, in the dtype of x (narrower in autocast)."""
    cos, sin = (part[..., None, None, :].to(x_BTRHE.dtype) for part in (cos, sin))
    first, second = x_BTRHE.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
