"""The data and weights that a run needs: found from any folder, or missing with the right advice; the vocabulary."""

import json
import shutil

import pytest
from train_helpers import TINY, make_data, recipe_file, run, words

from contextready.cli.main import main
from contextready.errors import ContextReadyError
from contextready.runs.checkpoint import data_of, open_checkpoint
from contextready.runs.recipes import CORPORA, load_recipe, recipe_names, resolve


@pytest.fixture
def project(data, tmp_path, monkeypatch):
    """A folder with data and a run that was trained there with relative paths; the current folder is another one."""
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    shutil.copytree(data, home / "data" / "tiny")
    elsewhere.mkdir()
    monkeypatch.chdir(home)
    run("data/tiny", "runs/tiny", steps=4)
    monkeypatch.chdir(elsewhere)
    return home


def refused(capsys, *arguments):
    assert main([str(word) for word in arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err


def evaluate(path):
    return main(["eval", str(path), "--device", "cpu", "--passes", "1", "--no-sequential", "--json"])


def test_a_run_finds_its_data_from_another_folder(project, capsys, monkeypatch):
    assert data_of(open_checkpoint(project / "runs" / "tiny"), None).folder == project / "data" / "tiny"
    assert evaluate(project / "runs" / "tiny") == 0
    monkeypatch.chdir(project / "runs")
    assert evaluate("tiny") == 0
    assert evaluate("tiny/checkpoints/step-00000004") == 0
    monkeypatch.chdir(project)
    assert str(data_of(open_checkpoint(project / "runs" / "tiny"), None).folder) == "data/tiny"


def test_missing_data_is_named_with_both_places_and_no_other_corpus(project, capsys):
    shutil.move(project / "data" / "tiny", project / "moved")
    err = refused(capsys, "eval", project / "runs" / "tiny", "--device", "cpu")
    assert f"was not found at data/tiny or {project / 'data' / 'tiny'}; pass its folder with --data FOLDER" in err
    assert "prepare" not in err
    assert data_of(open_checkpoint(project / "runs" / "tiny"), project / "moved").folder == project / "moved"


def test_a_moved_run_has_one_place_only(project, capsys):
    shutil.move(project / "runs" / "tiny", project / "run")
    err = refused(capsys, "eval", project / "run", "--device", "cpu")
    assert "was not found at data/tiny; pass" in err


def test_other_data_of_the_same_name_is_not_used(project, other_data, capsys):
    """It is in the same tokens, so nothing else would notice."""
    shutil.copytree(other_data, "data/tiny")
    checkpoint = open_checkpoint(project / "runs" / "tiny")
    assert data_of(checkpoint, None).folder == project / "data" / "tiny"
    shutil.rmtree(project / "data")
    err = refused(capsys, "eval", project / "runs" / "tiny", "--device", "cpu")
    assert "The data in data/tiny is not the data that" in err
    assert data_of(checkpoint, other_data).folder == other_data


@pytest.mark.parametrize("name", [name for name in recipe_names() if "data" in load_recipe(name)])
def test_every_recipe_names_the_command_that_prepares_its_data(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    settings = ["init_from=none"] + (["pretrained=some/model"] if name == "convert" else [])
    err = refused(capsys, "train", name, *settings)
    recipe = load_recipe(name)
    corpus = CORPORA.get(recipe["data"])
    if name == "convert":
        assert err.endswith("crt data prepare data/convert FILES --tokenizer some/model\n")
    else:
        command = f"crt data prepare {recipe['data']} {corpus.source} --vocab-size {corpus.vocab_size}"
        assert f"There is no prepared data at {recipe['data']}. Prepare it with: {command}" in err
        assert recipe.get("vocab_size", corpus.vocab_size) == corpus.vocab_size
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("recipe", "command"),
    [
        ("owt-d5-c1120", "crt data prepare data/owt32k openwebtext --vocab-size 32000"),
        ("wiki-d3-c446", "crt data prepare data/wiki16k wikipedia --vocab-size 16000"),
        ("mini-d1", "crt data prepare data/mini default --vocab-size 4096"),
    ],
)
def test_the_advice_for_the_usual_recipes(recipe, command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert refused(capsys, "train", recipe).endswith(f"{command}\n")
    own = refused(capsys, "train", recipe, "data=my data")
    assert own.endswith(f"crt data prepare 'my data' FILES --vocab-size {command.split()[-1]}\n")


def test_missing_weights_name_the_recipe_that_trains_them(data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    err = refused(capsys, "train", "mini-finetune", f"data={data}")
    assert "There is no run or checkpoint at runs/mini-n1" in err
    assert err.endswith("Train it first with: crt train mini-n1\n")


@pytest.mark.parametrize("recipe", ["mini-d1", "mini-finetune", "owt-d5-c1120", "finetune/owt-d12-c1024"])
def test_dry_runs_and_plans_need_no_data(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", recipe, "--dry-run"]) == 0
    size = json.loads(capsys.readouterr().out)["model"]["vocab_size"]
    assert size == (4096 if "mini" in recipe else 32_000)
    assert main(["plan", recipe, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] > size


def test_an_unknown_vocabulary_is_asked_for(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("width: 16\nlayers: 1\nheads: 2\ndata: nowhere\n")
    err = refused(capsys, "plan", recipe)
    assert "There is no prepared data at nowhere, so the vocabulary size is unknown" in err
    assert main(["plan", str(recipe), "vocab_size=300"]) == 0


SMALL = [f"{key}={value}" for key, value in TINY.items() if key not in ("vocab_size", "correction")]


def test_data_with_another_vocabulary_is_refused(data, tmp_path, capsys):
    err = refused(capsys, "train", "owt-d5-c1120", *SMALL, f"data={data}", f"out={tmp_path / 'run'}")
    assert f"{data} has a vocabulary of 300, but the recipe owt-d5-c1120 is for 32,000" in err
    assert "--vocab-size 32000, or set vocab_size=300" in err
    assert not (tmp_path / "run").exists()
    assert refused(capsys, "train", "owt-d5-c1120", f"data={data}", "--dry-run") == err


@pytest.mark.parametrize("size", [300, 320])
def test_a_vocabulary_that_the_user_sets_may_be_larger(data, tmp_path, size):
    words = [*SMALL, "steps=1", f"data={data}", f"out={tmp_path / 'run'}", f"vocab_size={size}"]
    words.remove(f"steps={TINY['steps']}")
    assert main(["train", "owt-d5-c1120", *words]) == 0
    assert open_checkpoint(tmp_path / "run").vocab_size == size


def test_a_vocabulary_that_the_user_sets_must_not_be_smaller(data, tmp_path, capsys):
    err = refused(capsys, "train", "mini-d1", f"data={data}", f"out={tmp_path / 'run'}", "vocab_size=299")
    assert f"vocab_size=299 is too small for {data}, which has a vocabulary of 300; set it to 300 or more" in err
    assert not (tmp_path / "run").exists()


def test_a_padded_vocabulary_in_a_file_of_the_users_is_accepted(data, tmp_path):
    settings = [word for word in words(data, tmp_path / "run", steps=1) if not word.startswith("vocab_size=")]
    recipe = recipe_file(tmp_path)
    (tmp_path / "mine.yaml").write_text("vocab_size: 320\n")
    assert main(["train", recipe, *settings]) == 0
    assert open_checkpoint(tmp_path / "run").vocab_size == 320


def test_recipes_without_a_vocabulary_take_that_of_the_data(tmp_path):
    data = make_data(tmp_path / "corpus", vocab_size=290)
    assert resolve("mini-d1", [f"data={data}"]).model.vocab_size == 290


@pytest.mark.parametrize("verb", ["train", "plan"])
def test_an_experiment_is_refused_with_a_few_of_its_models(verb, capsys):
    err = refused(capsys, verb, "main-85m")
    assert err.startswith(f"crt {verb}: main-85m is an experiment with 7 models; choose one of them, for example ")
    assert "main-85m/owt-d5-c1120" in err
    assert "(crt train --list shows all)" in err
    assert len(err) < 200
    with pytest.raises(ContextReadyError, match="k10-random is an experiment with one model"):
        resolve("k10-random", [])
