"""Rotary positions in ggml: angles that keep their precision at any position."""

import numpy as np
import numpy.typing as npt

from contextready.infer.ggml.config import ExportedConfig
from contextready.model.rope import PAIR_DIMS, angles

MODES = {-2: 2, -1: 0}
"""ggml's modes for rotating the pairs (i, i + E/2), and the neighbours (2i, 2i + 1), by the dimension of a pair."""


def mode(config: ExportedConfig) -> int:
    """ggml's mode for the pairs that rotate together."""
    return MODES[PAIR_DIMS[config.rope]]


def frequencies(config: ExportedConfig) -> npt.NDArray[np.float64]:
    """The E/2 rotary frequencies, in radians per position."""
    frequencies_E: npt.NDArray[np.float64] = angles(config, 1.0, np.arange(0, config.head_size, 2, dtype=np.float64))
    return frequencies_E


def inverse_angles(frequencies_E: npt.NDArray[np.float64], position: int) -> npt.NDArray[np.float64]:
    """Reciprocals of a position's rotation angles, which are first reduced to between -π and π.

    ggml computes angles in float32, with an error of 0.006 rad at position 100,000. With base 1 and position 1 it uses
    the angle 1 / factor, so the factors carry the angle with full float32 precision.
    """
    angles_E = np.remainder(position * frequencies_E + np.pi, 2 * np.pi) - np.pi
    # The reciprocal of 0 would be infinite, and an angle of 1e-30 is just as good.
    angles_E[np.abs(angles_E) < 1e-30] = 1e-30
    return np.reciprocal(angles_E)
