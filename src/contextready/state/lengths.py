"""How a finished run does at lengths beyond those that it was trained on: measured once, and kept in its folder."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from contextready.errors import ContextReadyError
from contextready.files import read_json, write_json
from contextready.formats.record import Count, read_record
from contextready.measure.bounds import receptive_field
from contextready.model.config import ModelConfig
from contextready.model.context_ready import ContextReady
from contextready.runs.checkpoint import open_checkpoint
from contextready.runs.config import RunConfig
from contextready.runs.metrics import read_metrics
from contextready.state.control import WEIGHTS, load_control
from contextready.state.score import Reader, StateScore, best_score, score_passes, score_stream
from contextready.state.task import StateBatch, StateTask
from contextready.state.tokens import longest_readable, tokens_of
from contextready.train.trials import settings_of

FILE = "lengths.json"
FACTORS = (1, 2, 4, 8)
"""The lengths of the test, as multiples of the length in training."""
TESTED_ON, TESTED_ON_IF_PRETRAINED = 1000, 200
"""Fresh sequences of the test; fewer for pretrained models, which are large and slow."""
PASSES_ON = 200
"""How many of them are also read in parallel passes."""
TEST_STEP = 10**9
"""The step that names the sequences of the test, beyond those of every validation."""
PASSES, PASSES_IF_PRETRAINED = (2, 4, 8, 16, 32), (2, 4, 8)


@dataclass(frozen=True)
class Lengths:
    """The accuracy of a run at several lengths."""

    step: Count
    """The step of the checkpoint."""
    lengths: list[int]
    accuracy: list[float]
    """The accuracy at each of these lengths, streamed."""
    solved: Count
    """The longest length solved, of the longest one that was tested."""
    curve: list[float]
    """The accuracy at every length."""
    passes: dict[str, list[float]]
    """The same as `accuracy`, after numbers of parallel passes; empty for models without a correction."""
    chance: float
    """The best accuracy of a guess that sees none of the symbols, at the longest length."""
    best: list[float] | None = None
    """The best possible accuracy at each length for a transformer with this window; none if it sees everything."""
    best_passes: dict[str, list[float]] = field(default_factory=dict)
    """The same for numbers of parallel passes of a model with a window."""


def measure(run: Path, factors: Sequence[int] = FACTORS) -> Lengths:
    """Test the last checkpoint of a run, unless its folder has the result."""
    config, is_control = settings_of(run), (run / WEIGHTS).exists()
    checkpoint = None if is_control else open_checkpoint(run)
    step = read_metrics(run)[-1]["step"] if checkpoint is None else checkpoint.progress.step
    task = config.task
    if not isinstance(task, StateTask):
        raise ContextReadyError(f"{run} was not trained on state tracking.")
    lengths = readable_lengths(config, factors)
    known = read_lengths(run)
    if known is not None and known.step == step and known.lengths == lengths:
        return known
    model: Reader = load_control(run, config) if checkpoint is None else checkpoint.model()
    is_native = isinstance(config.model, ModelConfig)
    rows = TESTED_ON if is_native else TESTED_ON_IF_PRETRAINED
    batch = tokens_of(config).of(task.batch("test", config.train.seed, TEST_STEP, rows, lengths[-1]))
    score = score_stream(model, task, batch)
    by_passes: dict[str, list[float]] = {}
    is_recurrent = checkpoint is None or (isinstance(model, ContextReady) and model.is_recurrent)
    if isinstance(model, ContextReady) and is_recurrent:
        fewer = StateBatch(*(part[:PASSES_ON] for part in batch))
        found = score_passes(model, task, fewer, PASSES if is_native else PASSES_IF_PRETRAINED)
        by_passes = {str(k): _rounded(score, lengths) for k, score in found.items()}
    curve = [round(accuracy, 4) for accuracy in score.curve]
    result = Lengths(
        step,
        lengths,
        _rounded(score, lengths),
        score.solved,
        curve,
        by_passes,
        task.guess(lengths[-1]),
        None if is_recurrent else _best(config, batch, lengths, 1),
        {k: best for k in by_passes if (best := _best(config, batch, lengths, int(k))) is not None},
    )
    write_json(run / FILE, vars(result))
    return result


def readable_lengths(config: RunConfig, factors: Sequence[int]) -> list[int]:
    """Return the lengths of the test, without those that a pretrained model cannot read."""
    task, most = config.task, longest_readable(config)
    assert isinstance(task, StateTask)
    lengths = [factor * task.length for factor in factors]
    return [n for n in lengths if most is None or 1 + n * task.words_per_symbol <= most]


def read_lengths(run: Path) -> Lengths | None:
    """Read the result of a run's test, if there is one."""
    if not (run / FILE).is_file():
        return None
    return read_record(Lengths, read_json(run / FILE), str(run / FILE))


def _best(config: RunConfig, batch: StateBatch, lengths: Sequence[int], passes: int) -> list[float] | None:
    """Return the best possible accuracy of parallel passes at each length, or None if they see everything."""
    task, model = config.task, config.model
    assert isinstance(task, StateTask)
    if not isinstance(model, ModelConfig) or model.window is None:
        return None
    return _rounded(best_score(task, batch, receptive_field(model.layers, model.window, passes)), lengths)


def _rounded(score: StateScore, lengths: Sequence[int]) -> list[float]:
    return [round(score.accuracy(n), 4) for n in lengths]
