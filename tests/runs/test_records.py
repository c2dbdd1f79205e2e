"""The small files of a run: whatever is wrong in one of them is one sentence with the file and the key."""

import json
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from train_helpers import describe_again, recipe_file, run, tiny, words

from contextready.cli.main import main
from contextready.errors import ContextReadyError
from contextready.evaluate.curves import crossover, read_curve
from contextready.evaluate.seeds import group_runs
from contextready.formats.safetensors_file import Header, TensorInfo
from contextready.runs import checkpoint as checkpoints
from contextready.runs.checkpoint import newest_checkpoint, open_checkpoint
from contextready.runs.metrics import read_metrics
from contextready.runs.records import check_description, read_description


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    run(data, folder, steps=4, save_every=2, eval_every=2)
    return folder


@pytest.fixture
def copy(trained, tmp_path):
    return Path(shutil.copytree(trained, tmp_path / "run"))


def edit(folder, name, change, renew=True):
    """Change a JSON file of a checkpoint, and its checksum too unless told otherwise."""
    path = folder / name
    value = json.loads(path.read_text())
    path.write_text(json.dumps([] if change(value) == [] else value))
    if renew:
        describe_again(folder, name)


def refusal_of(action):
    with pytest.raises(ContextReadyError) as refusal:
        action()
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: [], "config.json does not contain the settings of a run"),
        (lambda c: c.pop("train"), "does not contain the settings of a run"),
        (lambda c: c.update(model=[]), "config.json, model must be an object, but is a list"),
        (lambda c: c.update(more=1), "config.json has the unknown key 'more'"),
        (lambda c: c["model"].pop("width"), "config.json, model lacks the key 'width'"),
        (lambda c: c["model"].update(width="16"), "model, width must be a whole number, but is a string"),
        (lambda c: c["model"].update(width=10**10), "model: width must be at most"),
        (lambda c: c["model"].update(width=10**400), "model, width is too large"),
        (lambda c: c["model"].update(depth=3), "model has the unknown key 'depth'"),
        (lambda c: c["model"].update(correction="x"), "model: Unknown correction 'x'"),
        (lambda c: c["train"].update(block_size=None), "train, block_size must be a whole number, but is null"),
        (lambda c: c["train"].update(data=3), "train, data must be a string"),
        (lambda c: c["train"].update(passes=0), "train: passes=0 must be from 1 to 100,000"),
        (lambda c: c["train"].update(k_min=2), "min_passes=2 cannot be combined with passes="),
        (lambda c: c.update(task={"name": "x"}), "The task 'x' is unknown"),
        (lambda c: c.update(task={"name": []}), "is unknown"),
        (lambda c: c.update(task=3), "task must be an object"),
    ],
)
def test_settings(copy, change, message):
    folder = newest_checkpoint(copy)
    edit(folder, "config.json", change)
    said = refusal_of(lambda: open_checkpoint(folder))
    assert message in said
    assert str(folder / "config.json") in said


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: [], "trainer.json must be an object"),
        (lambda p: p.update(step="4"), "trainer.json, step must be a whole number"),
        (lambda p: p.update(step=-4), "trainer.json, step must be at least 0"),
        (lambda p: p.update(step=5), "trainer.json is of step 5, but manifest.json of step 4"),
        (lambda p: p.update(sequences=1 << 63), "sequences must be at least 0"),
        (lambda p: p.update(precision="fp8"), "precision must be fp32 or bf16, but is 'fp8'"),
        (lambda p: p.update(best_step=1.5), "best_step must be a whole number"),
        (lambda p: p.update(solved=1), "solved must be true or false"),
        (lambda p: p.update(more=1), "has the unknown key 'more'"),
    ],
)
def test_progress(copy, change, message):
    folder = newest_checkpoint(copy)
    edit(folder, "trainer.json", change)
    assert message in refusal_of(lambda: open_checkpoint(folder))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rng: rng.pop("python"), "rng lacks the key 'python'"),
        (lambda rng: rng["python"].pop(), "rng, python must have 3 items, but has 2"),
        (lambda rng: rng["python"][1].pop(), "rng: a state has the wrong length"),
        (lambda rng: rng["python"][1].__setitem__(-1, 625), "rng: a state has the wrong length"),
        (lambda rng: rng["python"][1].__setitem__(3, 1 << 32), "rng, python, item 1, item 3 must be from 0"),
        (lambda rng: rng["numpy"].__setitem__(0, "PCG64"), "numpy, item 0 must be MT19937, but is 'PCG64'"),
        (lambda rng: rng["numpy"].__setitem__(2, 10**6), "numpy, item 2 must be from 0 to 624"),
        (lambda rng: rng["numpy"][1].append(0), "rng: a state has the wrong length"),
    ],
)
def test_generators(data, copy, change, message):
    edit(newest_checkpoint(copy), "trainer.json", lambda p: change(p["rng"]))
    assert message in refusal_of(lambda: run(data, copy, steps=6))


