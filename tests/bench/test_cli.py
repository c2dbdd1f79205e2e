"""The help of `crt convert`, `crt export` and `crt bench`, and what `crt bench` refuses."""

import pytest

from contextready.cli.main import main


@pytest.mark.parametrize(
    ("verb", "shown"),
    [
        ("convert", ["and add otherwise (default: auto)", "(default: 5)", "LN_z(z_{t-1})"]),
        ("export", ["(default: f16)", "(default: 4096)", "(default: the data that the model was trained on)"]),
        (
            "bench",
            [
                "(default: eager,ggml)",
                "(default: f32,q8_0, and bf16 if the processor multiplies it natively)",
                "(default: 32)",
                "(default: 60)",
            ],
        ),
    ],
)
def test_help_shows_examples_before_options_and_defaults_once(verb, shown, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert text.index(f"examples: crt {verb} ") < text.index("options:")
    for words in shown:
        assert text.count(words) == 1, words


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--engines", "egaer"], "Unknown engine 'egaer'; did you mean 'eager'?"),
        (["--precisions", "q8"], "Unknown precision 'q8'; did you mean 'q8_0'?"),
        (["--contexts", "256,0"], "--contexts must be at least 1, but got 0."),
        (["--contexts", ""], "--contexts is empty; give at least one context length, for example 256."),
        (["--rounds", "0"], "--rounds must be at least 1, but got 0."),
        (["--plot", "bench.doc"], "bench.doc"),
    ],
)
def test_bad_options_of_bench_are_refused_before_measuring(words, sentence, capsys):
    assert main(["bench", "no-such-model", *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("crt bench: ")
    assert sentence in said.err
    assert said.err.count("\n") == 1
