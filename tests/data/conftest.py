"""Fixtures for the data tests: a small corpus, a tokenizer trained on it, and the command."""

import json

import pytest

from contextready.cli.main import main
from contextready.data.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def texts():
    return [f"Text {i}: the café of year {i * 7919 % 1000} — 日本 {i}.\nIt had {i * i} guests.\n" for i in range(300)]


@pytest.fixture(scope="session")
def trained(texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    Tokenizer.train(texts, 320).save(folder)
    return folder


@pytest.fixture
def source(texts, tmp_path):
    path = tmp_path / "source.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def crt(capsys):
    def run(*words):
        code = main([str(word) for word in words])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


@pytest.fixture
def refused(crt):
    """Run the command and return its one-sentence error."""

    def run(*words):
        code, out, err = crt(*words)
        assert code == 2
        assert out == ""
        assert err.count("\n") == 1
        assert err.startswith("crt data: ")
        return err

    return run
