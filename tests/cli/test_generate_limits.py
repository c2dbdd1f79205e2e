"""`crt generate` with absurd numbers and prompts that are not text: one sentence, before anything is allocated."""

import importlib.util
import io
import os
import subprocess
import sys

import pytest
from train_helpers import make_data, run

from contextready.cli import generate
from contextready.cli.main import main

needs_ggml = pytest.mark.skipif(importlib.util.find_spec("ggml") is None, reason="the extra ggml is not installed")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of a tiny model."""
    folder = tmp_path_factory.mktemp("trained")
    run(make_data(folder), folder / "run", steps=2)
    return folder / "run"


@pytest.fixture(scope="module")
def exported(trained):
    file = trained.parent / "model.gguf"
    assert main(["export", str(trained), str(file), "--tokens", "0"]) == 0
    return file


@pytest.fixture
def refused(capsys):
    """The sentence with which the command refuses these words."""

    def call(*words):
        capsys.readouterr()
        code = main(["generate", *(str(word) for word in words)])
        out, err = capsys.readouterr()
        assert (code, out) == (2, "")
        assert err.startswith("crt generate: ")
        assert "Traceback" not in err
        return err

    return call


NUMBERS = [
    (("--threads", "0"), "--threads must be at least 1, but got 0."),
    (("--threads", "-1"), "--threads must be at least 1, but got -1."),
    (("--threads", "100000"), "--threads must be at most "),
    (("--context", "0"), "--context must be at least 1, but got 0."),
    (("--context", "1000000000000"), "--context must be at most 268,435,456, but got 1000000000000."),
    (("--context", "9" * 400), "--context must be at most 268,435,456, but got a number with more than 15 digits."),
    (("--samples", "100000000"), "--samples must be at most 65,536, but got 100000000."),
    (("--max-tokens", "1000000000000"), "--max-tokens must be at most 268,435,456, but got 1000000000000."),
    (("--logprobs", "10" * 20), "--logprobs must be at most "),
    (("--logprobs", "-1"), "--logprobs must be at least 0, but got -1."),
    (("--top-k", "1" * 400), "--top-k must be at most "),
    (("--seed", "1" * 400), "--seed must be at most "),
]


@pytest.mark.parametrize(("words", "sentence"), NUMBERS)
def test_absurd_numbers_are_refused_before_the_model_is_opened(refused, words, sentence):
    assert sentence in refused("no-such-model", "x", *words)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--chunk", "1000000000000"), "--chunk must be at most "),
        (("--chunk", "0"), "--chunk must be at least 1, but got 0."),
        (("--history", "1000000000000"), "--history must be at most "),
        (("--history", "-1"), "--history must be at least 0, but got -1."),
        (("--rollback", "-1"), "--rollback must be at least 0, but got -1."),
    ],
)
def test_absurd_numbers_of_torch_models(refused, words, sentence):
    assert sentence in refused("no-such-model", "x", *words)


MEMORY = [
    ("--context", "200000000", "--samples", "1000"),
    ("--max-tokens", "200000000", "--samples", "1000"),
]


@pytest.mark.parametrize("words", MEMORY)
def test_what_does_not_fit_into_memory_is_refused(trained, refused, words):
    message = refused(trained, "river", *words)
    assert "1000 completions of up to 200,000" in message
    assert "GB of memory; use a smaller --context, --max-tokens, --samples or --logprobs." in message


def test_states_and_log_probabilities_count(trained, refused, monkeypatch):
    monkeypatch.setattr("contextready.formats.limits.total_memory", lambda: 10_000_000)
    assert "1 completion of up to " in refused(trained, "river", "--history", 1_000_000)
    assert "1 completion of up to " in refused(trained, "river", "--logprobs", 300, "--max-tokens", 400)
    assert main(["generate", str(trained), "river", "--logprobs", "300", "--max-tokens", "2", "--history", "9"]) == 0


@needs_ggml
@pytest.mark.parametrize("words", MEMORY)
def test_exported_files_count_their_own_states(exported, refused, words):
    assert "1000 rows of 200,000" in refused(exported, "river", *words)


def test_too_many_prompts(trained, refused, tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "MOST_ROWS", 10)
    (tmp_path / "prompts.txt").write_text("river\n" * 6)
    message = refused(trained, "--file", tmp_path / "prompts.txt", "--samples", 2)
    assert "The number of completions (prompts × samples) must be at most 10, but got 12." in message


def test_prompt_files_that_are_not_text(trained, refused, tmp_path, monkeypatch):
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"caf\xe9\n")
    assert "prompts.txt is not UTF-8 text" in refused(trained, "--file", path)
    monkeypatch.setattr(generate, "LARGEST_PROMPT", 10)
    path.write_text("river stone light\n")
    assert "prompts.txt has 18 bytes, but" in refused(trained, "--file", path)
    path.unlink()
    os.mkfifo(path)
    assert "prompts.txt is not a regular file" in refused(trained, "--file", path)


class Pipe(io.TextIOWrapper):
    def __init__(self, content, **settings):
        super().__init__(io.BytesIO(content), encoding="utf-8", **settings)


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_standard_input_that_is_not_text(trained, refused, monkeypatch, errors):
    monkeypatch.setattr("sys.stdin", Pipe(b"caf\xe9\n", errors=errors))
    assert "Standard input is not valid UTF-8 text; convert it first, for example with iconv." in refused(trained)


def test_standard_input_that_does_not_end(trained, refused, monkeypatch):
    monkeypatch.setattr(generate, "LARGEST_PROMPT", 100)
    monkeypatch.setattr("sys.stdin", Pipe(b"y\n" * 51))
    assert "Standard input has more than 100 characters, which is too long for a prompt" in refused(trained)


def test_closed_standard_input(trained, refused, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    assert "The prompt is empty" in refused(trained)


def test_line_ends_and_characters_of_standard_input_are_kept(trained, capsys, monkeypatch):
    words = ["generate", str(trained), "--json", "--max-tokens", "1"]
    monkeypatch.setattr("sys.stdin", Pipe("café\r\nriver\n".encode(), errors="surrogateescape"))
    assert main(words) == 0
    assert '"prompt": "caf\\u00e9\\nriver"' in capsys.readouterr().out.replace("é", "\\u00e9")


@pytest.mark.parametrize("option", [(), ("--stop",)])
def test_words_that_are_not_utf8(trained, option):
    """A real process, because Python decodes its arguments before anything else."""
    words = [sys.executable, "-m", "contextready", "generate", str(trained), "river", *option, b"caf\xe9"]
    done = subprocess.run(words, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"is not UTF-8 text" in done.stderr
    assert done.stderr.count(b"\n") == 1
