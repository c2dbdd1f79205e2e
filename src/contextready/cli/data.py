"""`crt data`: prepare with a progress bar, and show what was prepared."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from contextready.cli.console import make_console
from contextready.cli.options import Verbs, verb
from contextready.errors import ContextReadyError

if TYPE_CHECKING:
    from contextready.data.prepare import Preparation
    from contextready.data.shards import Data


def add(verbs: Verbs) -> None:
    """Describe `crt data`."""
    data = verb(verbs, "data", "prepare token shards from text", "Turn text into token shards, and look at them.")
    subverbs = data.add_subparsers(dest="what", required=True, metavar="prepare|show")
    _add_prepare(subverbs)
    _add_show(subverbs)


def _add_prepare(subverbs: Verbs) -> None:
    prepare = verb(
        subverbs,
        "prepare",
        "text in, token shards out",
        "Tokenise documents into memory-mapped shards with a manifest. The folder appears when\nall is done.",
        "examples:\n"
        "  crt data prepare data/mini default --vocab-size 4096\n"
        "  crt data prepare data/mine texts/ 'more/*.jsonl.zst' --vocab-size 16000\n"
        "  crt data prepare data/owt32k openwebtext --vocab-size 32000\n"
        "  crt data prepare data/nano train.bin --val val.bin --end-id 50256 --vocab-size 50257",
    )
    prepare.add_argument("out", type=Path, help="folder to make")
    prepare.add_argument(
        "sources",
        nargs="+",
        help="files (.txt .jsonl .jsonl.gz .jsonl.zst .parquet, or token files .bin), folders, globs, or one corpus: "
        "default, sotu, stdlib, openwebtext, wikipedia",
    )
    prepare.add_argument("--val", nargs="+", default=[], metavar="SOURCE", help="validation documents of their own")
    prepare.add_argument(
        "--val-fraction", type=float, default=0.005, help="else: part of the documents, by hash (default: 0.005)"
    )
    prepare.add_argument("--vocab-size", type=int, help="train a byte-level BPE of this size")
    prepare.add_argument("--tokenizer", help="use this tokenizer.json, or the one in this folder")
    prepare.add_argument("--end-token", help="the token that ends documents, if the tokenizer does not say")
    prepare.add_argument("--end-id", type=int, help="its id, for token files without a tokenizer")
    prepare.add_argument("--field", default="text", help="where the text is in .jsonl and .parquet (default: text)")
    prepare.add_argument("--shard-tokens", type=int, default=100_000_000, help="tokens a shard (default: 100000000)")
    prepare.add_argument(
        "--tokenizer-bytes", type=int, default=1_000_000_000, help="text to train the BPE on, about (default: 1 GB)"
    )
    prepare.set_defaults(run=_run_prepare)


def _add_show(subverbs: Verbs) -> None:
    show = verb(subverbs, "show", "decode samples", "Print stretches of prepared data as text.")
    show.add_argument("data", type=Path, help="folder of prepared data")
    show.add_argument("--split", choices=["train", "val"], default="train", help="which part (default: train)")
    show.add_argument("--count", type=int, default=3, help="how many stretches (default: 3)")
    show.add_argument("--tokens", type=int, default=64, help="tokens in each (default: 64)")
    show.add_argument("--seed", type=int, default=0, help="which ones (default: 0)")
    show.set_defaults(run=_run_show)


def _run_prepare(options: argparse.Namespace) -> None:
    from contextready.data.prepare import Preparation

    run_prepare(
        options.out,
        Preparation(
            sources=options.sources,
            val_sources=options.val,
            val_fraction=options.val_fraction,
            vocab_size=options.vocab_size,
            tokenizer=options.tokenizer,
            end_token=options.end_token,
            end_id=options.end_id,
            field=options.field,
            shard_tokens=options.shard_tokens,
            tokenizer_bytes=options.tokenizer_bytes,
        ),
    )


def _run_show(options: argparse.Namespace) -> None:
    show(options.data, options.split, options.count, options.tokens, options.seed)


def run_prepare(out: Path, what: "Preparation") -> "Data":
    """Prepare, showing how much is read, how fast, and how long it will take; then say what came out."""
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TaskID,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    from contextready.data.prepare import prepare

    console = make_console()
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    tasks: dict[str, TaskID] = {}

    def report(label: str, size: int | None, done: int) -> None:
        if label not in tasks:
            tasks[label] = bar.add_task(label, total=size)
        bar.advance(tasks[label], done)

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
    import numpy as np

    from contextready.data.shards import Data

    if count < 1 or tokens < 1 or seed < 0:
        raise ContextReadyError("--count and --tokens must be at least 1, and --seed at least 0.")
    data = Data(folder, verify=[split])
    held, tokenizer = data.tokens(split), data.tokenizer()
    counts = data.manifest["splits"][split]
    print(f"{folder} from {data.manifest['source']}, vocabulary {data.vocab_size:,}")
    print(f"{split}: {counts['tokens']:,} tokens, {counts['documents']:,} documents")
    starts = np.random.default_rng(seed).integers(max(1, len(held) - tokens), size=count)
    for start in sorted(int(s) for s in starts):
        ids = held.read(start, min(tokens, len(held) - start)).tolist()
        print(f"\n— token {start:,} —")
        print(" ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids))
