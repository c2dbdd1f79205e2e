"""Exports a model as one file for the ggml engine, and compares its perplexity with the original's."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from contextready.data.batches import Sequences
from contextready.data.shards import IGNORED
from contextready.data.tokenizer import FILE as TOKENIZER_FILE
from contextready.errors import ContextReadyError
from contextready.extras import require
from contextready.infer.engine import EXPORTED, Engine
from contextready.infer.ggml.engine import GgmlEngine
from contextready.infer.ggml.file import check_absent, read_gguf, write_gguf
from contextready.infer.ggml.quantize import BLOCKS, check_type
from contextready.measure.perplexity import Score, parallel_scores, sequential_score
from contextready.runs.checkpoint import data_of, open_trained
from contextready.runs.models import native_backbone_of

ROWS = 16
"""Sequences on which the exported model is scored at once."""

Advance = Callable[[str, int | None, int], None]
"""Progress callback: the stage, its total, and how much more is done."""


def _no_progress(stage: str, total: int | None, done: int) -> None:
    """Ignore progress."""


@dataclass(frozen=True)
class ExportReport:
    """What was written, and the perplexities measured."""

    out: Path
    bytes: int
    type: str
    """The requested type of the matrices."""
    matrices: int
    in_f16: int
    """How many of them are in f16 instead, because their rows are not whole blocks of the requested type."""
    tokens: int = 0
    """Number of tokens on which both models were scored."""
    exported: Score | None = None
    """Score of the file; None if nothing was measured."""
    original: Score | None = None
    """Score of the checkpoint on the same tokens."""

    @property
    def cost(self) -> tuple[float, float] | None:
        """How much the precision raises the perplexity, and the standard error; None if nothing was measured."""
        if self.original is None or self.exported is None:
            return None
        return self.exported.perplexity_above(self.original)

    def as_record(self) -> dict[str, Any]:
        """Plain values for JSON."""
        cost, error = self.cost or (None, None)
        return {
            "out": str(self.out),
            "bytes": self.bytes,
            "type": self.type,
            "matrices": self.matrices,
            "in_f16": self.in_f16,
            "tokens": self.tokens,
            "perplexity": None if self.exported is None else self.exported.perplexity,
            "original_perplexity": None if self.original is None else self.original.perplexity,
            "perplexity_cost": cost,
            "perplexity_cost_error": error,
        }


class Export:
    """One export: creating it checks the request, `write` writes the file, and `measure` scores it.

    run         a run (its newest checkpoint is exported), a checkpoint, or a Hugging Face folder that runs natively
    out         the file to write, with the extension .gguf
    type        type of the matrices: f32, f16, q8_0, q4_0 or q4_k
    tokens      about how many validation tokens to measure on; 0 measures nothing
    data        prepared data to measure on (default: the data that the model was trained on)
    overwrite   whether an existing file may be replaced
    """

    def __init__(
        self,
        run: Path,
        out: Path,
        type: str = "f16",
        tokens: int = 4096,
        data: Path | None = None,
        *,
        overwrite: bool = False,
    ) -> None:
        _check_out(out, overwrite)
        check_type(type)
        if tokens < 0:
            raise ContextReadyError(f"--tokens must be at least 0 (0 measures nothing), but got {tokens}.")
        checkpoint = open_trained(run)
        checkpoint.must_have_learned_text()
        self.out, self.type, self.overwrite = out, type, overwrite
        self.trained_length, self.block_size = checkpoint.trained_length, checkpoint.config["train"]["block_size"]
        # Token files may come without a tokenizer.
        has_tokenizer = (checkpoint.folder / TOKENIZER_FILE).is_file()
        self.tokenizer = checkpoint.tokenizer() if has_tokenizer else None
        self.sequences: Sequences | None = None
        self.count = 0
        if tokens:
            # Missing data or packages are reported before anything is written.
            require("ggml", "ggml")
            if data is None and not checkpoint.config["train"]["data"]:
                raise ContextReadyError(
                    f"{run} does not record its training data, which would show what the precision costs in "
                    "perplexity; pass --data FOLDER, or --tokens 0 to skip measuring."
                )
            self.sequences = Sequences(data_of(checkpoint, data).tokens("val"), self.block_size, "validation")
            self.count = max(1, min(self.sequences.count, tokens // self.block_size))
        self.model = checkpoint.model().eval()
        native_backbone_of(self.model, run)

    def write(self, advance: Advance = _no_progress) -> ExportReport:
        """Write the file; `advance` counts bytes."""
        size = write_gguf(
            self.model,
            self.out,
            self.trained_length,
            self.type,
            self.tokenizer,
            overwrite=self.overwrite,
            advance=lambda total, done: advance(f"Writing {self.out.name}", total, done),
        )
        types = [weight.type for weight in read_gguf(self.out).weights.values() if len(weight.shape) == 2]
        return ExportReport(self.out, size, self.type, len(types), types.count("f16") if self.type in BLOCKS else 0)

    def measure(self, report: ExportReport, advance: Advance = _no_progress) -> ExportReport:
        """Score the original and the file on the same sequences and complete the report; `advance` counts tokens."""
        if self.sequences is None:
            return report
        total = self.count * self.block_size

        def scored(tokens: int) -> None:
            advance("Scoring the original", total, tokens)

        if self.model.is_recurrent:
            original = sequential_score(self.model, self.sequences, self.count, scored)
        else:
            original = parallel_scores(self.model, self.sequences, [1], self.count, scored)[1]
        with closing(GgmlEngine(self.out, rows=min(ROWS, self.count), capacity=self.block_size)) as engine:
            exported = engine_score(
                engine,
                self.sequences,
                self.count,
                lambda tokens: advance(f"Scoring {self.out.name}", total, tokens),
            )
        return replace(report, tokens=total, exported=exported, original=original)


def _check_out(out: Path, overwrite: bool) -> None:
    if out.suffix != EXPORTED:
        raise ContextReadyError(f"{out} must have the extension {EXPORTED}, which marks exported models.")
    if out.is_dir():
        raise ContextReadyError(f"{out} is a folder; choose another name.")
    check_absent(out, overwrite)


def engine_score(
    engine: Engine, sequences: Sequences, count: int, advance: Callable[[int], None] = lambda _: None
) -> Score:
    """Score the first `count` sequences as the engine streams them, one sequence per row at a time."""
    losses: list[float] = []
    counts: list[int] = []
    for first in range(0, count, engine.rows):
        indices = np.arange(first, min(first + engine.rows, count))
        inputs_BT, targets_BT = (ids.numpy() for ids in sequences.read(indices))
        counted_BT = targets_BT != IGNORED
        losses_B = np.zeros(len(indices))
        rows = range(len(indices))
        for row in rows:
            engine.free(row)
        for t in range(sequences.block_size):
            logits_BV = engine.step(inputs_BT[:, t].tolist(), rows).astype(np.float64)
            largest_B1 = logits_BV.max(axis=1, keepdims=True)
            total_B = np.log(np.exp(logits_BV - largest_B1).sum(axis=1)) + largest_B1[:, 0]
            # Targets that do not count are not ids, so id 0 stands in for them.
            chosen_B = logits_BV[np.arange(len(indices)), np.maximum(0, targets_BT[:, t])]
            losses_B += counted_BT[:, t] * (total_B - chosen_B)
            advance(len(indices))
        losses += (losses_B / np.maximum(1, counted_BT.sum(axis=1))).tolist()
        counts += counted_BT.sum(axis=1).tolist()
    masked = sequences.tokens.counted is not None
    return Score(np.array(losses), np.array(counts, float) if masked else None)
