"""Sources that cannot be prepared: exit code 2, one sentence, and no folder."""

import gzip
import json
import sys

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from contextready.data.tokenizer import Tokenizer

TRAINED_HERE = ("--vocab-size", "300", "--val-fraction", "0.5")
LINES = "".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(50)).encode()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "a.txt contains no text to train on."),
        ("a.txt", b" \n\n<|endoftext|>\n\t\n", "a.txt contains no text to train on."),
        ("a.jsonl", b'{"text": ""}\n', "a.jsonl contains no text to train on."),
        ("a.txt", b"fine \xff", "a.txt is not UTF-8 text (byte 5 is 0xff)"),
        ("a.jsonl", LINES + b"{text}\n", "a.jsonl, line 51, is not valid JSON: "),
        ("a.jsonl", LINES + b'{"body": "x"}\n', "a.jsonl, line 51, has no text under 'text' (it has body)"),
        ("a.jsonl.gz", gzip.compress(LINES)[:-20], "a.jsonl.gz cannot be decompressed after line "),
        ("a.jsonl.zst", zstandard.compress(LINES)[:-9], "a.jsonl.zst cannot be decompressed after line "),
        ("a.parquet", b"nothing", "a.parquet is not a parquet file: "),
        ("a.csv", b"a,b\n", "a.csv is not of a supported type; supported are .txt"),
        ("a.txt", b"A single text", "None of the 1 documents fell into the validation split; change --val-fraction"),
        ("a.jsonl", LINES + b'{"text": "half a pair: \\ud83d"}\n', "a.jsonl, line 51"),
        ("a.jsonl", b"[" * 100_000 + b"\n", "a.jsonl, line 1, is not valid JSON"),
    ],
)
def test_bad_sources(refused, tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    assert message in refused("data", "prepare", tmp_path / "out", tmp_path / name, *TRAINED_HERE)
    assert {path.name for path in tmp_path.iterdir()} <= {name, ".out.lock"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "Give --vocab-size to train a byte-level BPE tokenizer, or --tokenizer to use an existing one."),
        (
            ["--vocab-size", "256"],
            "The vocabulary size must be at least 257 (256 bytes and the end token), but got 256.",
        ),
        (["--vocab-size", "-1"], "but got -1."),
        (["--vocab-size", "300", "--val-fraction", "0"], "--val-fraction must be between 0 and 1, but got 0.0."),
        (["--vocab-size", "300", "--val-fraction", "1"], "--val-fraction must be between 0 and 1, but got 1.0."),
        (["--vocab-size", "300", "--val-fraction", "nan"], "--val-fraction must be between 0 and 1, but got nan."),
        (["--vocab-size", "300", "--val-fraction", "1e-9"], "None of the 300 documents fell into the validation split"),
        (["--vocab-size", "300", "--val-fraction", "0.999999"], "--val-fraction"),
        (["--vocab-size", "300", "--shard-tokens", "0"], "--shard-tokens and --tokenizer-bytes must be at least 1"),
        (["--vocab-size", "300", "--val", "missing.txt"], "There is no file, folder or corpus 'missing.txt'"),
        (["--vocab-size", "300", "--val", "val.bin"], "Token files (.bin) and text cannot be combined"),
        (["--tokenizer", "missing"], "There is no tokenizer at missing; give a tokenizer.json or a folder with one"),
        (["--vocab-size", "300", "--field", "body"], "line 1, has no text under 'body' (it has text)"),
    ],
)
def test_bad_options(refused, source, tmp_path, words, message):
    assert message in refused("data", "prepare", tmp_path / "out", source, *words)
    assert not (tmp_path / "out").exists()


def test_a_missing_file_and_the_nearest_corpus(refused, tmp_path):
    message = refused("data", "prepare", tmp_path / "out", "defualt", "--vocab-size", "300")
    assert "There is no file, folder or corpus 'defualt'; did you mean 'default'?" in message


def test_a_missing_column(refused, tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "a.parquet")
    message = refused("data", "prepare", tmp_path / "out", tmp_path / "a.parquet", *TRAINED_HERE)
    assert "a.parquet has no column 'text' (it has body); name the right column with --field." in message


def test_a_missing_extra(refused, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(LINES))
    message = refused("data", "prepare", tmp_path / "out", tmp_path / "a.jsonl.zst", *TRAINED_HERE)
    assert "The package zstandard is not installed; install it with: pip install " in message


def test_a_file_that_is_not_a_tokenizer(refused, source, tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"model": 5}')
    message = refused("data", "prepare", tmp_path / "out", source, "--tokenizer", tmp_path)
    assert "tokenizer.json is not a tokenizer: " in message


def test_a_tokenizer_without_the_end_token(refused, source, tmp_path, texts, trained):
    message = refused("data", "prepare", tmp_path / "out", source, "--tokenizer", trained, "--end-token", "<fin>")
    assert "This tokenizer has no token '<fin>'; name the one that ends documents with --end-token." in message
    inner = Tokenizer.train(texts, 300).inner.to_str().replace("<|endoftext|>", "<fin>")
    (tmp_path / "tokenizer.json").write_text(inner)
    message = refused("data", "prepare", tmp_path / "out", source, "--tokenizer", tmp_path)
    assert "This tokenizer has none of the usual end tokens" in message


def test_a_folder_that_cannot_be_created(refused, source, tmp_path):
    (tmp_path / "file").write_text("a file, not a folder")
    message = refused("data", "prepare", tmp_path / "file" / "out", source, *TRAINED_HERE)
    assert "file cannot be created because a file is in the way; choose another folder." in message
    message = refused("data", "prepare", tmp_path / ("long" * 100), source, *TRAINED_HERE)
    assert "a file could not be read or written: " in message
