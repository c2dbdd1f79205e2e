"""How far back a windowed transformer can see, and how many answers of pointer chasing that allows.

The paper's bound: with N layers and a window of W, nothing before t - N·W can change the output at t. Its W leaves the
token itself out; `TransformerConfig.window` counts it, so a layer reaches back window - 1 positions.
"""

import numpy as np

from contextready.data.pointer import PointerTask


def reach(layers: int, window: int) -> int:
    """How many positions back N layers see, where a layer sees `window` positions, itself included."""
    return layers * (window - 1)


def best_accuracy(task: PointerTask, reached: int) -> list[float]:
    """The most that any function can get right at each level if it sees no further than `reached` positions back.

    For masked answers. A query of the base table asks for its own entry; the chain of a later one ends at each entry
    equally often. Where that entry's value is out of sight, nothing is left but to guess one of V values, since they
    are drawn independently of each other.
    """
    if task.answers != "masked":
        raise ValueError("With visible answers a query need not reach the base table.")
    levels_T = task.batch("train", 0, 0, 1).levels_T.numpy()
    value_positions_M = 3 * np.arange(task.keys)
    best = []
    for level in range(task.levels):
        asked_Q = np.flatnonzero(levels_T == level)
        seen = asked_Q - value_positions_M <= reached if level == 0 else asked_Q[:, None] - value_positions_M <= reached
        best.append(float(np.where(seen, 1.0, 1.0 / task.values).mean()))
    return best
