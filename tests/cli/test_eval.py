"""The tables of `crt eval`: readable in 80 columns, with every heading explained."""

import csv
import io
from pathlib import Path

import numpy as np
import pytest

from contextready.cli.eval import print_evaluation
from contextready.cli.main import main
from contextready.cli.tables import Figure, as_csv, as_markdown, as_text
from contextready.evaluate.evaluate import Evaluation
from contextready.measure.perplexity import Score

NAMES = [f"runs/wikipedia-miniature-d1-with-a-long-name-{i}" for i in range(5)]


def evaluation(plain=False, tokens=64, windows=5):
    nll = np.random.default_rng(0).normal(5.0, 0.3, windows)
    parallel = {k: Score(nll + 1 / k) for k in ((1,) if plain else (1, 2, 3, 5, 10))}
    rates = (None, None, None) if plain else (0.55, 0.43, 5)
    return Evaluation(tokens, windows, 16, 4.0, parallel, None if plain else Score(nll + 0.1), *rates)


@pytest.mark.parametrize("columns", ["80", "250"])
def test_five_long_names_stay_readable(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    print_evaluation(NAMES, [evaluation() for _ in NAMES])
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= int(columns) for line in lines)
    headings = [line for line in lines if line.startswith("model")]
    assert len(headings) == (5 if columns == "80" else 1)
    for heading in ("K=1", "K=10", "streaming", "Corr.", "L̂", "bits/byte"):
        assert heading in " ".join(headings).split()
    # Every block has a row for every model, and no cell is broken.
    for name in NAMES:
        rows = [line for line in lines if line.startswith(Path(name).name)]
        assert len(rows) == len(headings)
        assert sum(row.count("±") for row in rows) == 9


def test_headings_are_explained_if_they_appear(capsys):
    print_evaluation(["ready", "plain"], [evaluation(), evaluation(plain=True)])
    out = " ".join(capsys.readouterr().out.split())
    for text in (
        "Validation perplexity on 64 tokens in windows of 16",
        "Corr. = perplexity at K=1 minus perplexity at K=5: what the correction contributes.",
        "L̂ = contraction rate: the factor by which each extra pass shrinks the remaining change of the correction, at "
        "the worst position; below 1, the passes converge.",
        "± = standard error over the validation windows of one trained model, not over seeds.",
        "streaming = perplexity with one pass per token, as in generation.",
        "– = does not apply to a plain transformer",
    ):
        assert text in out
    assert out.count("K=n =") == 1
    print_evaluation(["plain"], [evaluation(plain=True)])
    out = capsys.readouterr().out
    for text in ("Corr.", "L̂", "streaming =", "–"):
        assert text not in out
    assert "± =" in out


def test_models_with_different_token_counts_have_a_column_for_them(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    print_evaluation(["a", "b"], [evaluation(), evaluation(tokens=1024)])
    _, b = [line for line in capsys.readouterr().out.splitlines() if line[:2] in ("a ", "b ")]
    assert b.endswith("1,024")


def test_one_window_has_no_standard_error(capsys):
    with np.errstate(all="raise"):
        print_evaluation(["a"], [evaluation(windows=1)])
        assert "±" not in capsys.readouterr().out
        print_evaluation(["a"], [evaluation(windows=1)], "csv")
    assert "error" not in capsys.readouterr().out


def test_cells_are_aligned_whatever_they_hold():
    figures = [Figure("L̂", "rate", [(0.5, None), None]), Figure("ppl", "ppl", [(12345.678, 1.0), (2.0, float("nan"))])]
    heading, rule, first, second = as_text(["a", "bb"], figures, 80).splitlines()
    assert heading == "model     L̂               ppl"
    assert rule == "─" * 29
    assert first == "a      0.50  12,345.68 ± 1.00"
    assert second == "bb        –              2.00"


def test_a_column_wider_than_the_console_is_not_cut():
    text = as_text(["a" * 30], [Figure("x", "x", [(1.0, 0.5)]), Figure("y", "y", [(2.0, 0.5)])], 20)
    assert text.count("a" * 30) == 2
    assert "1.00 ± 0.50" in text
    assert "2.00 ± 0.50" in text


def test_csv_has_plain_numbers():
    figures = [Figure("p", "p", [(12345.678, 1.0), (2.0, float("nan")), None]), Figure("n", "n", [(7, None)] * 3)]
    rows = list(csv.reader(io.StringIO(as_csv(["a,b", "c", "d"], figures))))
    assert rows == [
        ["model", "p", "p_error", "n"],
        ["a,b", "12345.678", "1.0", "7"],
        ["c", "2.0", "", "7"],
        ["d", "", "", "7"],
    ]


def test_markdown_escapes_bars():
    lines = as_markdown(["a|b"], [Figure("p", "p", [(1.0, None)])]).splitlines()
    assert lines == ["| model | p |", "| --- | ---: |", r"| a\|b | 1.00 |"]


def test_layouts_exclude_each_other(capsys):
    for pair in (("--csv", "--json"), ("--markdown", "--csv"), ("--json", "--markdown")):
        with pytest.raises(SystemExit) as stop:
            main(["eval", "runs/a", *pair])
        assert stop.value.code == 2
        assert "not allowed with" in capsys.readouterr().err
