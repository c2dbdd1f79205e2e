"""`crt data prepare`: documents in, token shards out, all or nothing."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from contextready.data.corpora import Corpus, expand, open_corpus
from contextready.data.shards import FORMAT, Data, Ids, ShardWriter
from contextready.data.token_files import read_token_file
from contextready.data.tokenizer import Tokenizer
from contextready.errors import ContextReadyError
from contextready.files import locked, staged_folder, write_manifest

BATCH_CHARACTERS = 1 << 21
BATCH_DOCUMENTS = 4096

Report = Callable[[str, int | None, int], None]
"""Called with what is going on, the size of it in bytes if known, and the bytes done since the last call."""


@dataclass(frozen=True)
class Preparation:
    """What to prepare."""

    sources: list[str]
    """Files (text in several formats, or .bin token files), folders, globs, or the name of one corpus."""
    val_sources: list[str]
    """Sources of the validation split; empty: a part of `sources`."""
    val_fraction: float = 0.005
    """Which part of the documents validates, chosen by a hash of each document."""
    vocab_size: int | None = None
    """Size of the tokenizer to train."""
    tokenizer: str | None = None
    """A tokenizer to use instead: tokenizer.json, or a folder with one."""
    end_token: str | None = None
    """Name of the token that ends documents, if the tokenizer does not say."""
    end_id: int | None = None
    """Id of the token that ends documents, for token files that come without their tokenizer."""
    field: str = "text"
    """Where the text is in .jsonl and .parquet."""
    shard_tokens: int = 100_000_000
    """Tokens in a shard."""
    tokenizer_bytes: int = 1_000_000_000
    """The tokenizer is trained on about this much text, or all of it."""


def prepare(out: Path, what: Preparation, report: Report = lambda *_: None) -> Data:
    """Write the folder `out`: a complete set of shards, or nothing at all."""
    _check(what)
    if out.exists():
        raise ContextReadyError(f"{out} exists already; choose another folder or remove it first.")
    with locked(out.with_name(f".{out.name}.lock"), f"preparing {out}"):
        if all(source.endswith(".bin") for source in what.sources):
            _prepare_token_files(out, what, report)
        else:
            _prepare_text(out, what, report)
    return Data(out, verify=())


def _check(what: Preparation) -> None:
    if not 0.0 < what.val_fraction < 1.0:
        raise ContextReadyError(f"--val-fraction {what.val_fraction} is no part; give a number between 0 and 1.")
    if what.shard_tokens < 1 or what.tokenizer_bytes < 1:
        raise ContextReadyError("--shard-tokens and --tokenizer-bytes must be at least 1.")
    if what.tokenizer is not None and what.vocab_size is not None:
        raise ContextReadyError("--vocab-size and --tokenizer exclude each other: a tokenizer has its own size.")
    bins = [source.endswith(".bin") for source in (*what.sources, *what.val_sources)]
    if any(bins) and not all(bins):
        raise ContextReadyError("Token files (.bin) and text cannot be mixed in one preparation; prepare them apart.")


def is_validation(document: bytes, fraction: float) -> bool:
    """Whether a document validates: a matter of its own bytes, so the same today, tomorrow and in a larger corpus."""
    return int.from_bytes(hashlib.blake2b(document, digest_size=8).digest()) < fraction * 2**64


def _prepare_text(out: Path, what: Preparation, report: Report) -> None:
    corpus = open_corpus(what.sources, what.field)
    val_corpus = open_corpus(what.val_sources, what.field) if what.val_sources else None
    if what.tokenizer is not None:
        tokenizer = Tokenizer.load(Path(what.tokenizer), what.end_token)
    elif what.vocab_size is not None:
        tokenizer = _train_tokenizer(corpus, what, val_corpus is None, report)
    else:
        raise ContextReadyError(
            "Say how to tokenise: --vocab-size to train a byte-level BPE, or --tokenizer to use one."
        )

    def encoded(source: Corpus, label: str) -> Iterator[tuple[bytes, Ids | list[int], int]]:
        documents = source.documents(lambda done: report(label, source.bytes, done))
        for batch in _in_batches(documents):
            for text, ids in zip(batch, tokenizer.encode_batch(batch), strict=True):
                content = text.encode()
                yield content, ids, len(content)

    rows = encoded(corpus, "tokenising")
    val_rows = None if val_corpus is None else encoded(val_corpus, "tokenising validation")
    _write(out, what, tokenizer, tokenizer.vocab_size, tokenizer.end_id, rows=rows, val_rows=val_rows, name=corpus.name)


def _prepare_token_files(out: Path, what: Preparation, report: Report) -> None:
    tokenizer = None if what.tokenizer is None else Tokenizer.load(Path(what.tokenizer), what.end_token)
    end_id = what.end_id if what.end_id is not None else tokenizer.end_id if tokenizer is not None else None
    if end_id is None:
        raise ContextReadyError(
            "Token files need --tokenizer, or --end-id to know where documents end (GPT-2's: 50256)."
        )
    vocab_size = tokenizer.vocab_size if tokenizer is not None else what.vocab_size
    if vocab_size is None:
        raise ContextReadyError("Token files need --tokenizer, or --vocab-size to know how many ids there are.")
    if not 0 <= end_id < vocab_size:
        raise ContextReadyError(f"--end-id {end_id} is not an id of a vocabulary of {vocab_size}; give one below it.")

    def documents(paths: list[Path], label: str) -> Iterator[tuple[bytes, Ids, int]]:
        size = sum(path.stat().st_size for path in paths)
        for path in paths:
            for ids in read_token_file(path, end_id, partial(report, label, size)):
                if len(ids) == 0:
                    continue
                wrong = ids[(ids < 0) | (ids >= vocab_size)]
                if len(wrong):
                    raise ContextReadyError(
                        f"{path} holds the id {int(wrong[0])}, and the vocabulary goes from 0 to {vocab_size - 1}: "
                        "it was made with another tokenizer."
                    )
                text_bytes = len(tokenizer.decode(ids.tolist()).encode()) if tokenizer is not None else 0
                yield ids.tobytes(), ids, text_bytes

    val_files = expand(what.val_sources, (".bin",))
    val_rows = documents(val_files, "copying validation") if val_files else None
    rows = documents(expand(what.sources, (".bin",)), "copying")
    _write(out, what, tokenizer, vocab_size, end_id, rows=rows, val_rows=val_rows, name=", ".join(what.sources))


def _train_tokenizer(corpus: Corpus, what: Preparation, leave_out_val: bool, report: Report) -> Tokenizer:
    """Learn the BPE from training documents only; of a corpus larger than the limit, from an even part of it."""
    part = 1.0 if corpus.bytes is None else min(1.0, what.tokenizer_bytes / max(1, corpus.bytes))

    def texts() -> Iterator[str]:
        seen = 0
        for text in corpus.documents(lambda done: report("reading for the tokenizer", corpus.bytes, done)):
            content = text.encode()
            if leave_out_val and is_validation(content, what.val_fraction):
                continue
            # Another hash than the split's, so that which part is read says nothing about the split.
            if part < 1.0 and not is_validation(b"tokenizer" + content, part):
                continue
            if seen >= what.tokenizer_bytes:
                return
            seen += len(content)
            yield text

    assert what.vocab_size is not None
    first = next(reader := texts(), None)
    if first is None:
        if next(corpus.documents(), None) is None:
            raise ContextReadyError(f"The corpus {corpus.name} holds no text to train on.")
        raise ContextReadyError(
            f"No document of {corpus.name} is left to train the tokenizer on: all validate, or none fits into "
            f"--tokenizer-bytes {what.tokenizer_bytes}; lower --val-fraction or raise --tokenizer-bytes."
        )
    return Tokenizer.train(chain([first], reader), what.vocab_size)


def _write(
    out: Path,
    what: Preparation,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    end_id: int,
    *,
    rows: Iterable[tuple[bytes, Ids | list[int], int]],
    val_rows: Iterable[tuple[bytes, Ids | list[int], int]] | None,
    name: str,
) -> None:
    dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
    with staged_folder(out) as folder:
        train, val = (ShardWriter(folder, split, dtype, what.shard_tokens) for split in ("train", "val"))
        try:
            for content, ids, size in rows:
                validates = val_rows is None and is_validation(content, what.val_fraction)
                (val if validates else train).add(ids, end_id, size)
            for _, ids, size in val_rows or ():
                val.add(ids, end_id, size)
        finally:
            train.close()
            val.close()
        if not train.documents and not val.documents:
            raise ContextReadyError(f"The corpus {name} holds no text to train on.")
        if not train.documents or not val.documents:
            there, missing = (train, "validation") if train.documents else (val, "training")
            raise ContextReadyError(
                f"None of the {there.documents:,} documents fell into the {missing} split; "
                "change --val-fraction, or give --val its own files."
            )
        if tokenizer is not None:
            tokenizer.save(folder)
        about: dict[str, Any] = {
            "source": name,
            "vocab_size": vocab_size,
            "end_id": end_id,
            "dtype": dtype.str,
            "tokenizer_sha256": None if tokenizer is None else tokenizer.sha256,
            "val_fraction": None if val_rows is not None else what.val_fraction,
            "splits": {"train": train.summary(), "val": val.summary()},
        }
        write_manifest(folder, FORMAT, about)


def _in_batches(documents: Iterable[str]) -> Iterator[list[str]]:
    """Groups of documents large enough to keep all cores busy and small enough to fit anywhere."""
    batch: list[str] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document)
        if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
