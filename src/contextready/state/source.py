"""Training data for state tracking: new sequences at every step, and a validation that scores every length."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict

from torch import Tensor

from contextready.runs.config import RunConfig
from contextready.runs.metrics import Record
from contextready.state.score import Reader, StateScore, score_stream
from contextready.state.task import StateBatch, StateTask
from contextready.state.tokens import tokenizer_of, tokens_of

SOLVED_ON = 2000
"""Fresh sequences that decide whether the task is solved."""


class StateSource:
    """Draws new sequences at every step and scores the answers after each symbol."""

    def __init__(self, config: RunConfig) -> None:
        assert isinstance(config.task, StateTask)
        self.task, self.train, self.name = config.task, config.train, config.task.title
        self.tokens = tokens_of(config)
        self.folder, self.tokenizer_sha256 = tokenizer_of(config)
        about = json.dumps(asdict(self.task) | {"seed": config.train.seed}, sort_keys=True)
        self.identity = hashlib.sha256(about.encode()).hexdigest()

    def read(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Read rows of a batch. The whole batch is drawn, so it is the same for any number of processes."""
        t = self.train
        number, row = divmod(first, t.batch_size)
        length = self.task.length_at(number / (t.accumulate * t.steps))
        batch = self.tokens.of(self.task.batch("train", t.seed, number, t.batch_size, length))
        return batch.inputs_BT[row : row + count], batch.targets_BT[row : row + count]

    def score(self, model: Reader, step: int, share: tuple[int, int], thorough: bool) -> StateScore:
        """Score the model on fresh sequences; every validation draws its own."""
        t, (mine, all_of_them) = self.train, share
        sequences = SOLVED_ON
        if not thorough and t.eval_tokens is not None:
            sequences = max(all_of_them, t.eval_tokens // t.block_size)
        batch = self.tokens.of(self.task.batch("test", t.seed, 2 * step + thorough, sequences))
        rows = slice(mine, None, all_of_them)
        return score_stream(model, self.task, StateBatch(*(part[rows] for part in batch)))

    def summary(self, shares: Sequence[StateScore]) -> Record:
        """Summarize the loss, the accuracy at every length, and the longest length solved."""
        score = StateScore.joined(shares)
        return {
            "val_loss": score.loss,
            "accuracy": score.curve,
            "solved_length": score.solved,
            "solved": min(score.curve) >= self.task.until,
        }