@pytest.mark.parametrize("state", [torch.zeros(16, dtype=torch.uint8), torch.zeros(5056), torch.zeros(5056).byte()])
def test_generators_of_torch(data, copy, state):
    folder = newest_checkpoint(copy)
    save_file({"cpu": state}, folder / "rng.safetensors")
    describe_again(folder, "rng.safetensors")
    assert "rng.safetensors does not hold states of torch's generators" in refusal_of(lambda: run(data, copy, steps=6))


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.pop("exp_avg/backbone.embedding.weight"),
        lambda t: t.update({"exp_avg/backbone.embedding.weight": torch.zeros(3)}),
        lambda t: t.update({"step/backbone.embedding.weight": torch.zeros(3)}),
        lambda t: t.update({"exp_avg/more": torch.zeros(3)}),
        lambda t: t.update({"exp_avg/backbone.embedding.weight": torch.zeros(300, 16, dtype=torch.int64)}),
    ],
)
def test_moments(data, copy, change):
    folder = newest_checkpoint(copy)
    moments = load_file(folder / "optimizer.safetensors")
    change(moments)
    save_file(moments, folder / "optimizer.safetensors")
    describe_again(folder, "optimizer.safetensors")
    said = refusal_of(lambda: run(data, copy, steps=6))
    assert "optimizer.safetensors do not fit this model (1 differ, for example " in said


@pytest.mark.parametrize(
    "change", [{"width": 1 << 20}, {"layers": 10**6}, {"vocab_size": (1 << 31) - 1}, {"bias": True}]
)
def test_a_model_that_its_weights_do_not_fit_is_never_built(copy, change, monkeypatch):
    folder = newest_checkpoint(copy)
    edit(folder, "config.json", lambda config: config["model"].update(change))
    monkeypatch.setattr(checkpoints, "rebuild_model", None)
    began = time.monotonic()
    assert "model.safetensors do not fit this model" in refusal_of(lambda: open_checkpoint(folder).model())
    assert time.monotonic() - began < 1


@pytest.mark.parametrize("name", ["config.json", "trainer.json", "rng.safetensors", "model.safetensors"])
def test_every_file_must_be_listed(copy, name):
    folder = newest_checkpoint(copy)
    edit(folder, "manifest.json", lambda manifest: manifest["files"].pop(name), renew=False)
    assert f"manifest.json does not list {name}; the checkpoint is damaged" in refusal_of(
        lambda: open_checkpoint(folder)
    )


def test_names_in_a_manifest_stay_in_the_folder(copy):
    folder = newest_checkpoint(copy)

    def point_outside(manifest):
        manifest["files"]["../../config.json"] = manifest["files"]["config.json"]

    edit(folder, "manifest.json", point_outside, renew=False)
    assert "must be the plain name of a file in the same folder" in refusal_of(lambda: open_checkpoint(folder))


def test_the_best_checkpoint_is_found_only_through_verified_files(copy):
    """The contents of trainer.json are not even parsed if they do not match their checksum."""
    path = newest_checkpoint(copy) / "trainer.json"
    path.write_bytes(b"X" + path.read_bytes()[1:])
    assert "trainer.json does not match its checksum" in refusal_of(lambda: open_checkpoint(copy, best=True))


def test_a_best_checkpoint_that_is_missing_is_named(copy):
    edit(newest_checkpoint(copy), "trainer.json", lambda progress: progress.update(best_step=3))
    assert "The best checkpoint of " in refusal_of(lambda: open_checkpoint(copy, best=True))


