"""The transformer backbone: pre-LN blocks with rotary causal attention, as three functions.

Shapes in names: B batch, T tokens of this call, S keys attended to, C width, H heads, G heads of keys and values (as
many as H in the paper), E head size, V vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contextready.model.attention import Attend, Past
from contextready.model.buffer import KVBuffer
from contextready.model.cache import KVCache
from contextready.model.checks import check_past, check_tokens, unknown_token
from contextready.model.config import TransformerConfig

INIT_STD = 0.02


class Attention(nn.Module):
    """Causal self-attention with rotary positions, either full or windowed."""

    def __init__(self, config: TransformerConfig, layer: int) -> None:
        super().__init__()
        self.heads, self.shared_heads, self.head_size = config.heads, config.shared_heads, config.head_size
        E, number = config.head_size, config.heads + 2 * config.shared_heads
        self.qkv = nn.Linear(config.width, number * E, bias=config.bias or config.qkv_bias)
        self.out = nn.Linear(config.heads * E, config.width, bias=config.bias)
        self.q_norm = nn.RMSNorm(E, config.norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(E, config.norm_eps) if config.qk_norm else None
        self.has_rope = config.has_rope(layer)
        self.dropout = nn.Dropout(config.attention_dropout)

    def forward(self, x_BTC: Tensor, attend: Attend, layer: int) -> Tensor:
        """Apply attention; `attend` holds the positions, the mask and any earlier keys and values."""
        B, T, _ = x_BTC.shape
        H, G = self.heads, self.shared_heads
        qk_BTHE, v_BTGE = self.qkv(x_BTC).view(B, T, -1, self.head_size).split((H + G, G), dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            # Under autocast, the norms compute in the type of their weights.
            wide_BTHE = qk_BTHE.to(self.q_norm.weight.dtype)
            normed = (self.q_norm(wide_BTHE[:, :, :H]), self.k_norm(wide_BTHE[:, :, H:]))
            qk_BTHE = torch.cat(normed, dim=2).to(qk_BTHE.dtype)
        if self.has_rope:
            qk_BTHE = attend.rotate(qk_BTHE)
        q_BHTE, k_BGTE = qk_BTHE.transpose(1, 2).split((H, G), dim=1)
        k_BGSE, v_BGSE = attend.join(layer, k_BGTE, v_BTGE.transpose(1, 2))
        y_BHTE = attend(q_BHTE, k_BGSE, v_BGSE, self.dropout.p if self.training else 0.0)
        out_BTC: Tensor = self.out(y_BHTE.transpose(1, 2).reshape(B, T, -1))
        return out_BTC


class FFN(nn.Module):
    """A feed-forward network: linear to four times the width (or to `hidden`), GELU, linear back."""

    def __init__(self, width: int, bias: bool, inputs: int | None = None, hidden: int | None = None) -> None:
        super().__init__()
        self.up = nn.Linear(inputs or width, hidden or 4 * width, bias=bias)
        self.down = nn.Linear(hidden or 4 * width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the network to the last dimension."""
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class GatedFFN(nn.Module):
    """A feed-forward network with a gate: SiLU of one linear layer times another, then linear back."""

    def __init__(self, width: int, bias: bool, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=bias)
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the network to the last dimension."""
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


def build_norm(config: TransformerConfig) -> nn.LayerNorm | nn.RMSNorm:
    """Create a norm of the residual stream."""
    if config.norm == "rms":
        return nn.RMSNorm(config.width, config.norm_eps)
    return nn.LayerNorm(config.width, config.norm_eps, bias=config.bias)


def build_ffn(config: TransformerConfig) -> FFN | GatedFFN:
    """Create a feed-forward network."""
    if config.ffn == "swiglu":
        return GatedFFN(config.width, config.bias, config.hidden_width)
    return FFN(config.width, config.bias, hidden=config.hidden_width)


class Block(nn.Module):
    """One transformer layer: h + Attn(LN(h)), then a + FFN(LN(a))."""

    def __init__(self, config: TransformerConfig, layer: int) -> None:
        super().__init__()
        self.attn_norm = build_norm(config)
        self.attn = Attention(config, layer)
        self.ffn_norm = build_norm(config)
        self.ffn = build_ffn(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, h_BTC: Tensor, attend: Attend, layer: int) -> Tensor:
        """Apply the layer."""
        a_BTC: Tensor = h_BTC + self.dropout(self.attn(self.attn_norm(h_BTC), attend, layer))
        out_BTC: Tensor = a_BTC + self.dropout(self.ffn(self.ffn_norm(a_BTC)))
        return out_BTC


class Transformer(nn.Module):
    """The paper's "roformer" as three functions: `head(blocks(embed(tokens)))`."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        unfilled_VC = torch.empty(config.vocab_size, config.width)
        self.embedding = nn.Embedding.from_pretrained(unfilled_VC, freeze=False)  # type: ignore[no-untyped-call]
        self.dropout = nn.Dropout(config.dropout)
        self.input_dropout = nn.Dropout(config.input_dropout)
        self.layers = nn.ModuleList([Block(config, layer) for layer in range(config.layers)])
        self.extra_norm = build_norm(config) if config.extra_ffn else None
        self.extra_ffn = build_ffn(config) if config.extra_ffn else None
        self.final_norm = build_norm(config)
        self.unembedding = nn.Linear(config.width, config.vocab_size, bias=config.head_bias)
        if config.tied_embeddings:
            self.unembedding.weight = self.embedding.weight
        self.initialise()

    def initialise(self) -> None:
        """Initialize all weights."""
        init_weights(self, self.config.init)
        # Residual branches add up over depth, so deeper models start with smaller ones, as in GPT-2.
        for block in self.layers if self.config.init == "gpt2" else ():
            assert isinstance(block, Block)
            for linear in (block.attn.out, block.ffn.down):
                fill_normal(linear.weight, INIT_STD / (2 * self.config.layers) ** 0.5)

    @property
    def width(self) -> int:
        """C, the width of the residual stream."""
        return self.config.width

    @property
    def last_block(self) -> Block:
        """The last block, whose weights some corrections use."""
        last = self.layers[-1]
        assert isinstance(last, Block)
        return last

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """Return the context-free embedding e (B, T, C) of every token."""
        check_tokens(tokens_BT, self.embedding.weight.device)
        try:
            e_BTC: Tensor = self.embedding(tokens_BT)
        except IndexError:
            raise unknown_token(tokens_BT, self.config.vocab_size) from None
        return e_BTC

    def blocks(self, x_BTC: Tensor, past: Past | None = None) -> tuple[Tensor, Any]:
        """Run the blocks; return z (B, T, C), the residual stream before the final norm, and the cache after it.

        If `past` is a cache, the tokens follow it. If it is places of a buffer, they may have any positions, and the
        buffer is updated.
        """
        if past is not None:
            check_past(past)
        attend = Attend(self.config, x_BTC) if past is None else past.attend(self.config, x_BTC)
        h_BTC = self.input_dropout(x_BTC)
        for layer, block in enumerate(self.layers):
            h_BTC = block(h_BTC, attend, layer)
        if self.extra_ffn is not None and self.extra_norm is not None:
            h_BTC = h_BTC + self.dropout(self.extra_ffn(self.extra_norm(h_BTC)))
        return h_BTC, attend.after()

    def head(self, z_BTC: Tensor) -> Tensor:
        """Return the logits (B, T, V) = W_head LN(z), plus the head's bias if it has one."""
        logits_BTV: Tensor = self.unembedding(self.final_norm(z_BTC))
        return logits_BTV

    def init_cache(self, batch_size: int, history: int = 1) -> KVCache:
        """Create an empty cache; `history` is how many tokens a windowed cache can be rolled back."""
        c = self.config
        return KVCache.empty(
            batch_size, c.layers, c.shared_heads, c.head_size, c.window, history=history, like=self.embedding.weight
        )

    def init_buffer(self, batch_size: int, capacity: int) -> KVBuffer:
        """Create an empty buffer, whose fixed slots let tokens at any positions attend in one call."""
        c, like = self.config, self.embedding.weight
        return KVBuffer.empty(batch_size, capacity, c.layers, c.shared_heads, c.head_size, window=c.window, like=like)


def fill_normal(weight: Tensor, std: float) -> None:
    """Fill a weight with normal noise, except on the meta device, where this would do nothing and take seconds."""
    if not weight.is_meta:
        nn.init.normal_(weight, std=std)


def init_weights(module: nn.Module, init: str = "gpt2") -> None:
    """Initialize with normal weights of standard deviation 0.02 and zero biases (gpt2), or as PyTorch does (torch)."""
    initialise = {"gpt2": _as_in_gpt2, "torch": _as_in_torch}[init]
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            initialise(part)


def _as_in_gpt2(part: nn.Linear | nn.Embedding) -> None:
    fill_normal(part.weight, INIT_STD)
    if isinstance(part, nn.Linear) and part.bias is not None:
        nn.init.zeros_(part.bias)


def _as_in_torch(part: nn.Linear | nn.Embedding) -> None:
    if not part.weight.is_meta:
        part.reset_parameters()
