"""The arrays that the graphs of one engine read and write, and the memory that an engine takes.

Shape suffixes are those of `graph.py`; also G heads of keys and values, and D channels of all heads together.
"""

from dataclasses import dataclass

import numpy as np

from contextready.infer.ggml.config import ExportedConfig
from contextready.infer.ggml.tensors import FLOAT, Array
from contextready.model.correction import find_correction

NODES_PER_PLACE = 10
"""Nodes of a graph that every place adds to every layer."""
NODE_BYTES = 512
"""About how many bytes ggml needs to describe a node."""


@dataclass(frozen=True)
class Buffers:
    """Plain arrays that the graphs of one engine read and write. All but the keys and values belong to places."""

    tokens_P: Array
    """Input: token ids, int32."""
    slots_P: Array
    """Input: the slot for each place's new keys and values, int64."""
    inverse_angles_PE: Array
    """Input: reciprocals of the E/2 rotation angles, float32."""
    carried_PC: Array
    """What the last position passes on to the next one; read, then overwritten."""
    z_PC: Array
    """Output of the blocks; the same array as `carried_PC` if that is what is passed on."""
    attended_PD: Array
    """What the heads of a layer return; overwritten by every layer."""
    logits_PV: Array
    """Output."""
    kv: tuple[Array, ...]
    """Per layer (R, 2G, S, E): the rotated keys of all heads of keys and values, then the values."""

    @classmethod
    def empty(cls, config: ExportedConfig, rows: int, slots: int, places: int) -> "Buffers":
        """Create buffers for streams before their first token; the system allocates pages on the first write.

        Steps with the head have at most as many places as there are rows.
        """
        c = config
        carried_PC = np.zeros((places, c.width), np.float32)
        return cls(
            np.zeros(places, np.int32),
            np.zeros(places, np.int64),
            np.zeros((places, c.head_size // 2), np.float32),
            carried_PC,
            np.zeros((places, c.width), np.float32) if carries_residual(c) else carried_PC,
            np.zeros((places, c.heads * c.head_size), np.float32),
            np.zeros((rows, c.vocab_size), np.float32),
            kv=tuple(np.zeros((rows, 2 * c.shared_heads, slots, c.head_size), np.float32) for _ in range(c.layers)),
        )


def carries_residual(config: ExportedConfig) -> bool:
    """Whether a position passes on z minus the input of the blocks, instead of z."""
    return find_correction(config.correction).carries_residual


def state_bytes(config: ExportedConfig, rows: int, slots: int, places: int) -> int:
    """Bytes of memory for an engine: keys, values and logits of its rows, and masks and what describes a graph."""
    c = config
    row = FLOAT * 2 * c.layers * c.shared_heads * c.head_size * slots + FLOAT * c.vocab_size
    return rows * row + places * (FLOAT * slots + NODE_BYTES * NODES_PER_PLACE * (c.layers + 2))
