"""Whether a pretrained model computes the same for rows that are padded to one length as for each row alone."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from contextready.hf.structure import evaluating, proof_tokens
from contextready.model.padded import PaddedCache

if TYPE_CHECKING:
    from contextready.hf.backbone import HFBackbone

LENGTHS = (6, 1, 4)
"""How many tokens the rows of the trial have read before they step together."""
STEPS = 3
NEAR = 1e-3
"""Allowed difference of z, relative to its largest coordinate, in float32; a wrong mask or position changes z by more.
Narrower types round by more."""
LONG_ROTATIONS = ("dynamic", "longrope")
"""Rotary positions whose angles depend on the longest row of the batch."""


@torch.no_grad()
def pads_exactly(backbone: "HFBackbone") -> bool:
    """Try a model: step a few rows of different lengths together, and each of them alone.

    What a short trial would not show is looked up in the configuration.
    """
    config = backbone.lm.config.get_text_config()
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        return False
    if any(kind in LONG_ROTATIONS for kind in _rotations(config.to_dict())):
        return False
    with evaluating(backbone.lm):
        try:
            return _same_as_alone(backbone)
        except Exception:  # models raise anything if they cannot run with padding
            return False


def _same_as_alone(backbone: "HFBackbone") -> bool:
    tokens_1T = proof_tokens(backbone.lm)
    most = tokens_1T.shape[1] - STEPS
    e_1TC = backbone.embed(tokens_1T)
    caches = [backbone.blocks(e_1TC[:, : min(most, n)], backbone.init_cache(1))[1] for n in LENGTHS]
    together = PaddedCache.of(caches)
    for _ in range(STEPS):
        x_R1C = torch.cat([e_1TC[:, cache.position : cache.position + 1] for cache in caches])
        z_R1C, together = backbone.blocks(x_R1C, together)
        alone = [backbone.blocks(x_1C[None], cache) for x_1C, cache in zip(x_R1C, caches, strict=True)]
        caches = [cache for _, cache in alone]
        if not _close(z_R1C, torch.cat([z_11C for z_11C, _ in alone])):
            return False
    return True


def _close(found: Tensor, expected: Tensor) -> bool:
    near = max(NEAR, 4 * torch.finfo(expected.dtype).eps) * float(expected.abs().max())
    return bool(((found - expected).abs() <= near).all())


def _rotations(settings: Mapping[str, Any]) -> Iterator[str]:
    """The kinds of rotary positions that a configuration names, wherever it does."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _rotations(value)
        elif name in ("rope_type", "type") and isinstance(value, str):
            yield value
