"""The learning rate and K as functions of the step, so that a resumed run repeats them exactly."""

from math import cos, pi

import numpy as np

from contextready.runs.config import TrainConfig

DEPTH_SEED = 0x4B


def learning_rate(train: TrainConfig, step: int) -> float:
    """Return the learning rate of `step`, counted from 0: linear warmup, then constant or cosine."""
    if step < train.warmup:
        return train.lr * (step + 1) / train.warmup
    if train.schedule == "constant":
        return train.lr
    done = min(1.0, (step - train.warmup) / max(1, train.steps - train.warmup))
    return train.lr * (train.min_lr + (1.0 - train.min_lr) * 0.5 * (1.0 + cos(pi * done)))


def passes_of_step(train: TrainConfig, step: int) -> int | None:
    """Return K of `step`, drawn uniformly from the range of its stage, depending only on seed and step."""
    if train.pass_schedule is None:
        return None
    stage = train.pass_schedule.stage(step, train.steps)
    draw = np.random.default_rng((train.seed, step, DEPTH_SEED))
    return int(draw.integers(stage.least, stage.most, endpoint=True))
