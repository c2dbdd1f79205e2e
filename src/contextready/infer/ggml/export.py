"""Exporting: a model as one file for the engine ggml, and its perplexity beside the original's."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from contextready.data.batches import Sequences
from contextready.data.tokenizer import Tokenizer
from contextready.errors import ContextReadyError
from contextready.infer.engine import Engine
from contextready.infer.ggml.engine import GgmlEngine
from contextready.infer.ggml.file import write_gguf
from contextready.infer.open import EXPORTED
from contextready.measure.perplexity import Score, parallel_scores, sequential_score
from contextready.runs.checkpoint import data_of, open_checkpoint

ROWS = 16
"""Sequences that the exported model is scored on at once."""


@dataclass(frozen=True)
class ExportReport:
    """What was written, and what was measured of it."""

    out: Path
    bytes: int
    type: str
    """Of the matrices."""
    tokens: int = 0
    """How many both were scored on."""
    exported: Score | None = None
    """Of the file; none if nothing was measured."""
    original: Score | None = None
    """Of the checkpoint, on the same tokens."""


def export(
    run: Path,
    out: Path,
    type: str = "f16",
    tokens: int = 4096,
    data_folder: Path | None = None,
    *,
    written: Callable[[ExportReport], None] = lambda report: None,
) -> ExportReport:
    """Write the file, then score it beside the original on about this many validation tokens; 0: do not.

    `written` is called when the file is there, before anything is measured.
    """
    if out.suffix != EXPORTED:
        raise ContextReadyError(f"{out} must end in {EXPORTED}, by which exported models are known.")
    if tokens < 0:
        raise ContextReadyError(f"--tokens {tokens} is no number of tokens; give 0 to measure nothing.")
    checkpoint = open_checkpoint(run)
    checkpoint.native_config  # noqa: B018  (refuses models that have no graph of their own)
    block_size = checkpoint.config["train"]["block_size"]
    sequences = None
    if tokens:
        # Data that is missing is told before anything is written.
        sequences = Sequences(data_of(checkpoint, data_folder).tokens("val"), block_size, "validation")
    model = checkpoint.model().eval()
    size = write_gguf(model, out, block_size, type, Tokenizer.load(checkpoint.folder))
    report = ExportReport(out, size, type)
    written(report)
    if sequences is None:
        return report
    count = max(1, min(sequences.count, tokens // block_size))
    if model.is_recurrent:
        original = sequential_score(model, sequences, count)
    else:
        original = parallel_scores(model, sequences, [1], count)[1]
    engine = GgmlEngine(out, rows=min(ROWS, count), capacity=block_size)
    exported = engine_score(engine, sequences, count)
    engine.close()
    return replace(report, tokens=count * block_size, exported=exported, original=original)


def engine_score(engine: Engine, sequences: Sequences, count: int) -> Score:
    """Score the first `count` sequences as an engine streams them, as many at once as it has rows."""
    losses: list[float] = []
    for first in range(0, count, engine.rows):
        indices = np.arange(first, min(first + engine.rows, count))
        inputs_BT, targets_BT = (ids.numpy() for ids in sequences.read(indices))
        losses_B = np.zeros(len(indices))
        for row in range(engine.rows):
            engine.load(row, None)
        for t in range(sequences.block_size):
            tokens = np.zeros(engine.rows, np.int64)
            tokens[: len(indices)] = inputs_BT[:, t]
            logits_BV = engine.step(tokens.tolist())[: len(indices)].astype(np.float64)
            largest_B1 = logits_BV.max(axis=1, keepdims=True)
            total_B = np.log(np.exp(logits_BV - largest_B1).sum(axis=1)) + largest_B1[:, 0]
            losses_B += total_B - logits_BV[np.arange(len(indices)), targets_BT[:, t]]
        losses += (losses_B / sequences.block_size).tolist()
    return Score(np.array(losses))
