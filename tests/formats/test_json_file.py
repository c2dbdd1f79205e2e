"""Strict JSON: whatever is wrong with a file is one sentence that names it."""

import os
import tracemalloc

import pytest

from contextready.errors import ContextReadyError
from contextready.formats import json_file
from contextready.formats.json_file import parse_json, read_json


def test_values_are_read(tmp_path):
    (tmp_path / "a.json").write_text('{"a": [1, 2.5, null, true, "é\\ud83d\\ude00"], "b": {}}')
    assert read_json(tmp_path / "a.json") == {"a": [1, 2.5, None, True, "é\U0001f600"], "b": {}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read as JSON"),
        (b"{", "cannot be read as JSON"),
        (b"\xff", "is not UTF-8 text"),
        (b"\xef\xbb\xbf{}", "cannot be read as JSON"),
        (b"[NaN]", "NaN is not a JSON number"),
        (b"[-Infinity]", "-Infinity is not a JSON number"),
        (b"[1e999]", "the number 1e999 is too large"),
        (b"1" * 5000, "cannot be read as JSON"),
        (b'["\\ud800"]', "half of a surrogate pair"),
        (b'{"\\uDFFF": 1}', "half of a surrogate pair"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[" * 100 + b"]" * 100, "nested more than 64 levels"),
        (b'{"a":' * 100 + b"0" + b"}" * 100, "nested more than 64 levels"),
    ],
)
def test_bad_files_are_one_sentence(tmp_path, content, message):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(ContextReadyError, match=message) as refusal:
        read_json(path)
    assert str(path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    path = tmp_path / "large.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ContextReadyError, match=r"has 1,099,511,627,776 bytes, but files of its kind have at most"):
        read_json(path)


def test_many_small_values_are_refused_before_they_are_built(monkeypatch):
    monkeypatch.setattr(json_file, "MOST_VALUES", 1000)
    text = "[" + "[]," * 500_000 + "[]]"
    tracemalloc.start()
    with pytest.raises(ContextReadyError, match="more than 1,000 JSON values"):
        parse_json(text, "it")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 16


def test_a_repeated_key_is_refused_if_asked():
    assert parse_json('{"a": 1, "a": 2}', "it") == {"a": 2}
    with pytest.raises(ContextReadyError, match="a key occurs twice"):
        parse_json('{"b": {"a": 1, "a": 2}}', "it", unique=True)


def test_only_regular_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    for name in ("pipe", "link", "."):
        with pytest.raises(ContextReadyError, match="is not a regular file"):
            read_json(tmp_path / name)
    with pytest.raises(ContextReadyError, match="does not exist"):
        read_json(tmp_path / "missing")
    for name in ("a\0b", "x" * 5000):
        with pytest.raises(ContextReadyError, match="cannot be read"):
            read_json(tmp_path / name)
