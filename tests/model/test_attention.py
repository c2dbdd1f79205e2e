"""Attention of short sequences in bf16 on a CPU, which is computed in float32 while training."""

import pytest
import torch
import torch.nn.functional as F

from contextready.model.attention import SHORT, Attend
from contextready.model.config import TransformerConfig

HEADS, SIZE = 2, 16


def attention(tokens, dtype, window=None):
    config = TransformerConfig(vocab_size=2, width=HEADS * SIZE, layers=1, heads=HEADS, window=window)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, HEADS, tokens, SIZE).to(dtype) for _ in range(3))
    return Attend(config, torch.empty(2, tokens, HEADS * SIZE, dtype=dtype)), q, k, v


@pytest.mark.parametrize("window", [None, 3])
def test_short_sequences_are_trained_as_if_in_float32(window):
    attend, *narrow = attention(24, torch.bfloat16, window)
    wide = [part.float().requires_grad_() for part in narrow]
    narrow = [part.requires_grad_() for part in narrow]
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(*narrow)
    expected = F.scaled_dot_product_attention(*wide, attn_mask=attend.mask, is_causal=attend.causal)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, expected.to(torch.bfloat16))
    upstream = torch.randn_like(expected).to(torch.bfloat16)
    out.backward(upstream)
    expected.backward(upstream.float())
    for mine, theirs in zip(narrow, wide, strict=True):
        assert torch.equal(mine.grad, theirs.grad.to(torch.bfloat16))


@pytest.mark.parametrize(("tokens", "trained"), [(24, False), (SHORT // SIZE + 1, True)])
def test_long_sequences_and_generation_stay_in_bf16(tokens, trained):
    attend, q, k, v = attention(tokens, torch.bfloat16)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    in_float32 = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True).to(torch.bfloat16)
    assert not torch.equal(expected, in_float32)
    assert torch.equal(attend(q.requires_grad_(trained), k, v), expected)
