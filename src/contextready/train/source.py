"""The training and validation sequences of a run: prepared text, or a task that a higher-level package provides."""

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
    """Training sequences by their number, and a validation that is split over the processes."""

    @property
    def name(self) -> str:
        """The name of the source in messages."""

    @property
    def identity(self) -> str:
        """A text that identifies the source."""

    @property
    def folder(self) -> Path | None:
        """The folder with its tokenizer, if it has one."""

    @property
    def tokenizer_sha256(self) -> str | None:
        """The hash of that tokenizer."""

    def read(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of `count` sequences of the run, starting with number `first`.

        They have at most as many tokens as the settings say, all of them equally many.
        """

    def score(self, model: ContextReady, step: int, share: tuple[int, int], thorough: bool) -> Any:
        """Score this process's share (i of n) of the validation after a step; the last validation is `thorough`."""

    def summary(self, shares: Sequence[Any]) -> Record:
        """Combine all shares into a record with `val_loss` and, if the task can be solved, `solved`."""


def open_source(config: RunConfig, team: Team) -> Source:
    """Open and check the sequences that this run learns from. All processes must call this."""
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
                f"vocab_size={config.model.vocab_size} is too small for {t.data}, which has a vocabulary of "
                f"{self.data.vocab_size:,}; set it to {self.data.vocab_size} or more."
            )
        self.name, self.identity = str(self.data.folder), self.data.identity
        self.folder, self.tokenizer_sha256 = self.data.folder, self.data.tokenizer_sha256
        self.batches = Batches(self.data.tokens("train"), t.block_size, t.seed)
        self.validation = Sequences(self.data.tokens("val"), t.block_size, "validation")

    def read(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Return the next sequences of the shuffled text."""
        return self.batches.read(first, count)

    def score(self, model: ContextReady, step: int, share: tuple[int, int], thorough: bool) -> Score:
        """Score the same validation sequences every time, with the largest K, or token by token with gradient=bptt."""
        t = self.train
        count = None if t.eval_tokens is None else max(1, t.eval_tokens // t.block_size)
        if t.pass_schedule is None:
            return sequential_score(model, self.validation, count, share=share)
        most = t.pass_schedule.most
        return parallel_scores(model, self.validation, [most], count, share=share)[most]

    def summary(self, shares: Sequence[Score]) -> Record:
        """Return the loss and the perplexity."""
        score = Score.interleaved(shares)
        return {
            "val_loss": score.loss,
            "val_loss_error": score.loss_error,
            "val_perplexity": exp(min(score.loss, 700.0)),
        }