def test_odd_names_among_the_checkpoints_are_ignored(data, copy):
    newest = newest_checkpoint(copy)
    (copy / "checkpoints" / "step-zzz").mkdir()
    (copy / "checkpoints" / "step-99999999").touch()
    (copy / "checkpoints" / "step-999999999999999999999").mkdir()
    assert newest_checkpoint(copy) == newest
    assert run(data, copy, steps=5).step == 5


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"step": true}', "line 1 is not a record of a run"),
        ('{"step": -1}', "line 1, step must be at least 0"),
        ('{"step": 1, "val_loss": "x"}', "line 1, val_loss must be a number, but is a string"),
        ('{"step": 1, "tokens": 1.5}', "line 1, tokens must be a whole number"),
        ('{"step": 1, "accuracy": [1, "x"]}', "line 1, accuracy, item 1 must be a number"),
        ('{"step": NaN}', "line 1 is not JSON"),
        ("[" * 100_000, "line 1 is not JSON"),
        ("\udcff", "line 1 is not JSON"),
        ("x" * (3 << 20), "line 1 is not JSON"),
    ],
)
def test_metrics(tmp_path, line, message):
    content = line.encode("utf-8", "surrogateescape") + b'\n{"step": 1}\n'
    (tmp_path / "metrics.jsonl").write_bytes(content)
    assert message in refusal_of(lambda: read_metrics(tmp_path))


def test_curves_of_odd_metrics(tmp_path):
    def write(*records):
        (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))

    write({"step": 1, "val_loss": 3}, {"step": 2, "val_loss": 1e300})
    assert list(read_curve(tmp_path, "steps").loss) == [3.0, 700.0]
    assert "do not all have 'tokens'" in refusal_of(lambda: read_curve(tmp_path, "tokens"))
    write({"step": 0, "macs": 0, "val_loss": 3}, {"step": 0, "macs": 10**29, "val_loss": 2})
    curve = read_curve(tmp_path, "steps")
    assert crossover(curve, curve) is None
    assert read_curve(tmp_path, "macs").x[1] == pytest.approx(1e29)


def test_runs_that_start_from_each_other_end(data, tmp_path):
    for name, other in (("a", "b"), ("b", "a")):
        (tmp_path / name).mkdir()
        config = tiny(data, tmp_path / name, init_from=str(tmp_path / other))
        (tmp_path / name / "config.json").write_text(json.dumps(config.as_dict()))
    assert len(group_runs([tmp_path / "a", tmp_path / "b"])) == 2


DESCRIBED = {
    "base_config": {"vocab_size": 8, "hidden_size": 4, "num_hidden_layers": 1, "intermediate_size": 16},
    "vocab_size": 8,
    "structure": {},
    "correction_bias": False,
    "generation_config": {},
}
HEADER = Header(Path("model.safetensors"), 8, {"a": TensorInfo("F32", (8, 4), (0, 128))}, {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": "8"}, "pretrained.json, vocab_size must be a whole number"),
        ({"correction_bias": None}, "correction_bias must be true or false"),
        ({"structure": []}, "structure must be an object"),
        ({"base_config": {"hidden_size": 10**10}}, "base_config, hidden_size does not fit the weights"),
        ({"base_config": {"vocab_size": 9}}, "base_config, vocab_size does not fit the weights"),
        ({"base_config": {"num_hidden_layers": 10**6}}, "base_config, num_hidden_layers does not fit"),
        ({"base_config": {"text_config": {"n_layer": 10**6}}}, "base_config, n_layer does not fit"),
    ],
)
def test_descriptions(tmp_path, change, message):
    path = tmp_path / "pretrained.json"
    path.write_text(json.dumps(DESCRIBED))
    assert read_description(path) == DESCRIBED
    check_description(path, HEADER)
    path.write_text(json.dumps(DESCRIBED | change))
    assert message in refusal_of(lambda: check_description(path, HEADER))


def test_a_damaged_file_is_one_sentence_of_the_command(data, copy, capsys):
    edit(newest_checkpoint(copy), "trainer.json", lambda progress: progress.update(step=None))
    assert main(["train", recipe_file(copy.parent), *words(data, copy, steps=6)]) == 2
    err = capsys.readouterr().err
    assert "trainer.json, step must be a whole number, but is null; the file is damaged" in err
    assert err.count("\n") == 1
