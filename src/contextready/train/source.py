"""What a run learns from and is measured on: prepared text, or a task that a room above provides."""

from collections.abc import Sequence
from math import exp
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from contextready import registry
from contextready.data.batches import Batches, Sequences
from contextready.data.shards import SPLITS, Data
from contextready.errors import ContextReadyError
from contextready.measure.perplexity import Score, parallel_scores, sequential_score
from contextready.model.config import ModelConfig
from contextready.model.context_ready import ContextReady
from contextready.runs.config import RunConfig
from contextready.runs.metrics import Record
from contextready.runs.models import check_tokenizer
from contextready.train.team import Team


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

    def score(self, model: ContextReady, step: int, share: tuple[int, int], thorough: bool) -> Any:
        """This process's share (i of n) of the validation after a step; `thorough` where it is to be the last."""

    def summary(self, shares: Sequence[Any]) -> Record:
        """What all shares together say: `val_loss` and more; `solved` where there is nothing left to learn."""


def open_source(config: RunConfig, team: Team) -> Source:
    """What this run learns from, checked. All processes call this."""
    if config.task is not None:
        source: Source = registry.provider("task", config.task.name).open_source(config)
        return source
    t = config.train
    team.let_first(lambda: Data(Path(t.data), SPLITS if t.verify_data else ()))
    return TextSource(config)


class TextSource:
    """Sequences of prepared text."""

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
        self.batches = Batches(self.data.tokens("train"), t.block_size, t.seed)
        self.validation = Sequences(self.data.tokens("val"), t.block_size, "validation")

    def read(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """The next sequences of the shuffled text."""
        return self.batches.read(first, count)

    def score(self, model: ContextReady, step: int, share: tuple[int, int], thorough: bool) -> Score:
        """Validation sequences at K passes, or streamed if training is; the same ones every time."""
        t = self.train
        count = None if t.eval_tokens is None else max(1, t.eval_tokens // t.block_size)
        if t.passes is None:
            return sequential_score(model, self.validation, count, share=share)
        return parallel_scores(model, self.validation, [t.passes], count, share=share)[t.passes]

    def summary(self, shares: Sequence[Score]) -> Record:
        """Loss and perplexity."""
        score = Score.interleaved(shares)
        return {
            "val_loss": score.loss,
            "val_loss_error": score.loss_error,
            "val_perplexity": exp(min(score.loss, 700.0)),
        }
