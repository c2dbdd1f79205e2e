"""Engines with matrices in bf16, and prompts with early passes in bf16 on engines in fp32."""

import shutil

import numpy as np
import pytest
import torch
import train_helpers
from helpers import random_tokens
from prefill_helpers import settling_model, wrapped

import contextready
from contextready import ContextReadyError
from contextready.cli.main import main
from contextready.infer import torch_base
from contextready.infer.prompt import PromptInPieces
from contextready.infer.torch_engine import torch_engine
from contextready.model.narrow import is_narrow, narrowed
from contextready.solve.early import early_model

PROMPTS = [row[:length].tolist() for row, length in zip(random_tokens(3, 44, seed=2), (44, 1, 37), strict=True)]
MORE = random_tokens(3, 12, seed=3)


@pytest.fixture(autouse=True)
def _known_hardware(monkeypatch):
    """Fix the hardware figure, so that converging sweeps pay off on any machine."""
    monkeypatch.setattr("contextready.solve.prefill.free_tokens", lambda model: 1000.0)


def model_in_fp32(**changes):
    return settling_model(dtype=torch.float32, **changes)


def run(engine):
    """Logits (rows, 1 + steps, V) after prompts and in steps of all rows, and how the prompts were read."""
    read = [engine.read(row, prompt) for row, prompt in enumerate(PROMPTS)]
    logits = [np.stack([logits_V for logits_V, _ in read])]
    logits += [engine.step(tokens).copy() for tokens in MORE.T.tolist()]
    return np.stack(logits, axis=1), [info for _, info in read]


def make(model, name="eager", **settings):
    return torch_engine(model, name, rows=3, capacity=64, **settings)


def relative(found, exact):
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize("kind", ["add", "concat", "block_head", None])
@pytest.mark.parametrize("window", [None, 5])
def test_logits_of_every_row_are_close_to_those_in_fp32(kind, window):
    model = model_in_fp32(kind=kind, window=window)
    exact, _ = run(make(model, solver="sequential"))
    found, infos = run(make(narrowed(model), solver="sequential"))
    assert found.dtype == np.float32
    for row in range(3):
        assert 0.0 < relative(found[row], exact[row]) < 1e-2
    assert all(info.bf16_passes == info.passes for info in infos)


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's own, while it loads its compiler
def test_the_compiled_engine_in_bf16_is_close_to_fp32_too():
    model = model_in_fp32(layers=1)
    exact, _ = run(make(model))
    found, _ = run(make(narrowed(model), "compiled"))
    assert 0.0 < relative(found, exact) < 1e-2
    alone = torch_engine(narrowed(model), "compiled", capacity=64)
    alone.read(0, PROMPTS[0])
    steps = np.stack([alone.step([token])[0].copy() for token in MORE[0].tolist()])
    assert relative(steps, exact[0, 1:]) < 1e-2


@pytest.mark.parametrize("solver", ["sweep", "jacobi"])
@pytest.mark.parametrize("window", [None, 5])
def test_prompts_with_early_passes_end_in_the_same_logits(window, solver):
    model = model_in_fp32(window=window)
    exact, _ = run(make(model, solver="sequential"))
    found, infos = run(make(model, solver=solver, segment=4, bf16_passes="on"))
    assert relative(found, exact) < 1e-2
    assert (found.argmax(-1) == exact.argmax(-1)).all()
    assert 2.0 <= infos[0].bf16_passes < infos[0].passes
    assert infos[0].certificate <= 0.05


def test_an_engine_creates_the_model_for_early_passes_once_and_only_if_needed(monkeypatch):
    made = []

    def counted(model, reader):
        made.append(model)
        return early_model(model, reader)

    monkeypatch.setattr(torch_base, "early_model", counted)
    engine = make(model_in_fp32(), bf16_passes="on")
    engine.read(0, [1, 2, 3])
    engine.step([1, 2, 3])
    assert not made
    for row in range(2):
        engine.read(row, PROMPTS[0])
    reading = PromptInPieces(engine, 2, PROMPTS[0], piece=40)
    while not reading.advance():
        pass
    assert len(made) == 1
    assert reading.info.bf16_passes > 0


def test_states_go_from_one_precision_to_the_other():
    model = model_in_fp32()
    wide, narrow = make(model), make(narrowed(model))
    wide.read(0, PROMPTS[0])
    narrow.load(1, wide.state(0))
    wide.load(2, narrow.state(1))
    expected = wide.step([5], [0]).copy()
    assert np.array_equal(wide.step([5], [2]), expected)
    assert 0.0 < relative(narrow.step([5], [1]), expected) < 1e-2
    assert narrow.position(1) == 45


def test_what_cannot_be_is_refused():
    model = model_in_fp32()
    with pytest.raises(ContextReadyError, match="bf16_passes=on works with native transformers only"):
        make(wrapped(model), bf16_passes="on")
    with pytest.raises(ContextReadyError, match="This model computes in bf16 already"):
        make(narrowed(model), bf16_passes="on")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of a tiny model that has learned a little."""
    folder = tmp_path_factory.mktemp("trained")
    train_helpers.run(train_helpers.make_data(folder), folder / "run", steps=40)
    return folder / "run"


def test_load_opens_a_model_in_a_precision(trained, monkeypatch):
    assert not is_narrow(contextready.load(trained).model)
    for native in (False, True):
        monkeypatch.setattr("contextready.device.multiplies_bf16", lambda _, native=native: native)
        assert is_narrow(contextready.load(trained, precision="auto").model) == native
    narrow = contextready.load(trained, precision="bf16")
    assert is_narrow(narrow.model)
    text = "river stone light"
    exact, found = (one.score(text).loss for one in (contextready.load(trained), narrow))
    assert found != exact
    assert found == pytest.approx(exact, rel=1e-2)
    with pytest.raises(ContextReadyError, match="Unknown precision 'fp8'"):
        contextready.load(trained, precision="fp8")
    with pytest.raises(ContextReadyError, match="An exported file has a precision of its own"):
        contextready.load(trained.parent / "no.gguf", precision="bf16")


@pytest.mark.parametrize("native", [False, True])
def test_the_command_says_how_many_passes_were_in_bf16(trained, capsys, monkeypatch, native):
    monkeypatch.setattr("contextready.device.multiplies_bf16", lambda _: native)
    words = ["generate", str(trained), " ".join(["river stone light"] * 40), "--max-tokens", "4", "--temperature", "0"]

    def said(*more):
        assert main([*words, "--stats", *more]) == 0
        return capsys.readouterr()

    without, forced, auto = (said("--bf16-passes", when) for when in ("off", "on", "auto"))
    assert "in bf16" not in without.err
    assert "passes in bf16" in forced.err
    assert ("passes in bf16" in auto.err) == native
    assert forced.out == auto.out == without.out
    narrow = said("--precision", "bf16")
    assert ("this hardware emulates bf16" in narrow.err) != native
    assert "passes in bf16" in narrow.err
    assert "emulates" not in said("--precision", "auto").err
