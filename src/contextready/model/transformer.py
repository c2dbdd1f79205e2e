"""The transformer backbone: pre-LN blocks with rotary causal attention, as three functions.

Shapes in names: B batch, T tokens of this call, S keys attended to, C width, H heads, D head size, V vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contextready.errors import ContextReadyError
from contextready.model.buffer import KVBuffer, Places
from contextready.model.cache import KV, KVCache
from contextready.model.config import TransformerConfig

INIT_STD = 0.02

Join = Callable[[Tensor, Tensor], KV]
"""Puts a layer's new keys and values to the earlier ones and returns all."""


class AttentionPlan(NamedTuple):
    """What every layer of one call shares: rotation angles (of each row, if theirs differ) and who may see whom."""

    cos_TD: Tensor
    sin_TD: Tensor
    mask_TS: Tensor | None
    causal: bool
    visible: int
    """S: of all keys, the newest that any query of this call may see."""
    spans: tuple[tuple[int, int, int], ...] = ()
    """Queries from, to, and the first keys that these may see: attention in parts, to leave out what is masked."""


def attention_plan(config: TransformerConfig, x_BTC: Tensor, position: int, past: int) -> AttentionPlan:
    """Plan the attention of T new tokens at `position`, after `past` cached ones."""
    T, device = x_BTC.shape[1], x_BTC.device
    cos_TD, sin_TD = turns(config, torch.arange(position, position + T, device=device), x_BTC.dtype)

    if config.window is not None:
        past = min(past, config.window - 1)
    visible = past + T
    if T == 1:
        return AttentionPlan(cos_TD, sin_TD, None, False, visible)
    if past == 0 and (config.window is None or config.window >= T):
        return AttentionPlan(cos_TD, sin_TD, None, True, visible)
    distance_TS = torch.arange(past, visible, device=device)[:, None] - torch.arange(visible, device=device)
    mask_TS = distance_TS >= 0
    if config.window is not None:
        mask_TS &= distance_TS < config.window
    return AttentionPlan(cos_TD, sin_TD, mask_TS, False, visible)


def placed_plan(config: TransformerConfig, x_BTC: Tensor, places: Places) -> AttentionPlan:
    """Plan the attention of tokens at given places of a buffer, over what it holds."""
    if places.sees != "all":
        places.mark()
    cos_BTD, sin_BTD = turns(config, places.positions_BT, x_BTC.dtype)
    causal = places.sees == "causal" and (config.window is None or config.window >= x_BTC.shape[1])
    mask_B1TN = None if causal or places.sees == "all" else places.mask_B1TN()
    return AttentionPlan(cos_BTD, sin_BTD, mask_B1TN, causal, places.visible, places.spans)


def turns(config: TransformerConfig, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary angles of positions, in a last dimension of half the head size."""
    # A float32 angle is off by 0.006 rad at position 100,000, so angles are float64 where the device has it.
    exact = torch.float32 if positions.device.type == "mps" else torch.float64
    half = torch.arange(0, config.head_size, 2, device=positions.device, dtype=exact) / config.head_size
    angles = positions[..., None].to(exact) / config.rope_base**half
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x_BTRHD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Turn each pair (channel i, channel i + D/2) by its position's angle, in the dtype of x (narrower in autocast)."""
    cos, sin = (turn[..., None, None, :].to(x_BTRHD.dtype) for turn in (cos_TD, sin_TD))
    first, second = x_BTRHD.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with rotary positions, full or windowed."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.heads, self.head_size = config.heads, config.head_size
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=config.bias)
        self.out = nn.Linear(config.width, config.width, bias=config.bias)

    def forward(self, x_BTC: Tensor, plan: AttentionPlan, join: Join | None) -> tuple[Tensor, KV]:
        """Attend; return the result and this layer's keys and values, joined to earlier ones if there are any."""
        B, T, C = x_BTC.shape
        qkv = self.qkv(x_BTC).view(B, T, 3, self.heads, self.head_size)
        qk = rotate(qkv[:, :, :2], plan.cos_TD, plan.sin_TD)
        q_BHTD, k_BHSD = qk.permute(2, 0, 3, 1, 4).unbind(0)
        v_BHSD = qkv[:, :, 2].transpose(1, 2)
        if join is not None:
            k_BHSD, v_BHSD = join(k_BHSD, v_BHSD)
        if plan.spans and plan.mask_TS is not None:
            parts = [
                F.scaled_dot_product_attention(
                    q_BHTD[:, :, first:end],
                    k_BHSD[:, :, :seen],
                    v_BHSD[:, :, :seen],
                    attn_mask=plan.mask_TS[..., first:end, :seen],
                )
                for first, end, seen in plan.spans
            ]
            y_BHTD = torch.cat(parts, dim=2)
        else:
            y_BHTD = F.scaled_dot_product_attention(
                q_BHTD,
                k_BHSD[:, :, -plan.visible :],
                v_BHSD[:, :, -plan.visible :],
                attn_mask=plan.mask_TS,
                is_causal=plan.causal,
            )
        return self.out(y_BHTD.transpose(1, 2).reshape(B, T, C)), (k_BHSD, v_BHSD)


