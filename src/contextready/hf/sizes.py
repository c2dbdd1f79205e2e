"""The sizes of a pretrained model's embeddings and block outputs, which decide how its new correction starts."""

from typing import TYPE_CHECKING, Any

import torch

from contextready.hf.structure import evaluating, proof_tokens
from contextready.model.correction import LARGEST_SCALE
from contextready.solve.norms import norms

if TYPE_CHECKING:
    from contextready.hf.backbone import HFBackbone

SAMPLED_TOKENS = 4096
"""About how many tokens the size of embeddings is measured on."""
LARGE = 50.0
"""If z is more than this many times as large as e, LN(z + e) hardly depends on the token."""


def embedding_size(lm: Any) -> float:
    """Return the root mean square of the token embeddings as the blocks get them: the size of one coordinate."""
    embedding = lm.get_input_embeddings()
    number = embedding.weight.shape[0]
    # Some families multiply the embeddings when they look them up, so the weights alone do not tell.
    tokens = torch.arange(0, number, -(-number // SAMPLED_TOKENS), device=embedding.weight.device)
    with torch.no_grad():
        size = float(embedding(tokens).float().pow(2).mean().sqrt())
    return float(f"{size:.4g}") if 0.0 < size < LARGEST_SCALE else 1.0


@torch.no_grad()
def output_ratio(backbone: "HFBackbone") -> float:
    """Return how many times as large z is as e, as the median over a few tokens."""
    with evaluating(backbone.lm):
        e_1TC = backbone.embed(proof_tokens(backbone.lm))
        z_1TC, _ = backbone.blocks(e_1TC)
    # The first token is left out, because models often use it as a sink with a far larger z.
    return float((norms(z_1TC) / norms(e_1TC))[:, 1:].median())


def choose_correction(backbone: "HFBackbone") -> str:
    """Return the correction that fits a pretrained model: balanced if its z is many times as large as e, else add."""
    return "balanced" if output_ratio(backbone) > LARGE else "add"
