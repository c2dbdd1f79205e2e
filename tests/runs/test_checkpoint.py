"""Checkpoints: their contents, which ones are kept, errors for damaged or foreign ones, and starting from one."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from train_helpers import (
    TINY,
    change_weights,
    describe_again,
    kept_steps,
    metrics,
    recipe_file,
    run,
    sums,
    tiny,
    trainer,
    words,
)

import contextready
from contextready.cli.main import main
from contextready.errors import ContextReadyError
from contextready.runs.checkpoint import Progress, newest_checkpoint, open_checkpoint, step_folder
from contextready.runs.metrics import read_metrics
from contextready.train.saving import save_checkpoint


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """A context-ready run of eight steps, to copy before it is touched."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    run(data, folder, steps=8)
    return folder


@pytest.fixture(scope="module")
def transformer(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("transformer") / "run"
    run(data, folder, steps=8, correction=None)
    return folder


@pytest.fixture
def copy(trained, tmp_path):
    return Path(shutil.copytree(trained, tmp_path / "run"))


def first_validation(folder):
    return next(r["val_loss"] for r in read_metrics(folder) if "val_loss" in r)


def test_a_checkpoint_holds_plain_files_only(trained):
    folder = newest_checkpoint(trained)
    assert {path.name for path in folder.iterdir()} == {
        *("model.safetensors", "optimizer.safetensors", "rng.safetensors", "config.json", "trainer.json"),
        *("tokenizer.json", "tokenizer_config.json", "manifest.json"),
    }
    for path in folder.glob("*.json"):
        json.loads(path.read_text())


def test_nothing_in_the_package_pickles():
    for path in Path(contextready.__file__).parent.rglob("*.py"):
        assert not re.search(r"torch\.(save|load)\(|import pickle|pickle\.\w|allow_pickle=True", path.read_text()), path


def test_a_checkpoint_gives_back_the_model(data, trained):
    opened = open_checkpoint(trained)
    assert opened.folder == step_folder(trained, 8)
    assert opened.progress.step == 8
    assert opened.progress.sequences == 8 * TINY["batch_size"]
    model = opened.model()
    assert not model.training
    again = trainer(data, trained, steps=8).model
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_the_newest_and_the_best_stay(data, tmp_path):
    at = trainer(data, tmp_path / "run", keep=2)
    for step in range(1, 8):
        best = 2 if step >= 2 else None
        progress = Progress(step=step, best_step=best, best_loss=1.0)
        save_checkpoint(at.config, progress, at.model, at.optimizer, at.team, data)
    assert kept_steps(at.folder) == [2, 6, 7]
    assert open_checkpoint(at.folder).progress.step == 7
    assert open_checkpoint(at.folder, best=True).progress.step == 2
    progress = Progress(step=8, best_step=8, best_loss=0.5)
    keep_one = replace(at.config, train=replace(at.config.train, keep=1))
    save_checkpoint(keep_one, progress, at.model, at.optimizer, at.team, data)
    assert kept_steps(at.folder) == [8]


def test_the_best_checkpoint_is_that_of_the_lowest_validation(data, tmp_path):
    """A learning rate that is far too high makes validation worse after a while."""
    run(data, tmp_path / "run", steps=20, lr=0.5, warmup=16, eval_every=2, save_every=100, keep=1)
    losses = {r["step"]: r["val_loss"] for r in read_metrics(tmp_path / "run") if "val_loss" in r and r["step"]}
    best = min(losses, key=losses.get)
    assert best < 20
    assert open_checkpoint(tmp_path / "run", best=True).progress.step == best
    assert kept_steps(tmp_path / "run") == [best, 20]


def test_a_run_without_validation_has_no_best(data, tmp_path):
    at = trainer(data, tmp_path / "run")
    with pytest.raises(ContextReadyError, match="has no manifest"):
        open_checkpoint(at.folder)
    save_checkpoint(at.config, Progress(step=1), at.model, at.optimizer, at.team, data)
    with pytest.raises(ContextReadyError, match="has not been validated yet"):
        open_checkpoint(at.folder, best=True)
    with pytest.raises(ContextReadyError, match="no run or checkpoint at"):
        open_checkpoint(tmp_path / "nowhere")


def truncate(folder):
    file = folder / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-7])


