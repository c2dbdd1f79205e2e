"""`crt export`: a model as one file for the engine ggml, and what its precision costs in perplexity."""

from pathlib import Path

import numpy as np

from contextready.analysis.console import data_of
from contextready.analysis.perplexity import Score, parallel_scores, sequential_score
from contextready.data.batches import Windows
from contextready.data.tokenizer import Tokenizer
from contextready.errors import ContextReadyError
from contextready.infer.engine import Engine
from contextready.infer.ggml_engine import GgmlEngine
from contextready.infer.gguf_file import write_gguf
from contextready.infer.opened import EXPORTED
from contextready.model.context_ready import ContextReady
from contextready.train.checkpoint import open_checkpoint

ROWS = 16
"""Windows that the exported model is scored on at once."""


def run_export(run: Path, out: Path, kind: str, tokens: int, data_folder: Path | None) -> None:
    """Write the file, then score it beside the original on this many validation tokens; 0: do not."""
    if out.suffix != EXPORTED:
        raise ContextReadyError(f"{out} must end in {EXPORTED}, by which exported models are known.")
    if tokens < 0:
        raise ContextReadyError(f"--tokens {tokens} is no number of tokens; give 0 to measure nothing.")
    checkpoint = open_checkpoint(run)
    checkpoint.native_config  # noqa: B018  (refuses models that have no graph of their own)
    block_size = checkpoint.config["train"]["block_size"]
    # Data that is missing is told before anything is written.
    windows = Windows(data_of(checkpoint, data_folder).row("val"), block_size, "validation") if tokens else None
    model = checkpoint.model().eval()
    size = write_gguf(model, out, block_size, kind, Tokenizer.load(checkpoint.folder))
    print(f"Wrote {out}: {size / 1e6:.1f} MB, matrices in {kind}. Next: crt generate {out} 'Once upon a time'")
    if windows is None:
        return
    count = max(1, min(windows.count, tokens // block_size))
    if isinstance(model, ContextReady):
        original = sequential_score(model, windows, count)
    else:
        original = parallel_scores(model, windows, [1], count)[1]
    engine = GgmlEngine(out, rows=min(ROWS, count), capacity=block_size)
    exported = engine_score(engine, windows, count)
    engine.close()
    cost, error = exported.perplexity_above(original)
    share = 100 * cost / original.perplexity
    print(
        f"Perplexity on {count * block_size:,} validation tokens: {exported.perplexity:.3f}, the original's "
        f"{original.perplexity:.3f}; {kind} costs {cost:+.4f} ± {error:.4f} ({share:+.3f} %)."
    )


def engine_score(engine: Engine, windows: Windows, count: int) -> Score:
    """Score the first `count` windows as an engine streams them, as many at once as it has rows."""
    found: list[float] = []
    for first in range(0, count, engine.rows):
        indices = np.arange(first, min(first + engine.rows, count))
        inputs_BT, targets_BT = (ids.numpy() for ids in windows.read(indices))
        losses_B = np.zeros(len(indices))
        for row in range(engine.rows):
            engine.load(row, None)
        for t in range(windows.block_size):
            tokens = np.zeros(engine.rows, np.int64)
            tokens[: len(indices)] = inputs_BT[:, t]
            logits_BV = engine.step(tokens.tolist())[: len(indices)].astype(np.float64)
            largest_B1 = logits_BV.max(axis=1, keepdims=True)
            total_B = np.log(np.exp(logits_BV - largest_B1).sum(axis=1)) + largest_B1[:, 0]
            losses_B += total_B - logits_BV[np.arange(len(indices)), targets_BT[:, t]]
        found += (losses_B / windows.block_size).tolist()
    return Score(np.array(found))
