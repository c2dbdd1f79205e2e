"""Training by backpropagation through time (gradient=bptt): its settings, a real run, and its cost."""

import io
import json
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from helpers import random_tokens
from torch.utils.flop_counter import FlopCounterMode
from train_helpers import kept_steps, metrics, recipe_file, run, sums, tiny, trainer, words

from contextready import ContextReadyError, account, build_model
from contextready.cli.display import ConsoleDisplay
from contextready.cli.main import main
from contextready.data.batches import Sequences
from contextready.data.shards import Data
from contextready.evaluate.evaluate import evaluate_checkpoint
from contextready.measure.perplexity import sequential_score
from contextready.model.correction import CORRECTIONS
from contextready.runs.checkpoint import open_checkpoint, step_folder
from contextready.runs.config import TrainConfig, build_run
from contextready.runs.metrics import read_metrics
from contextready.runs.recipes import resolve
from contextready.train.cost import sequence_macs
from contextready.train.schedule import passes_of_step
from contextready.train.trainer import train

BPTT = {"gradient": "bptt"}


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """A run with all its checkpoints."""
    folder = tmp_path_factory.mktemp("bptt") / "run"
    run(data, folder, **BPTT, steps=60, eval_every=20, save_every=20, keep=9, log_every=5)
    return folder


@pytest.mark.parametrize("said", [{}, {"passes": "3..7"}, {"passes": 2}, {"passes": None}])
def test_a_stream_has_no_passes_whatever_the_recipe_says(said):
    shape = {"vocab_size": 30, "width": 8, "layers": 1, "heads": 2, "correction": "add", "data": "d", "out": "o"}
    t = build_run(shape | BPTT | said).train
    assert (t.gradient, t.passes) == ("bptt", None)
    assert passes_of_step(t, 3) is None


def test_a_recipe_becomes_a_stream(data):
    t = resolve("mini-d1", [f"data={data}", "gradient=bptt"]).train
    assert (t.passes, t.steps) == (None, 2000)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compile": True}, "leave compile and checkpoint_passes out"),
        ({"checkpoint_passes": True}, "leave compile and checkpoint_passes out"),
        ({"precision": "bf16"}, "leave precision=bf16 out"),
        ({"truncated_passes": 2}, "truncated_passes=2 needs gradient=truncated, but gradient=bptt"),
        ({"adjoint_steps": 2}, "adjoint_steps=2 needs gradient=implicit, but gradient=bptt"),
        ({"gradient": "bpt"}, "gradient=bpt is unknown; .*bptt"),
        ({"gradient": "unrol"}, "gradient=unrol is unknown; .*unroll"),
    ],
)
def test_settings_that_make_no_sense_are_refused_in_one_sentence(changes, message):
    with pytest.raises(ContextReadyError, match=message) as refused:
        TrainConfig(data="d", out="o", **BPTT | changes)
    assert "\n" not in str(refused.value)
    assert str(refused.value).count(". ") == 0


@pytest.mark.parametrize("gradient", ["bptt", "implicit"])
def test_a_transformer_has_no_other_gradient(data, tmp_path, gradient):
    with pytest.raises(ContextReadyError, match=f"gradient={gradient} needs a correction"):
        tiny(data, tmp_path / "run", correction=None, gradient=gradient)


def test_refusals_reach_the_command_line(data, tmp_path, capsys):
    told = words(data, tmp_path / "run", gradient="bptt", compile="true")
    assert main(["train", recipe_file(tmp_path), *told]) == 2
    err = capsys.readouterr().err
    assert err.startswith("crt train: gradient=bptt makes no parallel pass")
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_auto_precision_is_never_bf16(data, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert trainer(data, tmp_path / "unroll", precision="auto").bf16
    assert not trainer(data, tmp_path / "bptt", precision="auto", **BPTT).bf16


def test_it_learns(trained):
    losses = [r["val_loss"] for r in read_metrics(trained) if "val_loss" in r]
    assert all(after < before for before, after in pairwise(losses))
    assert losses[0] - losses[-1] > 1
    steps = [r["loss"] for r in read_metrics(trained) if "loss" in r]
    assert steps[-1] < steps[0] - 1


def test_its_records_have_no_passes_and_no_residual(trained):
    records = [r for r in read_metrics(trained) if "loss" in r]
    assert [r["step"] for r in records] == list(range(5, 61, 5))
    config = tiny("d", "o", **BPTT)
    each = 4 * sequence_macs(account(config.model), config.train, None)
    for r in records:
        assert (r["passes"], r["residual"]) == (None, None)
        assert r["macs"] == r["step"] * each


def test_validation_is_sequential(data, trained):
    validations = {r["step"]: r["val_loss"] for r in read_metrics(trained) if "val_loss" in r}
    assert sorted(validations) == [0, 20, 40, 60]
    windows = Sequences(Data(data).tokens("val"), 16, "validation")
    for step in (20, 40, 60):
        model = open_checkpoint(step_folder(trained, step)).model().eval()
        assert validations[step] == pytest.approx(sequential_score(model, windows, 256 // 16).loss, rel=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {"dropout": 0.2, "accumulate": 2},
        {"correction": "tied", "window": 5, "bias": True, "schedule": "constant"},
        {"correction": "block_head", "layers": 2, "dropout": 0.2, "batch_size": 1},
    ],
)
def test_a_resumed_run_equals_one_that_never_stopped(data, tmp_path, changes):
    whole = run(data, tmp_path / "whole", **BPTT, **changes)
    for last in (4, 8, 12):
        torch.manual_seed(last)
        parts = run(data, tmp_path / "parts", **BPTT, **changes | {"steps": last})
    assert sums(parts.checkpoint) == sums(whole.checkpoint)
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")
    assert kept_steps(tmp_path / "parts") == kept_steps(tmp_path / "whole")
    assert parts.val_loss == whole.val_loss


def test_an_update_is_that_of_autograd_through_the_stream(data, tmp_path):
    fast, slow = trainer(data, tmp_path / "fast", **BPTT), trainer(data, tmp_path / "slow", **BPTT)
    model = slow.model
    slow.objective.stream = lambda e: model.read(e, model.init_state(len(e)))[0]
    for _ in range(3):
        a, b = fast.step(), slow.step()
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)


