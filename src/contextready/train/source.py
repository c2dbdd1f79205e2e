"""What a run learns from and is measured on: prepared text, or a task that is made as it is needed."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from math import exp
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from contextready.analysis.levels import LevelScore, score_levels
from contextready.analysis.perplexity import Score, parallel_scores, sequential_score
from contextready.data.batches import Batches, Windows
from contextready.data.pointer import PointerBatch, PointerTask
from contextready.data.shards import SPLITS, Data
from contextready.errors import ContextReadyError
from contextready.model.build import ModelConfig
from contextready.model.context_ready import ContextReady
from contextready.model.transformer import Transformer
from contextready.train.config import RunConfig
from contextready.train.metrics import Record
from contextready.train.models import check_tokenizer
from contextready.train.team import Team

SOLVED_ON = 2000
"""Fresh sequences of pointer chasing on which a level counts as solved or not."""


class Source(Protocol):
    """Sequences to learn from, by number, and a validation that processes share."""

    @property
    def name(self) -> str:
        """What it is called in messages."""

    @property
    def identity(self) -> str:
        """What tells it apart from any other."""

    @property
    def folder(self) -> Path | None:
        """Where its tokenizer is, if it has one."""

    @property
    def tokenizer_sha256(self) -> str | None:
        """Which tokenizer that is."""

    def read(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the `count` sequences after the first `first` of the whole run."""

    def score(self, model: Transformer | ContextReady, step: int, share: tuple[int, int], thorough: bool) -> Any:
        """This process's share (i of n) of the validation after a step; `thorough` where it is to be the last."""

    def summary(self, shares: Sequence[Any]) -> Record:
        """What all shares together say: `val_loss` and more; `solved` where there is nothing left to learn."""


def open_source(config: RunConfig, team: Team) -> Source:
    """What this run learns from, checked. All processes call this."""
    if config.task is not None:
        return PointerSource(config.task, config)
    t = config.train
    team.let_first(lambda: Data(Path(t.data), SPLITS if t.verify_data else ()))
    return TextSource(config)


class TextSource:
    """Windows of prepared text."""

    def __init__(self, config: RunConfig) -> None:
        t = self.train = config.train
        self.data = Data(Path(t.data), verify=())
        self.data.tokenizer()
        check_tokenizer(config.model, self.data.tokenizer_sha256, self.data.folder)
        if isinstance(config.model, ModelConfig) and self.data.vocab_size > config.model.vocab_size:
            raise ContextReadyError(
                f"The data {t.data} has {self.data.vocab_size:,} kinds of tokens, more than "
                f"vocab_size={config.model.vocab_size}; raise it or use the data's own by leaving it out."
            )
        self.name, self.identity = str(self.data.folder), self.data.identity
        self.folder, self.tokenizer_sha256 = self.data.folder, self.data.tokenizer_sha256
        self.batches = Batches(self.data.row("train"), t.block_size, t.seed)
        self.validation = Windows(self.data.row("val"), t.block_size, "validation")

    def read(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """The next windows of the shuffled text."""
        return self.batches.read(first, count)

    def score(self, model: Transformer | ContextReady, step: int, share: tuple[int, int], thorough: bool) -> Score:
        """Validation windows at K passes, or streamed if training is; the same ones every time."""
        t = self.train
        windows = None if t.eval_tokens is None else max(1, t.eval_tokens // t.block_size)
        if t.passes is None:
            assert isinstance(model, ContextReady)
            return sequential_score(model, self.validation, windows, share=share)
        return parallel_scores(model, self.validation, [t.passes], windows, share=share)[t.passes]

    def summary(self, shares: Sequence[Score]) -> Record:
        """Loss and perplexity."""
        score = Score.interleaved(shares)
        return {
            "val_loss": score.loss,
            "val_loss_error": score.loss_error,
            "val_perplexity": exp(min(score.loss, 700.0)),
        }


class PointerSource:
    """Pointer chasing, drawn anew at every step."""

    folder: Path | None = None
    tokenizer_sha256: str | None = None

    def __init__(self, task: PointerTask, config: RunConfig) -> None:
        self.task, self.train = task, config.train
        self.name = "pointer chasing"
        about = json.dumps(asdict(task) | {"seed": config.train.seed}, sort_keys=True)
        self.identity = hashlib.sha256(about.encode()).hexdigest()

    def read(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Rows of a batch; a batch is drawn whole, so that it is the same for any number of processes."""
        t = self.train
        number, row = divmod(first, t.batch_size)
        batch = self.task.batch("train", t.seed, number, t.batch_size)
        return batch.inputs_BT[row : row + count], batch.targets_BT[row : row + count]

    def score(self, model: Transformer | ContextReady, step: int, share: tuple[int, int], thorough: bool) -> LevelScore:
        """The answers to fresh sequences: every validation has its own."""
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
        """Loss, the accuracy of each level, and how many levels are solved."""
        score = LevelScore.joined(shares)
        return {
            "val_loss": score.loss,
            "accuracy": score.accuracy,
            "levels_solved": score.solved,
            "solved": score.solved == self.task.levels,
        }
