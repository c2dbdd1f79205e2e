"""What `crt train convert` and other commands refuse for pretrained models, and what they say."""

import json
import sys

import pytest
from hf_finetune_helpers import arguments, make_place
from hf_helpers import crt, refused
from train_helpers import make_data

pytest.importorskip("peft")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Pretrained models on disk, and data prepared with their tokenizer."""
    return make_place(tmp_path_factory.mktemp("finetune"))


@pytest.fixture(scope="module")
def trained(place):
    """A fine-tuned run."""
    crt(*arguments(place, place / "trained", steps=2))
    return place / "trained"


@pytest.fixture(scope="module")
def folder(place, trained):
    """The same model in Hugging Face format."""
    crt("convert", trained, place / "folder")
    return place / "folder"


REFUSED = {
    "nothing to train": (
        {"tune": "correction", "correction": "none", "passes": 1},
        "tune=correction with correction=none leaves nothing to train",
    ),
    "rank of nothing": ({"lora_rank": 4}, "lora_rank=4 needs tune=lora"),
    "no rank": ({"tune": "lora", "lora_rank": 0}, "lora_rank must be at least 1, but got 0"),
    "its own shape": ({"width": 64}, "width=64 cannot be set for a pretrained model"),
    "its own vocabulary": ({"vocab_size": 300}, "vocab_size=300 cannot be set for a pretrained model"),
    "unknown tune": ({"tune": "lor"}, "tune=lor is unknown"),
    "no such folder": ({"pretrained": "no/such/place"}, "There is no model at"),
    "tied": ({"correction": "tied", "correction_init": "random"}, "works only with a native transformer"),
    "block_head at zero": ({"correction": "block_head"}, "no output layer that could start at zero"),
    "passes of nothing": ({"correction": "none", "passes": 3}, "passes=3 needs a correction"),
    "gradient of nothing": (
        {"correction": "none", "passes": 1, "gradient": "bptt"},
        "gradient=bptt needs a correction",
    ),
    "unknown setting": ({"lora_ran": 3}, "Unknown setting 'lora_ran'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_makes_no_sense_is_refused(place, tmp_path, capsys, case):
    changes, why = REFUSED[case]
    assert why in refused(capsys, *arguments(place, tmp_path / "run", **changes))
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_the_control_needs_no_more_than_correction_none(place, tmp_path):
    words = [word for word in arguments(place, tmp_path / "run", correction="none") if not word.startswith("passes=")]
    crt(*words)


def test_data_of_another_tokenizer_is_refused(place, tmp_path, capsys):
    other = make_data(tmp_path / "other", vocab_size=290)
    said = refused(capsys, *arguments(place, tmp_path / "run", data=other))
    assert "was not prepared with the tokenizer of" in said
    assert f"crt data prepare OUT FILES --tokenizer {place / 'llama'}" in said


def test_settings_of_pretrained_models_need_one(tmp_path, place, capsys):
    data = place / "corpus" / "data"
    said = refused(capsys, "train", "mini-d1", f"data={data}", f"out={tmp_path / 'run'}", "tune=all")
    assert "tune=all needs a pretrained model; set pretrained=FOLDER" in said


@pytest.mark.parametrize("correction", ["blind", "none"])
def test_a_trained_correction_of_another_kind_is_not_thrown_away(place, folder, tmp_path, capsys, correction):
    changes = {"correction": correction} | ({"passes": 1} if correction == "none" else {})
    said = refused(capsys, *arguments(place, tmp_path / "run", pretrained=folder, **changes))
    assert "already has a trained correction with correction=add; set correction=add" in said


def test_other_commands_say_that_it_is_not_theirs(place, trained, tmp_path, capsys):
    plan = ["plan", *arguments(place, tmp_path / "run")[1:]]
    assert "crt plan works for native models only" in refused(capsys, *plan)
    said = refused(capsys, *arguments(place, tmp_path / "run", init_from=trained))
    assert "holds a pretrained Hugging Face model" in said


def test_a_dry_run_prints_the_cost(place, tmp_path):
    said = json.loads(crt(*arguments(place, tmp_path / "run", tune="lora"), "--dry-run"))
    assert said["model"]["tune"] == "lora"
    assert said["cost"]["parameters"] > 34_720 + 8_224
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("package", ["transformers", "peft"])
def test_a_missing_package_is_named(place, tmp_path, capsys, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    said = refused(capsys, *arguments(place, tmp_path / "run", tune="lora"))
    assert f"The package {package} is not installed; install it with: pip install" in said