class FFN(nn.Module):
    """Linear to four times the width, GELU, linear back."""

    def __init__(self, width: int, bias: bool, inputs: int | None = None) -> None:
        super().__init__()
        self.up = nn.Linear(inputs or width, 4 * width, bias=bias)
        self.down = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the network to the last dimension."""
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


def append(past: KV, k_BHTD: Tensor, v_BHTD: Tensor) -> KV:
    """New keys and values after those of a cache."""
    return torch.cat((past[0], k_BHTD), dim=2), torch.cat((past[1], v_BHTD), dim=2)


class Block(nn.Module):
    """One transformer layer: h + Attn(LN(h)), then a + FFN(LN(a))."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attn_norm = nn.LayerNorm(config.width, bias=config.bias)
        self.attn = Attention(config)
        self.ffn_norm = nn.LayerNorm(config.width, bias=config.bias)
        self.ffn = FFN(config.width, config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, h_BTC: Tensor, plan: AttentionPlan, join: Join | None) -> tuple[Tensor, KV]:
        """Apply the layer; return its output and its keys and values."""
        attended_BTC, kv = self.attn(self.attn_norm(h_BTC), plan, join)
        a_BTC = h_BTC + self.dropout(attended_BTC)
        return a_BTC + self.dropout(self.ffn(self.ffn_norm(a_BTC))), kv


