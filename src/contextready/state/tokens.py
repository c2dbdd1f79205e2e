"""The tokens of a task's words: their numbers, or those of a pretrained model's own vocabulary."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from contextready.data.shards import IGNORED
from contextready.data.tokenizer import FILE
from contextready.errors import ContextReadyError
from contextready.runs.config import PretrainedModelConfig, RunConfig
from contextready.runs.models import hugging_face
from contextready.state.task import StateBatch, StateTask


@dataclass(frozen=True)
class Tokens:
    """Maps the numbers of words to the ids that a model knows; None keeps them."""

    ids_V: Tensor | None = None

    def of(self, batch: StateBatch) -> StateBatch:
        """Return a batch in the model's ids."""
        if self.ids_V is None:
            return batch
        asked_BT = batch.targets_BT != IGNORED
        targets_BT = torch.where(asked_BT, self.ids_V[batch.targets_BT.clamp(min=0)], IGNORED)
        return batch._replace(inputs_BT=self.ids_V[batch.inputs_BT], targets_BT=targets_BT)


def tokens_of(config: RunConfig) -> Tokens:
    """Return the tokens of a run's task, checked against the vocabulary and the length of a pretrained model."""
    task, model = config.task, config.model
    assert isinstance(task, StateTask)
    if not isinstance(model, PretrainedModelConfig):
        return Tokens()
    library = hugging_face()
    check_length(config, task.tokens)
    ids = [*library.word_ids(model.pretrained, task.words), library.begin_id(model.pretrained)]
    return Tokens(torch.tensor(ids))


def tokenizer_of(config: RunConfig) -> tuple[Path | None, str | None]:
    """Return the folder and the hash of a pretrained model's tokenizer, for the checkpoints of a run."""
    if not isinstance(config.model, PretrainedModelConfig):
        return None, None
    folder, tokenizer = Path(config.model.pretrained), hugging_face().native_tokenizer(config.model.pretrained)
    has_file = (folder / FILE).is_file()
    return folder if has_file else None, tokenizer.sha256 if has_file and tokenizer is not None else None


def check_length(config: RunConfig, tokens: int) -> None:
    """Raise an error if sequences are longer than a pretrained model can read."""
    most = longest_readable(config)
    if most is not None and tokens > most:
        assert isinstance(config.model, PretrainedModelConfig)
        raise ContextReadyError(
            f"Sequences of this task have {tokens:,} tokens, but {config.model.pretrained} can read only {most:,}; "
            "lower length."
        )


def longest_readable(config: RunConfig) -> int | None:
    """Return how many tokens a pretrained model can read; native models have no limit."""
    if not isinstance(config.model, PretrainedModelConfig):
        return None
    most: int | None = hugging_face().longest_text(config.model.pretrained)
    return most
