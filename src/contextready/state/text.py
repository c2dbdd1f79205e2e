"""What training on a task costs a pretrained model in perplexity on text."""

from dataclasses import dataclass
from pathlib import Path

from contextready.data.batches import Sequences
from contextready.data.shards import Data
from contextready.errors import ContextReadyError
from contextready.files import read_json, write_json
from contextready.formats.record import Count, read_record
from contextready.measure.perplexity import parallel_scores
from contextready.model.context_ready import ContextReady
from contextready.runs.checkpoint import data_of, newest_checkpoint, open_checkpoint
from contextready.runs.config import PretrainedModelConfig
from contextready.runs.models import start_model
from contextready.state.tokens import longest_readable
from contextready.train.trials import settings_of

FILE = "text.json"
TOKENS = 1 << 13
LONGEST = 256
"""The number of tokens per sequence, or as many as the model can read."""
PASSES = 8
"""K, by which a context-ready model's perplexity on text has converged."""


@dataclass(frozen=True)
class OnText:
    """The perplexity of a run's model on the same validation text."""

    checkpoint: str
    tokens: Count
    before: float
    """Before it was trained on the task."""
    after: float


def measure_text(run: Path, folder: Path) -> OnText:
    """Score the last checkpoint of a run, and the model that it started from, unless its folder has the result."""
    newest, config = newest_checkpoint(run), settings_of(run)
    if newest is None or not isinstance(config.model, PretrainedModelConfig):
        raise ContextReadyError(f"{run} did not start from a pretrained model, so text= does not apply.")
    known = read_text(run)
    if known is not None and known.checkpoint == newest.name:
        return known
    checkpoint = open_checkpoint(newest)
    data = data_of(checkpoint, folder)
    sequences = Sequences(data.tokens("val"), min(LONGEST, longest_readable(config) or LONGEST), "validation")
    models = (start_model(config.model), checkpoint.model())
    before, after = (_perplexity(model, sequences) for model in models)
    found = OnText(newest.name, _count(sequences) * sequences.block_size, before, after)
    write_json(run / FILE, vars(found))
    return found


def read_text(run: Path) -> OnText | None:
    """Read the result, if there is one."""
    return read_record(OnText, read_json(run / FILE), str(run / FILE)) if (run / FILE).is_file() else None


def check_text(folder: Path) -> None:
    """Raise an error if there is no prepared text in this folder."""
    Data(folder, verify=())


def _count(sequences: Sequences) -> int:
    return min(sequences.count, max(1, TOKENS // sequences.block_size))


def _perplexity(model: ContextReady, sequences: Sequences) -> float:
    passes = PASSES if model.is_recurrent else 1
    return parallel_scores(model.eval(), sequences, [passes], _count(sequences))[passes].perplexity
