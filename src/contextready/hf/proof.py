"""Proves that a pretrained model can be converted: its parts, used one by one, compute what the whole model computes.

Embedding, blocks and head must give the model's own logits bit for bit, from embeddings with explicit positions. Tokens
must not see later ones. Reading with a cache must give the same logits up to rounding.
"""

from math import sqrt
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from contextready.hf.backbone import HFBackbone
from contextready.hf.cache import Feed
from contextready.hf.structure import Structure, cannot_convert, evaluating, find_structure, proof_tokens, refusing


def verified_structure(lm: Any) -> Structure:
    """Find a model's parts, and refuse a model that cannot be converted."""
    structure = find_structure(lm)
    backbone = HFBackbone(lm, structure)
    try:
        with evaluating(lm), refusing(lm):
            _prove(lm, backbone, proof_tokens(lm))
    finally:
        backbone.unhook()
    return structure


@torch.no_grad()
def _prove(lm: Any, backbone: HFBackbone, tokens_1T: Tensor) -> None:
    logits_1TV, e_1TC = lm(input_ids=tokens_1T, use_cache=False).logits, backbone.embed(tokens_1T)
    before_1TC = e_1TC.clone()
    z_1TC, _ = backbone.blocks(e_1TC)
    if not torch.equal(e_1TC, before_1TC):
        raise cannot_convert(lm, "it changes its input embeddings in place, so a second pass would read other ones.")
    placed_1TC, _ = backbone.blocks(e_1TC, _feed(None, e_1TC, 0))
    for found_1TC in (z_1TC, placed_1TC):
        if not torch.equal(backbone.head(found_1TC), logits_1TV):
            raise cannot_convert(
                lm,
                "its embedding, blocks and head do not reproduce its logits (it may count positions from another "
                "number than 0, or skip padding).",
            )
    with refusing(lm, "it does not accept embeddings other than those of its vocabulary"):
        moved_1TC, _ = backbone.blocks(e_1TC * 1.25)
    if torch.equal(moved_1TC, z_1TC):
        raise cannot_convert(lm, "it does not use the embeddings that it is given.")
    if _sees_later_tokens(lm, backbone, tokens_1T, logits_1TV):
        raise cannot_convert(
            lm,
            "its tokens attend to later tokens, as in an encoder. Only decoder-only models can be converted.",
        )
    _prove_cache(lm, backbone, e_1TC, logits_1TV)


def _sees_later_tokens(lm: Any, backbone: HFBackbone, tokens_1T: Tensor, logits_1TV: Tensor) -> bool:
    """Whether a token's output depends on later tokens.

    Their gradient is exactly zero if it does not, whatever is rounded how. The logits themselves may then differ by
    rounding, for example because a mixture of experts sorts the tokens of each expert together. They are compared for
    choices that have no gradient.
    """
    T = tokens_1T.shape[1]
    with torch.enable_grad():
        e_1TC = backbone.embed(tokens_1T).detach().requires_grad_()
        z_1TC, _ = backbone.blocks(e_1TC)
        weights_C = torch.randn(z_1TC.shape[-1], generator=torch.Generator().manual_seed(0)).to(z_1TC)
        (gradient_1TC,) = torch.autograd.grad((z_1TC[:, T // 2] * weights_C).sum(), e_1TC)
    if bool(gradient_1TC[:, T // 2 + 1 :].count_nonzero()):
        return True
    other_1T = tokens_1T.clone()
    other_1T[:, -1] = (other_1T[:, -1] + 1) % lm.config.get_text_config().vocab_size
    other_1TV = lm(input_ids=other_1T, use_cache=False).logits
    return not is_close(other_1TV[:, :-1], logits_1TV[:, :-1])


def _prove_cache(lm: Any, backbone: HFBackbone, e_1TC: Tensor, logits_1TV: Tensor) -> None:
    """Read all tokens but one, then the last one from the cache: with Hugging Face's cache, and as a value."""
    n = e_1TC.shape[1] - 1
    cache = DynamicCache(config=lm.config.get_text_config())
    backbone.blocks(e_1TC[:, :n], _feed(cache, e_1TC[:, :n], 0))
    if cache.get_seq_length() != n:
        raise cannot_convert(lm, "it keeps no keys and values in a cache, so it cannot continue a text.")
    _, past = backbone.blocks(e_1TC[:, :n], backbone.init_cache(1))
    last_11C, _ = backbone.blocks(e_1TC[:, n:], _feed(cache, e_1TC[:, n:], n))
    again_11C, _ = backbone.blocks(e_1TC[:, n:], past)
    for found_11C in (last_11C, again_11C):
        if not is_close(backbone.head(found_11C), logits_1TV[:, n:]):
            raise cannot_convert(lm, "reading the last token with a cache gives other logits than without.")


def _feed(cache: DynamicCache | None, e_BTC: Tensor, start: int) -> Feed:
    positions_1T = torch.arange(start, start + e_BTC.shape[1], device=e_BTC.device)[None]
    return Feed(cache, {"attention_mask": None, "position_ids": positions_1T})


def is_close(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal up to rounding; parts of many models round to float32 at best."""
    near = sqrt(max(torch.finfo(b.dtype).eps, torch.finfo(torch.float32).eps)) * float(b.abs().max())
    return bool(((a - b).abs() <= near).all())
