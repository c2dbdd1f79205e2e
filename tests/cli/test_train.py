"""What `crt train` prints without training: its recipes, the plan of a dry run, and its help."""

import dataclasses
import json
import re

import pytest
from train_helpers import recipe_file, words

from contextready.cli.main import build_parser, main
from contextready.model.cost import account
from contextready.runs.config import TrainConfig
from contextready.runs.recipes import recipe_names, resolve


def test_list_names_every_recipe(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["train", "--list"]) == 0
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert set(recipe_names()) < set(rows)
    assert rows["mini-d1"] == ["mini-d1", "D=1", "C=128", "add", "16×128", "2,000"]
    assert rows["k10-fixed/owt-d1-c2048"][-1] == "10"
    assert rows["mini-n1-ffn"][1:5] == ["N=1", "C=128", "+", "FFN"]


def test_list_as_json_is_one_strict_document(capsys):
    assert main(["train", "--list", "--json"]) == 0
    records = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["recipes"]
    assert [record["recipe"] for record in records] == recipe_names()
    found = {record["recipe"]: record for record in records}
    assert found["mini-d1"] == {
        **{"recipe": "mini-d1", "layers": 1, "width": 128, "correction": "add", "extra_ffn": False},
        **{"sequences_per_step": 16, "block_size": 128, "steps": 2000, "passes": None},
        **{"gradient": None, "data": "data/mini", "task": None},
    }
    assert found["k10-fixed/owt-d1-c2048"]["passes"] == "10"
    assert (found["pointer-mini"]["task"], found["pointer-mini"]["data"]) == ("pointer", None)
    assert main(["train", "mini-d1", "--json"]) == 2
    assert "--json works with --list or --dry-run" in capsys.readouterr().err


def test_a_dry_run_prints_the_plan_and_makes_nothing(data, tmp_path, capsys):
    assert main(["train", recipe_file(tmp_path), *words(data, tmp_path / "run", passes="1..3"), "--dry-run"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert not (tmp_path / "run").exists()
    cost = account(resolve(recipe_file(tmp_path), words(data, tmp_path / "run")).model)
    assert plan["train"]["steps"] == 12
    assert plan["cost"]["parameters"] == cost.parameters
    assert plan["cost"]["tokens"] == 12 * 4 * 16
    # K is uniform over 1, 2, 3, and a backward costs two forwards.
    each = [3 * 4 * cost.macs_sequence(16, k) for k in (1, 2, 3)]
    assert plan["cost"]["macs_per_step"] == sum(each) // 3


def test_options_may_stand_between_the_recipe_and_its_settings(data, capsys):
    assert main(["train", "mini-d1", "--dry-run", f"data={data}"]) == 0


def test_help_explains_every_setting_of_the_training(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    out = capsys.readouterr().out
    for field in dataclasses.fields(TrainConfig):
        assert f"\n  {field.name} " in out
    for symbol in "KDNCT":
        assert f"\n  {symbol}   " in out
    assert out.index("examples:") < out.index("options:") < out.index("training settings")


@pytest.mark.parametrize("verb", ["train", "plan", "unshard"])
def test_help_begins_with_examples_that_can_be_run(verb, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    out = capsys.readouterr().out
    assert all(len(line) <= 100 for line in out.splitlines())
    examples = re.findall(rf"^  (crt {verb} .*?)(?:  .*)?$", out, flags=re.MULTILINE)
    assert len(examples) >= 2
    for example in examples:
        options = build_parser().parse_args(example.split()[1:])
        # crt plan paper is about all recipes of the paper.
        if verb != "unshard" and getattr(options, "recipe", None) != "paper":
            resolve(options.recipe, options.settings)
