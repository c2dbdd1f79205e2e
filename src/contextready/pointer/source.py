"""Training data for pointer chasing: new sequences at every step, and a validation that scores each level."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from torch import Tensor

from contextready.model.context_ready import ContextReady
from contextready.pointer.score import LevelScore, score_levels
from contextready.pointer.task import PointerBatch, PointerTask
from contextready.runs.config import RunConfig
from contextready.runs.metrics import Record

SOLVED_ON = 2000
"""Fresh sequences that decide whether a level is solved."""


class PointerSource:
    """Draws new sequences at every step and scores the answers of each level."""

    folder: Path | None = None
    tokenizer_sha256: str | None = None

    def __init__(self, config: RunConfig) -> None:
        assert isinstance(config.task, PointerTask)
        self.task, self.train, self.name = config.task, config.train, config.task.title
        about = json.dumps(asdict(self.task) | {"seed": config.train.seed}, sort_keys=True)
        self.identity = hashlib.sha256(about.encode()).hexdigest()

    def read(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Read rows of a batch. The whole batch is drawn, so it is the same for any number of processes."""
        t = self.train
        number, row = divmod(first, t.batch_size)
        batch = self.task.batch("train", t.seed, number, t.batch_size)
        return batch.inputs_BT[row : row + count], batch.targets_BT[row : row + count]

    def score(self, model: ContextReady, step: int, share: tuple[int, int], thorough: bool) -> LevelScore:
        """Score the model on fresh sequences; every validation draws its own."""
        t, (mine, all_of_them) = self.train, share
        sequences = SOLVED_ON
        if not thorough and t.eval_tokens is not None:
            sequences = max(all_of_them, t.eval_tokens // t.block_size)
        batch = self.task.batch("test", t.seed, 2 * step + thorough, sequences)
        rows = slice(mine, None, all_of_them)
        return score_levels(
            model, self.task, PointerBatch(batch.inputs_BT[rows], batch.targets_BT[rows], batch.levels_T)
        )

    def summary(self, shares: Sequence[LevelScore]) -> Record:
        """Summarize the loss, the accuracy of each level, and the number of levels solved."""
        score = LevelScore.joined(shares)
        return {
            "val_loss": score.loss,
            "accuracy": score.accuracy,
            "levels_solved": score.solved,
            "solved": score.solved == self.task.levels,
        }
