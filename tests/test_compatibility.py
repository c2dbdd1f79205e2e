"""Files written by version 0.1.0 still open: runs, states, sessions and exports, with the same weights and results.

`fixtures/written-by-0.1.tar.xz` was created with that version. It contains a plain transformer, a context-ready model
with a window, and a model for pointer chasing, each trained for a few steps. On the machine that created them, results
are equal bit for bit. Other processors round sums differently, so the tests allow small differences.
"""

import importlib.util
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from contextready import State
from contextready.cli.main import main
from contextready.infer.session import Session
from contextready.runs.checkpoint import open_checkpoint
from contextready.runs.config import RunConfig

ARCHIVE = Path(__file__).parent / "fixtures" / "written-by-0.1.tar.xz"
SETTINGS = [
    *("width=16", "heads=2", "layers=1", "block_size=8", "batch_size=2", "eval_every=2", "eval_tokens=32"),
    *("save_every=3", "keep=1", "warmup=1", "precision=fp32", "device=cpu", "data=data", "lr=0.05", "log_every=1"),
]
RUNS = {
    "plain": ["correction=none", "extra_ffn=true", "bias=true"],
    # Later versions have other defaults.
    "add": ["window=5", "gradient=unroll", "passes=2..3"],
}


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("old")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture
def old(unpacked, tmp_path, monkeypatch):
    """A copy that tests may change, as the current folder."""
    shutil.copytree(unpacked, tmp_path / "old")
    monkeypatch.chdir(tmp_path / "old")
    return np.load("expected.npz")


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("name", RUNS)
def test_a_checkpoint_has_its_weights_and_computes_what_it_did(old, name):
    opened = open_checkpoint(Path(f"runs/{name}"))
    model, tokens = opened.model(), torch.from_numpy(old["tokens"])[:1]
    saved = load_file(opened.folder / "model.safetensors")
    loaded = dict((model if model.is_recurrent else model.backbone).named_parameters())
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[key], loaded[key]) for key in saved)
    close(model(tokens, 3 if model.is_recurrent else 1), old[f"{name}.parallel"])
    if model.is_recurrent:
        close(model.stream(tokens, model.init_state(1))[0], old[f"{name}.stream"])


@torch.inference_mode()
def test_a_state_and_a_session_continue(old):
    model, tokens = open_checkpoint(Path("runs/add")).model(), torch.from_numpy(old["tokens"])
    state, note = State.load_with_note("add.state")
    assert (state.position, state.history, note) == (11, 2, "kept")
    close(model.stream(tokens[:, :1], state)[0], old["add.next"])
    session = Session.load(Path("session.state"))
    assert (session.newest, session.state.history) == ([58, 58, 58, 58], 3)
    assert session.rollback(3).state.position == session.state.position - 3


@pytest.mark.skipif(importlib.util.find_spec("ggml") is None, reason="the engine ggml is not built here")
@pytest.mark.parametrize("name", RUNS)
def test_an_exported_file_computes_what_it_did(old, name):
    from contextready.infer.ggml.engine import GgmlEngine

    engine = GgmlEngine(f"{name}.gguf", capacity=16, threads=1)
    logits, _ = engine.read(0, old["tokens"][0].tolist())
    close(logits, old[f"{name}.{'stream' if name == 'add' else 'parallel'}"][0, -1])
    assert engine.exported.tokenizer().vocab_size == 260


@pytest.mark.parametrize("name", RUNS)
def test_a_run_resumes(old, name):
    """Some settings had other names in version 0.1.0."""
    recipe = open_checkpoint(Path(f"runs/{name}")).config["train"]
    assert "k_min" in recipe
    passes = RunConfig.from_dict(open_checkpoint(Path(f"runs/{name}")).config).train.passes
    assert passes == ("1" if name == "plain" else f"{recipe['k_min']}..{recipe['passes']}")
    assert main(["train", "r.yaml", *SETTINGS, *RUNS[name], "steps=5", f"out=runs/{name}"]) == 0
    opened = open_checkpoint(Path(f"runs/{name}"))
    assert (opened.progress.step, opened.progress.sequences) == (5, 10)
    assert opened.config["train"]["passes"] == passes


def test_a_run_with_other_settings_is_still_refused(old, capsys):
    assert (
        main(
            [
                "train",
                "r.yaml",
                *[word for word in SETTINGS if word != "lr=0.05"],
                *RUNS["add"],
                "lr=0.1",
                "steps=5",
                "out=runs/add",
            ]
        )
        == 2
    )
    assert "was trained with lr=0.05, not lr=0.1" in capsys.readouterr().err


def test_a_run_of_pointer_chasing_resumes(old):
    words = "hops=1 keys=2 values=3 width=8 heads=2 batch_size=4 eval_every=2 eval_tokens=200 out=runs/pointer"
    assert "name" not in open_checkpoint(Path("runs/pointer")).config["task"]
    assert main(["pointer", *words.split(), "steps=3"]) == 0
    assert open_checkpoint(Path("runs/pointer")).progress.step == 3
