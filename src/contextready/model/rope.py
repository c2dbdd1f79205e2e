"""Rotary positions: the angle by which each pair of a head's channels rotates at a position.

This file does not import torch, because exported models run without it: the formulas take arrays and tensors alike.
"""

from math import pi
from typing import Any

from contextready.model.config import TransformerConfig

PAIR_DIMS = {"geometric": -2, "integer": -1, "linear": -2, "llama3": -2}
"""The dimension of the two channels of a pair when a head's channels are viewed as pairs: halves or neighbours."""


def angles(config: TransformerConfig, positions: Any, even: Any) -> Any:
    """Return the angles in radians at these positions for the pairs of channels whose numbers, doubled, are `even`."""
    return positions * (even / 2) if config.rope == "integer" else positions / positions_per_radian(config, even)


def positions_per_radian(config: TransformerConfig, even: Any) -> Any:
    """Return how many positions each pair of channels needs to rotate by one radian."""
    positions = config.rope_base ** (even / config.head_size)
    if config.rope == "linear":
        return positions * config.rope_factor
    if config.rope == "llama3":
        turns = config.rope_length / (2 * pi * positions)
        kept = ((turns - config.rope_low) / (config.rope_high - config.rope_low)).clip(0.0, 1.0)
        return positions / (kept + (1.0 - kept) / config.rope_factor)
    return positions