def flip(folder):
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)


def remove(folder):
    (folder / "rng.safetensors").unlink()


def edit_manifest(**changes):
    def edit(folder):
        path = folder / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def write_manifest_text(text):
    return lambda folder: (folder / "manifest.json").write_text(text)


def forget_files(folder):
    path = folder / "manifest.json"
    path.write_text(json.dumps({"format": "contextready-checkpoint", "version": 1}))


DAMAGES = {
    "truncated": (truncate, "instead of"),
    "flipped": (flip, "does not match its checksum"),
    "missing": (remove, "is missing"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "has no manifest.json"),
    "cut manifest": (write_manifest_text('{"format": "contextr'), "cannot be read as JSON"),
    "list manifest": (write_manifest_text("[1]"), "has another format"),
    "data manifest": (edit_manifest(format="contextready-data"), "has another format"),
    "newer": (edit_manifest(version=2), "newer contextready"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_one_sentence_and_code_2(data, copy, damage, capsys):
    break_it, message = DAMAGES[damage]
    break_it(newest_checkpoint(copy))
    before = metrics(copy)
    refused(capsys, words(data, copy, steps=12), message, copy)
    assert metrics(copy) == before
    assert kept_steps(copy) == [4, 8]


def test_a_manifest_without_files_is_one_sentence_and_code_2(data, copy, capsys):
    forget_files(newest_checkpoint(copy))
    refused(capsys, words(data, copy, steps=12), "manifest.json", copy)


def refused(capsys, settings, message, folder):
    assert main(["train", recipe_file(folder.parent), *settings]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert err.startswith("crt train: ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 32}, "was trained with width=16, not width=32; set width=16 to resume it"),
        ({"lr": 0.5}, "was trained with lr=0.01, not lr=0.5"),
        ({"correction": "blind"}, "correction=add"),
        ({"seed": 1}, "seed=0"),
        ({"vocab_size": 301}, "vocab_size=300"),
    ],
)
def test_another_configuration_is_refused(data, copy, changes, message, capsys):
    refused(capsys, words(data, copy, **changes), message, copy)


def test_other_data_is_refused_and_moved_data_is_not(data, other_data, copy, tmp_path, capsys):
    refused(capsys, words(other_data, copy), "was trained on other data", copy)
    moved = shutil.copytree(data, tmp_path / "moved")
    assert run(moved, copy, steps=9).step == 9


def test_weights_of_another_model_are_refused(data, copy):
    change_weights(newest_checkpoint(copy), lambda tensors: tensors.pop("correction.ffn.down.weight"))
    with pytest.raises(ContextReadyError, match=r"do not fit this model \(1 differ, for example correction.ffn.down"):
        run(data, copy, steps=12)


def test_changes_of_how_to_report_are_allowed(data, copy):
    assert run(data, copy, steps=10, eval_every=3, save_every=1, keep=1, log_every=5).step == 10


def test_a_cosine_cannot_be_made_longer(data, tmp_path):
    run(data, tmp_path / "run", schedule="cosine", steps=4)
    with pytest.raises(ContextReadyError, match="trained with steps=4, not steps=8"):
        run(data, tmp_path / "run", schedule="cosine", steps=8)


def test_a_resumed_run_keeps_its_precision(data, tmp_path, monkeypatch):
    monkeypatch.setattr("contextready.device.multiplies_bf16", lambda _: True)
    run(data, tmp_path / "run", precision="auto", steps=2)
    monkeypatch.setattr("contextready.device.multiplies_bf16", lambda _: False)
    assert open_checkpoint(tmp_path / "run").progress.precision == "bf16"
    assert trainer(data, tmp_path / "run", precision="auto", steps=4).bf16


def test_a_setting_younger_than_the_checkpoint_had_its_default(data, copy):
    folder = newest_checkpoint(copy)
    config = json.loads((folder / "config.json").read_text())
    del config["train"]["checkpoint_passes"]
    (folder / "config.json").write_text(json.dumps(config))
    describe_again(folder, "config.json")
    assert run(data, copy, steps=9).step == 9


def test_a_converted_transformer_starts_as_itself(data, transformer, tmp_path):
    run(data, tmp_path / "run", steps=1, init_from=str(transformer), correction_init="zero")
    expected = [r["val_loss"] for r in read_metrics(transformer) if "val_loss" in r][-1]
    assert first_validation(tmp_path / "run") == pytest.approx(expected, rel=1e-6)


def test_converting_starts_at_zero_unless_asked_otherwise(data, transformer, tmp_path):
    from contextready.runs.recipes import resolve

    given = words(data, tmp_path / "run", init_from=transformer)
    settings = [word for word in given if not word.startswith(("correction_init", "correction_scale"))]
    recipe = recipe_file(tmp_path)
    assert resolve(recipe, settings).model.correction_init == "zero"
    assert resolve(recipe, settings).model.correction_scale == 0.02
    assert resolve(recipe, [*settings, "correction_init=random"]).model.correction_init == "random"
    drawn = trainer(data, tmp_path / "drawn", init_from=str(transformer), correction_init="random")
    zero = trainer(data, tmp_path / "zero", init_from=str(transformer), correction_init="zero")
    assert drawn.model.correction.ffn.down.weight.abs().min() > 0
    assert not zero.model.correction.ffn.down.weight.any()
    origin = open_checkpoint(transformer).tensors("model")
    for at in (drawn, zero):
        assert all(torch.equal(p, origin[name]) for name, p in at.model.backbone.named_parameters())


@pytest.mark.parametrize("kind", ["context-ready", "transformer"])
def test_training_starts_from_the_same_kind(data, trained, transformer, tmp_path, kind):
    """The transformer is the control, which is trained further without conversion."""
    origin, correction = (trained, "add") if kind == "context-ready" else (transformer, None)
    run(data, tmp_path / "run", steps=2, init_from=str(origin), correction=correction)
    expected = [r["val_loss"] for r in read_metrics(origin) if "val_loss" in r][-1]
    assert first_validation(tmp_path / "run") == pytest.approx(expected, rel=1e-6)
    assert open_checkpoint(tmp_path / "run").progress.step == 2


def test_an_origin_that_does_not_fit_is_refused(data, other_tokens, trained, transformer, tmp_path):
    with pytest.raises(ContextReadyError, match="do not fit this model"):
        run(data, tmp_path / "wide", width=32, init_from=str(transformer))
    with pytest.raises(ContextReadyError, match="do not fit this model"):
        run(data, tmp_path / "back", correction=None, init_from=str(trained))
    with pytest.raises(ContextReadyError, match="with another tokenizer"):
        run(other_tokens, tmp_path / "other", init_from=str(transformer))
    with pytest.raises(ContextReadyError, match="trained with heads=2, not 4; set heads=2"):
        run(data, tmp_path / "heads", heads=4, init_from=str(transformer))
    with pytest.raises(ContextReadyError, match="trained with rope=geometric, not integer; set rope=geometric"):
        run(data, tmp_path / "rope", rope="integer", init_from=str(transformer))
    with pytest.raises(ContextReadyError, match="no run or checkpoint"):
        run(data, tmp_path / "none", init_from=str(tmp_path / "nowhere"))


def test_a_converted_run_resumes_without_its_origin(data, transformer, tmp_path):
    origin = shutil.copytree(transformer, tmp_path / "origin")
    changes = {"init_from": str(origin), "correction_init": "zero", "dropout": 0.1}
    whole = run(data, tmp_path / "whole", steps=8, **changes)
    run(data, tmp_path / "run", steps=4, **changes)
    shutil.rmtree(origin)
    assert sums(run(data, tmp_path / "run", steps=8, **changes).checkpoint) == sums(whole.checkpoint)


def test_the_same_command_resumes_without_the_origin(data, transformer, tmp_path, capsys):
    origin = shutil.copytree(transformer, tmp_path / "origin")
    command = ["train", recipe_file(tmp_path), *words(data, tmp_path / "run", init_from=origin, steps=4)]
    assert main(command) == 0
    shutil.rmtree(origin)
    assert main(command) == 0


def test_the_tokenizer_travels_with_the_weights(data, trained):
    from contextready.data.tokenizer import Tokenizer

    assert Tokenizer.load(newest_checkpoint(trained)).sha256 == open_checkpoint(trained).progress.tokenizer_sha256
    assert open_checkpoint(trained).config == tiny(data, trained, steps=8).as_dict()
