"""Sources of documents: every format, and error messages for broken files."""

import gzip
import json
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from contextready.data import corpora
from contextready.data.corpora import Corpus, open_corpus
from contextready.errors import ContextReadyError


def read(*sources, field="text"):
    return list(open_corpus([str(source) for source in sources], field).documents())


def as_jsonl(texts, field="text"):
    return "".join(json.dumps({"id": 1, field: text}) + "\n" for text in texts).encode()


def write_all_formats(folder, texts, field="text"):
    lines = as_jsonl(texts, field)
    folder.joinpath("a.txt").write_text("<|endoftext|>\n".join(texts))
    folder.joinpath("a.jsonl").write_bytes(lines)
    folder.joinpath("a.jsonl.gz").write_bytes(gzip.compress(lines))
    folder.joinpath("a.jsonl.zst").write_bytes(zstandard.compress(lines))
    pyarrow.parquet.write_table(pyarrow.table({"id": [1] * len(texts), field: texts}), folder / "a.parquet")


@pytest.mark.parametrize("extension", corpora.EXTENSIONS)
def test_every_format_gives_the_same_documents(tmp_path, texts, extension):
    write_all_formats(tmp_path, texts)
    assert read(tmp_path / f"a{extension}") == texts


@pytest.mark.parametrize("extension", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet"])
def test_the_field_can_be_chosen(tmp_path, texts, extension):
    write_all_formats(tmp_path, texts[:5], field="body")
    assert read(tmp_path / f"a{extension}", field="body") == texts[:5]


def test_folders_and_globs_give_all_files_in_order(tmp_path):
    for name in ("b/2.txt", "a.txt", "b/1.txt", "b/c/3.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "b" / "notes.md").write_text("not read")
    assert read(tmp_path) == ["a.txt", "b/1.txt", "b/2.txt", "b/c/3.txt"]
    assert read(tmp_path / "b" / "*.txt") == ["b/1.txt", "b/2.txt"]
    assert read(tmp_path / "**" / "*.txt") == ["a.txt", "b/1.txt", "b/2.txt", "b/c/3.txt"]
    assert read(tmp_path / "b", tmp_path / "a.txt") == ["b/1.txt", "b/2.txt", "b/c/3.txt", "a.txt"]


def test_the_order_of_files_is_that_of_their_names(tmp_path):
    for i in range(20):
        (tmp_path / f"{i * 7 % 20:02d}.txt").write_text(f"{i * 7 % 20:02d}")
    expected = [f"{i:02d}" for i in range(20)]
    assert read(tmp_path) == read(tmp_path / "*.txt") == expected


def test_blank_documents_and_empty_rows_are_left_out(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(as_jsonl(["one", "", " \n", "two"]) + b"\n\n")
    assert read(tmp_path / "a.jsonl") == ["one", "two"]
    pyarrow.parquet.write_table(pyarrow.table({"text": ["one", None, "", "two"]}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == ["one", "two"]


def test_text_without_marks_is_cut_at_blank_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "TEXT_PIECE", 10)
    text = "short\n\nlonger than ten\n\nthe end\nof it"
    (tmp_path / "a.txt").write_text(text)
    assert read(tmp_path / "a.txt") == ["short\n\nlonger than ten\n\n", "the end\nof it"]


def test_text_with_marks_is_cut_at_the_marks_only(tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "TEXT_PIECE", 10)
    documents = ["first of all\n", "longer than ten\n\nand its second part\n", "third\n"]
    (tmp_path / "a.txt").write_text("<|endoftext|>\n".join(documents))
    assert read(tmp_path / "a.txt") == documents


@pytest.mark.parametrize("limit", range(4, 12))
def test_long_lines_are_cut_and_no_character_is_lost(tmp_path, monkeypatch, limit):
    monkeypatch.setattr(corpora, "LONGEST_PIECE", limit)
    text = "a日本語é" * 9 + "\r\n" + "😀" * 7 + "\nend"
    (tmp_path / "a.txt").write_bytes(text.encode())
    documents = read(tmp_path / "a.txt")
    assert "".join(documents) == text
    assert len(documents) > 4
    assert all(len(document) <= 2 * limit for document in documents)


def test_all_bytes_are_reported(tmp_path, texts):
    write_all_formats(tmp_path, texts)
    for path in [tmp_path / "a.txt", tmp_path / "a.jsonl"]:
        corpus, done = open_corpus([str(path)]), []
        assert sum(1 for _ in corpus.documents(done.append)) == len(texts)
        assert sum(done) == corpus.bytes == path.stat().st_size


def test_all_frames_of_a_zstandard_file_are_read(tmp_path, texts):
    frames = [zstandard.compress(as_jsonl([text] * 500)) for text in texts[:20]]
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(frames))
    assert len(read(tmp_path / "a.jsonl.zst")) == 20 * 500


def cut_short(compressed, tmp_path, name):
    path = tmp_path / name
    path.write_bytes(compressed[: len(compressed) // 2])
    return path


def test_truncated_gzip(tmp_path, texts):
    path = cut_short(gzip.compress(as_jsonl(texts)), tmp_path, "a.jsonl.gz")
    with pytest.raises(ContextReadyError, match=r"a\.jsonl\.gz cannot be decompressed after line \d+: .*\.$"):
        read(path)


def lines_in_blocks(texts):
    """A Zstandard frame with one block per line, as written by programs that flush."""
    writer = zstandard.ZstdCompressor().compressobj()
    parts = [writer.compress(as_jsonl([t])) + writer.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK) for t in texts]
    return [*parts, writer.flush()]


@pytest.mark.parametrize("cut", ["middle", "last byte", "between lines"])
def test_truncated_zstandard(tmp_path, texts, cut):
    parts = lines_in_blocks(texts)
    whole = b"".join(parts)
    kept = {"middle": whole[: len(whole) // 2], "last byte": whole[:-1], "between lines": b"".join(parts[:99])}[cut]
    (tmp_path / "a.jsonl.zst").write_bytes(kept)
    with pytest.raises(ContextReadyError, match=r"a\.jsonl\.zst cannot be decompressed"):
        read(tmp_path / "a.jsonl.zst")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "naïve\nfine\n".encode() + b"x\xff\n", "a.txt is not UTF-8 text (byte 13 is 0xff)"),
        ("a.txt", b"cut \xe6\x97", "a.txt is not UTF-8 text (byte 4 is 0xe6)"),
        ("a.txt", "UTF-16".encode("utf-16"), "a.txt contains null bytes, so it is not UTF-8 text"),
        ("a.jsonl", as_jsonl(["fine"]) + b'{"text": "\xe9"}\n', "a.jsonl is not UTF-8 text (byte 36 is 0xe9)"),
        ("a.jsonl", as_jsonl(["fine"]) + b'{"text": "half\n', "a.jsonl, line 2, is not valid JSON: "),
        ("a.jsonl", as_jsonl(["fine"], "body"), "line 1, has no text under 'text' (it has id, body); name the right"),
        ("a.jsonl", b'["text"]\n', "line 1, has no text under 'text' (it is not an object)"),
        ("a.jsonl", b'{"text": 5}\n', "line 1, has no text under 'text'"),
        ("a.jsonl.gz", b"no gzip at all", "a.jsonl.gz cannot be decompressed after line 0: "),
        ("a.jsonl.zst", b"no zstandard at all", "a.jsonl.zst cannot be decompressed after line 0: "),
        ("a.parquet", b"PAR1 but no more", "a.parquet is not a parquet file: "),
        ("a.csv", b"a,b\n", "a.csv is not of a supported type; supported are .txt, .jsonl, "),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ContextReadyError) as refusal:
        read(tmp_path / name)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_the_wrong_byte_is_named_after_a_cut_character(tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "LONGEST_PIECE", 4)
    (tmp_path / "a.txt").write_bytes("日本語日本語".encode() + b"\nab\xff")
    with pytest.raises(ContextReadyError, match="byte 21 is 0xff"):
        read(tmp_path / "a.txt")


@pytest.mark.parametrize("values", [[1, 2], [b"bytes", b"more"]])
def test_a_parquet_column_without_text_is_refused(tmp_path, values):
    pyarrow.parquet.write_table(pyarrow.table({"text": values}), tmp_path / "a.parquet")
    with pytest.raises(ContextReadyError, match=r"The column .text. of .*a\.parquet holds .*, not text; name another"):
        read(tmp_path / "a.parquet")


def test_a_missing_parquet_column_is_named(tmp_path):
    write_all_formats(tmp_path, ["one"], field="body")
    with pytest.raises(ContextReadyError, match=r"a\.parquet has no column 'text' \(it has id, body\); name the right"):
        read(tmp_path / "a.parquet")


def test_a_missing_file_suggests_the_nearest_corpus(tmp_path):
    with pytest.raises(ContextReadyError, match=r"no file, folder or corpus 'wikipdia'; did you mean 'wikipedia'\?"):
        open_corpus(["wikipdia"])
    with pytest.raises(ContextReadyError, match=r"The folder .* contains no \.txt"):
        open_corpus([str(tmp_path)])


def test_a_named_corpus_together_with_a_file_is_refused_for_the_right_reason(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ContextReadyError) as refusal:
        open_corpus(["sotu", str(tmp_path / "a.txt")])
    assert "There is no" not in str(refusal.value)


def test_capital_extensions_are_found_in_folders(tmp_path):
    (tmp_path / "A.TXT").write_text("shouted")
    assert read(tmp_path / "A.TXT") == ["shouted"]
    assert read(tmp_path) == ["shouted"]


@pytest.mark.parametrize(("name", "module"), [("a.jsonl.zst", "zstandard"), ("a.parquet", "pyarrow.parquet")])
def test_a_missing_extra_is_named(tmp_path, monkeypatch, name, module):
    write_all_formats(tmp_path, ["one"])
    monkeypatch.setitem(sys.modules, module, None)
    package = module.partition(".")[0]
    with pytest.raises(
        ContextReadyError, match=rf"package {package} is not installed; install it with: pip install .*{package}"
    ):
        read(tmp_path / name)


def test_a_corpus_can_be_read_again(tmp_path, texts):
    (tmp_path / "a.jsonl").write_bytes(as_jsonl(texts))
    corpus = open_corpus([str(tmp_path / "a.jsonl")])
    assert isinstance(corpus, Corpus)
    assert list(corpus.documents()) == list(corpus.documents()) == texts


LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst")


def compressed(content, extension):
    return {".jsonl": bytes, ".jsonl.gz": gzip.compress, ".jsonl.zst": zstandard.compress}[extension](content)


@pytest.mark.parametrize("extension", LINES)
def test_a_line_that_is_too_long_is_named(tmp_path, monkeypatch, extension):
    monkeypatch.setattr(corpora, "LONGEST_LINE", 1000)
    fits = json.dumps({"text": "x" * 987}).encode() + b"\n"
    assert len(fits) == 1000
    path = tmp_path / f"a{extension}"
    path.write_bytes(compressed(fits * 3, extension))
    assert [len(document) for document in read(path)] == [987] * 3
    for longer in (fits[:-2] + b" }\n", b"x" * 1001, b"x" * 50_000):
        path.write_bytes(compressed(fits + longer, extension))
        with pytest.raises(ContextReadyError, match=rf"a{extension}, line 2, has more than 1,000 bytes, .* split it"):
            read(path)


@pytest.mark.parametrize("piece", [1, 7, 1 << 11])
def test_zstandard_lines_are_joined_across_pieces(tmp_path, monkeypatch, texts, piece):
    monkeypatch.setattr(corpora, "ZSTANDARD_PIECE", piece)
    frames = [zstandard.compress(as_jsonl(texts[:7])), zstandard.compress(as_jsonl(texts[7:20])[:-1])]
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(frames))
    assert read(tmp_path / "a.jsonl.zst") == texts[:20]


def test_a_document_that_is_too_long_is_named_in_parquet(tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "LONGEST_LINE", 1000)
    pyarrow.parquet.write_table(pyarrow.table({"text": ["x" * 1000, None, "x" * 1001]}), tmp_path / "a.parquet")
    with pytest.raises(ContextReadyError, match=r"a\.parquet, row 3, has more than 1,000 characters"):
        read(tmp_path / "a.parquet")


def test_a_damaged_parquet_page_is_a_sentence(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": [f"text {i}" for i in range(1000)]}), path)
    content = bytearray(path.read_bytes())
    content[4:60] = bytes(56)
    path.write_bytes(content)
    with pytest.raises(ContextReadyError, match=r"a\.parquet cannot be read after row \d+: ") as caught:
        read(path)
    assert "\n" not in str(caught.value)


def test_many_or_strange_keys_do_not_fill_the_sentence(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({f"key\n{i}" + "x" * 999: 1 for i in range(999)}))
    with pytest.raises(ContextReadyError, match=r"it has key\\n0x+, .*, …\)") as caught:
        read(tmp_path / "a.jsonl")
    assert len(str(caught.value)) < 1000


BOMB = """
import gzip, resource, sys
from pathlib import Path
import zstandard
from contextready.data.corpora import open_corpus
from contextready.errors import ContextReadyError
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
for path in sys.argv[1:]:
    try:
        list(open_corpus([path]).documents())
    except ContextReadyError as error:
        print(error)
"""


def test_bombs_do_not_fill_the_memory(tmp_path):
    """Small files whose only line has gigabytes, read with one gigabyte of memory."""
    megabyte = bytes(1 << 20)
    frame = zstandard.ZstdCompressor(level=1).compressobj()
    with (tmp_path / "a.jsonl.zst").open("wb") as file:
        for _ in range(1 << 10):
            file.write(frame.compress(megabyte))
        file.write(frame.flush())
    with gzip.open(tmp_path / "b.jsonl.gz", "wb", compresslevel=1) as file:
        for _ in range(100):
            file.write(megabyte)
    with (tmp_path / "c.jsonl").open("wb") as file:
        file.truncate(3 << 30)
    paths = sorted(str(path) for path in tmp_path.iterdir())
    assert sum((tmp_path / name).stat().st_size for name in ("a.jsonl.zst", "b.jsonl.gz")) < 1 << 20
    done = subprocess.run([sys.executable, "-c", BOMB, *paths], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert all(
        f"{path}, line 1, has more than 67,108,864 bytes" in line for path, line in zip(paths, lines, strict=True)
    )