def test_accumulated_gradients_are_those_of_the_larger_batch(data, tmp_path):
    whole = trainer(data, tmp_path / "whole", batch_size=8, **BPTT)
    parts = trainer(data, tmp_path / "parts", batch_size=2, accumulate=4, **BPTT)
    for _ in range(3):
        a, b = whole.step(), parts.step()
        assert (a["tokens"], a["macs"]) == (b["tokens"], b["macs"])
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)


def test_it_starts_from_another_run(data, tmp_path, trained):
    run(data, tmp_path / "unroll", steps=4)
    for origin in (tmp_path / "unroll", trained):
        out = tmp_path / f"from-{origin.name}"
        assert run(data, out, **BPTT, steps=2, init_from=str(origin)).step == 2
    first = read_metrics(tmp_path / f"from-{trained.name}")[0]["val_loss"]
    assert first == pytest.approx([r["val_loss"] for r in read_metrics(trained) if "val_loss" in r][-1], rel=1e-6)


@pytest.mark.parametrize(("before", "after"), [("unroll", "bptt"), ("bptt", "unroll")])
def test_a_run_does_not_resume_with_another_gradient(data, tmp_path, before, after):
    run(data, tmp_path / "run", gradient=before, steps=2)
    with pytest.raises(ContextReadyError, match="was trained with"):
        run(data, tmp_path / "run", gradient=after, steps=4)


@pytest.mark.parametrize(("before", "after"), [("unroll", "bptt"), ("bptt", "unroll")])
def test_the_refusal_names_the_setting_that_helps(data, tmp_path, before, after):
    run(data, tmp_path / "run", gradient=before, steps=2)
    with pytest.raises(ContextReadyError, match=f"set gradient={before}"):
        run(data, tmp_path / "run", gradient=after, steps=4)


def test_eval_works_on_its_checkpoint(data, trained, capsys):
    found = evaluate_checkpoint(open_checkpoint(trained), Data(data), torch.device("cpu"))
    windows = Sequences(Data(data).tokens("val"), 16)
    model = open_checkpoint(trained).model().eval()
    assert found.sequential.loss == pytest.approx(sequential_score(model, windows).loss, rel=1e-6)
    assert (found.rate_corrections, sorted(found.parallel)) == (5, [1, 2, 3, 5, 10])
    # The stream was trained, and many passes converge to the stream.
    assert found.parallel[10].loss == pytest.approx(found.sequential.loss, rel=0.05)
    assert main(["eval", str(trained), "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("correction", list(CORRECTIONS))
@pytest.mark.parametrize("changes", [{}, {"window": 2}, {"extra_ffn": True, "layers": 1}])
def test_multiply_accumulates_of_a_step_are_what_pytorch_counts(correction, changes):
    T = 4
    shape = {"vocab_size": 64, "width": 64, "layers": 2, "heads": 2, "correction": correction, "block_size": T}
    config = build_run(shape | {"data": "d", "out": "o"} | BPTT | changes)
    model, tokens = build_model(config.model), random_tokens(batch=1, length=T, vocab_size=64)
    with FlopCounterMode(display=False) as counter:
        logits, _ = model.stream(tokens, model.init_state(1))
        F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    predicted = sequence_macs(account(config.model), config.train, None)
    assert counter.get_total_flops() / 2 == pytest.approx(predicted, rel=0.1)


def test_a_dry_run_prints_the_plan_and_makes_nothing(data, tmp_path, capsys):
    told = words(data, tmp_path / "run", gradient="bptt")
    assert main(["train", recipe_file(tmp_path), *told, "--dry-run"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert not (tmp_path / "run").exists()
    assert (plan["train"]["gradient"], plan["train"]["passes"]) == ("bptt", None)
    cost = account(tiny(data, tmp_path / "run", **BPTT).model)
    # One pass of the blocks, a correction for every token, one head; a backward costs two forwards.
    each = 3 * 4 * (cost.macs_sequence(16, 1) + 16 * cost.macs_correction)
    assert (plan["cost"]["macs_per_step"], plan["cost"]["macs"]) == (each, 12 * each)
    assert plan["cost"]["parameters"] == cost.parameters


def test_the_command_trains_and_resumes(data, tmp_path, capsys):
    for steps, last in ((4, "Done at step 4"), (6, "Done at step 6")):
        told = words(data, tmp_path / "run", gradient="bptt", steps=steps)
        assert main(["train", recipe_file(tmp_path), *told]) == 0
        assert last in capsys.readouterr().out
    assert read_metrics(tmp_path / "run")[-1]["step"] == 6


def test_the_live_line_leaves_out_what_a_stream_has_not(data, tmp_path):
    from rich.console import Console

    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, color_system=None, width=160)
    train(tiny(data, tmp_path / "run", **BPTT), ConsoleDisplay(console))
    shown = screen.getvalue()
    assert "val loss " in shown
    assert "loss " in shown
    assert not any(part in shown for part in ("K=", "residual", "None"))