class Transformer(nn.Module):
    """The paper's "roformer": `head(blocks(embed(tokens)))`."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        unfilled_VC = torch.empty(config.vocab_size, config.width)
        self.embedding = nn.Embedding.from_pretrained(unfilled_VC, freeze=False)  # type: ignore[no-untyped-call]
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList([Block(config) for _ in range(config.layers)])
        self.extra_norm = nn.LayerNorm(config.width, bias=config.bias) if config.extra_ffn else None
        self.extra_ffn = FFN(config.width, config.bias) if config.extra_ffn else None
        self.final_norm = nn.LayerNorm(config.width, bias=config.bias)
        self.unembedding = nn.Linear(config.width, config.vocab_size, bias=False)
        self.initialise()

    def initialise(self) -> None:
        """Give all weights the values they start with."""
        init_weights(self)
        # Residual branches add up over depth: each starts smaller the more there are (GPT-2).
        for block in self.layers:
            assert isinstance(block, Block)
            for linear in (block.attn.out, block.ffn.down):
                fill_normal(linear.weight, INIT_STD / (2 * self.config.layers) ** 0.5)

    @property
    def width(self) -> int:
        """C."""
        return self.config.width

    @property
    def last_ffn(self) -> FFN:
        """The feed-forward network of the last block."""
        last = self.layers[-1]
        assert isinstance(last, Block)
        return last.ffn

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """Look up the context-free embedding of every token: e (B, T, C)."""
        check_tokens(tokens_BT)
        if tokens_BT.device != self.embedding.weight.device:
            raise ContextReadyError(
                f"The tokens are on {tokens_BT.device} and the model on {self.embedding.weight.device}; move one."
            )
        try:
            e_BTC: Tensor = self.embedding(tokens_BT)
        except IndexError:
            V = self.config.vocab_size
            bad = tokens_BT[(tokens_BT < 0) | (tokens_BT >= V)].flatten()[0].item()
            raise ContextReadyError(
                f"Token id {bad} is out of range; this model knows the ids 0 to {V - 1}, so use its own tokenizer."
            ) from None
        return e_BTC

    def blocks(self, x_BTC: Tensor, cache: KVCache | Places | None = None) -> tuple[Tensor, KVCache | Places | None]:
        """Run the D blocks: z (B, T, C), the residual stream before the final norm, and the cache after it.

        After a cache the tokens are the next ones. At places of a buffer they may be any, and the buffer is written to.
        """
        joins: list[Join | None]
        if isinstance(cache, Places):
            plan, joins = (
                placed_plan(self.config, x_BTC, cache),
                [partial(cache.join, i) for i in range(self.config.layers)],
            )
        elif cache is not None:
            self._check_cache(cache, x_BTC)
            plan = attention_plan(self.config, x_BTC, cache.position, cache.length)
            joins = [partial(append, kv) for kv in cache.layers]
        else:
            plan, joins = attention_plan(self.config, x_BTC, 0, 0), [None for _ in range(self.config.layers)]
        z_BTC, kvs = self.run_layers(x_BTC, plan, joins)
        return z_BTC, cache.advanced(kvs, x_BTC.shape[1]) if isinstance(cache, KVCache) else cache

    def run_layers(self, x_BTC: Tensor, plan: AttentionPlan, joins: Sequence[Join | None]) -> tuple[Tensor, list[KV]]:
        """Run the blocks by a plan, each with its way of joining keys and values to earlier ones: z, and all of these.

        Keys and values that nobody joined are let go.
        """
        h_BTC, kvs = self.dropout(x_BTC), []
        for block, join in zip(self.layers, joins, strict=True):
            h_BTC, kv = block(h_BTC, plan, join)
            if join is not None:
                kvs.append(kv)
        if self.extra_ffn is not None and self.extra_norm is not None:
            h_BTC = h_BTC + self.dropout(self.extra_ffn(self.extra_norm(h_BTC)))
        return h_BTC, kvs

    def head(self, z_BTC: Tensor) -> Tensor:
        """Predict: logits (B, T, V) = W_head LN(z)."""
        logits_BTV: Tensor = self.unembedding(self.final_norm(z_BTC))
        return logits_BTV

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits (B, T, V) of whole sequences."""
        z_BTC, _ = self.blocks(self.embed(tokens_BT))
        return self.head(z_BTC)

    def stream(self, tokens_BT: Tensor, cache: KVCache) -> tuple[Tensor, KVCache]:
        """Logits of the next T ≥ 1 tokens after `cache`, and the cache after them."""
        e_BTC = self.embed(tokens_BT)
        self._check_cache(cache, e_BTC)
        z_BTC, advanced = self.blocks(e_BTC, cache)
        assert isinstance(advanced, KVCache)
        return self.head(z_BTC), advanced

    def init_cache(self, batch_size: int, history: int = 1) -> KVCache:
        """A cache before the first token; `history` is how far a windowed cache can be rolled back."""
        c = self.config
        return KVCache.empty(
            batch_size, c.layers, c.heads, c.head_size, c.window, history, like=self.unembedding.weight
        )

    def init_buffer(self, batch_size: int, slots: int) -> KVBuffer:
        """A buffer before the first token; it lets tokens attend from any chosen positions over fixed slots."""
        c = self.config
        return KVBuffer.empty(batch_size, slots, c.layers, c.heads, c.head_size, c.window, like=self.unembedding.weight)

    def _check_cache(self, cache: KVCache, x_BTC: Tensor) -> None:
        if not isinstance(cache, KVCache):
            raise ContextReadyError("This is not a cache of this kind of model; start one with init_cache.")
        c, k_BHSD = self.config, cache.layers[0][0]
        theirs = (len(cache.layers), k_BHSD.shape[1], k_BHSD.shape[3], cache.window)
        if theirs != (c.layers, c.heads, c.head_size, c.window):
            raise ContextReadyError(
                "This state is of another model (layers, heads, head size, window: "
                f"{theirs} instead of {(c.layers, c.heads, c.head_size, c.window)}); start one with init_state."
            )
        if cache.batch_size != x_BTC.shape[0]:
            raise ContextReadyError(
                f"This state holds {cache.batch_size} rows and {x_BTC.shape[0]} were given; "
                "select or repeat its rows, or start a new state."
            )


def check_tokens(tokens_BT: Tensor) -> None:
    """Refuse anything that is not a batch of at least one token id each."""
    if tokens_BT.dim() != 2 or tokens_BT.shape[1] == 0 or tokens_BT.shape[0] == 0:
        raise ContextReadyError(
            f"Tokens of shape {tuple(tokens_BT.shape)} were given; give (batch, tokens) with at least one of each."
        )
    if tokens_BT.dtype not in (torch.int64, torch.int32):
        raise ContextReadyError(f"Tokens of type {tokens_BT.dtype} were given; give whole numbers (int64 or int32).")


def fill_normal(weight: Tensor, std: float) -> None:
    """Normal noise, except on the meta device, where there is nothing to fill and trying takes seconds."""
    if not weight.is_meta:
        nn.init.normal_(weight, std=std)


def init_weights(module: nn.Module) -> None:
    """Normal weights with standard deviation 0.02 and zero biases, as in GPT-2."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            fill_normal(part.weight, INIT_STD)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)
