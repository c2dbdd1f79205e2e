"""`crt data`: prepare with a progress bar, and show what was prepared."""

from pathlib import Path

import numpy as np

from contextready.data.prepare import Preparation, prepare
from contextready.data.shards import Data
from contextready.errors import ContextReadyError


def run_prepare(out: Path, what: Preparation) -> Data:
    """Prepare, showing how much is read, how fast, and how long it will take; then say what came out."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(highlight=False, markup=False, soft_wrap=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    tasks: dict[str, int] = {}

    def report(label: str, size: int | None, done: int) -> None:
        if label not in tasks:
            tasks[label] = bar.add_task(label, total=size)
        bar.advance(tasks[label], done)  # type: ignore[arg-type]

    with bar:
        data = prepare(out, what, report)
    console.print(f"{out}: vocabulary {data.vocab_size:,}, {data.dtype.name}")
    for split, counts in data.manifest["splits"].items():
        per_token = data.bytes_per_token(split)
        ratio = "" if per_token is None else f", {per_token:.2f} bytes a token"
        console.print(
            f"  {split:<5} {counts['tokens']:>13,} tokens, {counts['documents']:,} documents, "
            f"{len(counts['shards'])} shard{'s' * (len(counts['shards']) > 1)}{ratio}"
        )
    return data


def show(folder: Path, split: str, count: int, tokens: int, seed: int) -> None:
    """Print the manifest's figures and some stretches of the split as text (or ids, without a tokenizer)."""
    if count < 1 or tokens < 1 or seed < 0:
        raise ContextReadyError("--count and --tokens must be at least 1, and --seed at least 0.")
    data = Data(folder, verify=[split])
    row, tokenizer = data.row(split), data.tokenizer()
    counts = data.manifest["splits"][split]
    print(f"{folder} from {data.manifest['source']}, vocabulary {data.vocab_size:,}")
    print(f"{split}: {counts['tokens']:,} tokens, {counts['documents']:,} documents")
    starts = np.random.default_rng(seed).integers(max(1, len(row) - tokens), size=count)
    for start in sorted(int(s) for s in starts):
        ids = row.read(start, min(tokens, len(row) - start)).tolist()
        print(f"\n— token {start:,} —")
        print(" ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids))
