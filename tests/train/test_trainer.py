"""The training loop: resuming changes nothing, updates are correct, and metrics are complete."""

import io
import json
import os
import signal
from math import exp

import pytest
import torch
from train_helpers import (
    kept_steps,
    metrics,
    no_interrupts,
    recipe_file,
    run,
    sums,
    tiny,
    trainer,
    words,
)

from contextready.cli.display import ConsoleDisplay
from contextready.cli.main import main
from contextready.device import multiplies_bf16
from contextready.errors import ContextReadyError
from contextready.formats import limits
from contextready.runs.checkpoint import open_checkpoint, step_folder
from contextready.runs.metrics import read_metrics
from contextready.train.schedule import passes_of_step
from contextready.train.trainer import find_device, make_optimizer, train

VARIANTS = {
    "context-ready": {"dropout": 0.2, "passes": "2..5"},
    "transformer": {"correction": None, "dropout": 0.2},
    "accumulating": {"dropout": 0.2, "accumulate": 2},
    "fixed K": {"passes": 3},
    "convergence": {"convergence_weight": 0.5, "correction_lr": 3.0, "correction_gain": "channel"},
    "recomputing": {"dropout": 0.2, "checkpoint_passes": True},
    "implicit": {"dropout": 0.2, "gradient": "implicit", "adjoint_steps": 2},
    "truncated": {"dropout": 0.2, "gradient": "truncated", "accumulate": 2},
    "shallow": {"passes": "1..2", "bias": True},
    "as the author": {
        **{"init": "torch", "bias": True, "head_bias": True, "rope": "integer", "gradient": "unroll", "passes": "2..5"},
        **{"dropout": 0.2, "attention_dropout": 0.2, "dropout_at": "embedding", "convergence_weight": 0.1},
        **{"decay": "all", "beta2": 0.999, "weight_decay": 0.01, "warmup": 0},
    },
    "tied, in bf16": {"correction": "tied", "precision": "bf16", "dropout": 0.2},
}


class StopAfter:
    """A display that sends this process a real SIGTERM after a step."""

    def __init__(self, step):
        self.step = step

    def start(self, config, step, note):
        pass

    def update(self, record):
        if "loss" in record and record["step"] == self.step:
            os.kill(os.getpid(), signal.SIGTERM)

    def stop(self):
        pass


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_resumed_run_equals_one_that_never_stopped(data, tmp_path, variant):
    changes = VARIANTS[variant]
    whole = run(data, tmp_path / "whole", **changes)
    for last in (4, 8, 12):
        torch.manual_seed(last)  # nothing outside the run may matter
        parts = run(data, tmp_path / "parts", **changes | {"steps": last})
    assert sums(parts.checkpoint) == sums(whole.checkpoint)
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")
    assert kept_steps(tmp_path / "parts") == kept_steps(tmp_path / "whole")
    assert parts.val_loss == whole.val_loss


@pytest.mark.parametrize("passes", ["2..5", "1@0.5,2@0.2,2..4@0.3"])
@pytest.mark.parametrize("stop", [1, 3, 7, 11])
def test_a_run_interrupted_at_any_step_resumes_as_if_never_interrupted(data, tmp_path, stop, passes):
    changes = {"dropout": 0.2, "passes": passes, "schedule": "cosine", "accumulate": 2, "gradient": "truncated"}
    whole = run(data, tmp_path / "whole", **changes)
    stopped = train(tiny(data, tmp_path / "run", **changes), StopAfter(stop))
    assert (stopped.step, stopped.stopped_by) == (stop, signal.SIGTERM)
    assert stopped.checkpoint == step_folder(tmp_path / "run", stop)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    resumed = run(data, tmp_path / "run", **changes)
    assert resumed.stopped_by is None
    assert sums(resumed.checkpoint) == sums(whole.checkpoint)
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")


def test_the_depths_of_a_run_are_those_of_its_schedule(data, tmp_path):
    config = tiny(data, tmp_path / "run", passes="2..5", log_every=1)
    train(config, StopAfter(5))
    train(config)
    found = {r["step"]: r["passes"] for r in read_metrics(tmp_path / "run") if "loss" in r}
    assert found == {step + 1: passes_of_step(config.train, step) for step in range(12)}
    assert len(set(found.values())) > 1


def test_a_run_that_is_done_is_left_as_it_is(data, tmp_path):
    done = run(data, tmp_path / "run")
    before = metrics(tmp_path / "run"), sums(done.checkpoint)
    again = run(data, tmp_path / "run")
    assert (metrics(tmp_path / "run"), sums(again.checkpoint)) == before
    assert again.val_loss is None


def test_training_learns(data, tmp_path):
    run(data, tmp_path / "run", steps=60, eval_every=30, save_every=60)
    losses = [r["val_loss"] for r in read_metrics(tmp_path / "run") if "val_loss" in r]
    assert losses[0] > losses[1] > losses[2]
    assert losses[0] - losses[2] > 1


def test_every_logged_record_says_everything(data, tmp_path):
    run(data, tmp_path / "run")
    records = [r for r in read_metrics(tmp_path / "run") if "loss" in r]
    assert [r["step"] for r in records] == [2, 4, 6, 8, 10, 12]
    for r in records:
        assert set(r) == {"step", "tokens", "seconds", "macs", "loss", "lr", "grad_norm", "passes", "residual"}
        assert r["tokens"] == r["step"] * 4 * 16
        assert r["residual"] > 0
    validations = [r for r in read_metrics(tmp_path / "run") if "val_loss" in r]
    assert [r["step"] for r in validations] == [0, 4, 8, 12]
    assert all(r["val_perplexity"] == pytest.approx(exp(r["val_loss"])) for r in validations)


def test_the_record_of_the_last_step_has_a_residual_too(data, tmp_path):
    run(data, tmp_path / "run", steps=5)
    (last,) = [r for r in read_metrics(tmp_path / "run") if "loss" in r and r["step"] == 5]
    assert last["residual"] > 0


def test_only_matrices_decay(data, tmp_path):
    at = trainer(data, tmp_path / "run", bias=True, weight_decay=0.3)
    groups = at.optimizer.param_groups
    assert all(group["weight_decay"] == (0.3 if p.dim() == 2 else 0.0) for group in groups for p in group["params"])
    assert sum(len(group["params"]) for group in groups) == len(list(at.model.parameters()))
    assert all(group["fused"] and group["betas"] == (0.9, 0.95) for group in at.optimizer.param_groups)
    assert all(group["eps"] == 1e-8 for group in at.optimizer.param_groups)


def test_the_correction_has_its_own_learning_rate(data, tmp_path):
    """The first update of AdamW moves every weight with a gradient by the learning rate."""
    at = trainer(data, tmp_path / "run", warmup=0, lr=1e-3, correction_lr=5.0, weight_decay=0.0, passes=2)
    before = {name: p.detach().clone() for name, p in at.model.named_parameters()}
    at.step()
    for name, p in at.model.named_parameters():
        moved = (p.detach() - before[name]).abs().max().item()
        assert moved == pytest.approx(5e-3 if name.startswith("correction.") else 1e-3, rel=1e-2), name


@pytest.mark.parametrize("decay", ["matrices", "all"])
def test_decay_shrinks_matrices_only_or_everything(data, tmp_path, decay):
    config = tiny(data, tmp_path / "run", bias=True, weight_decay=0.5, lr=0.1, decay=decay, eps=1e-6)
    at = trainer(data, tmp_path / "run", bias=True)
    optimizer = make_optimizer(at.model, config)
    before = [p.detach().clone() for p in at.model.parameters()]
    for p in at.model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for p, was in zip(at.model.parameters(), before, strict=True):
        torch.testing.assert_close(p.detach(), was * 0.95 if p.dim() == 2 or decay == "all" else was)
    assert all(group["eps"] == 1e-6 for group in optimizer.param_groups)


def test_accumulated_gradients_are_those_of_the_larger_batch(data, tmp_path):
    whole = trainer(data, tmp_path / "whole", batch_size=8)
    parts = trainer(data, tmp_path / "parts", batch_size=2, accumulate=4)
    for _ in range(3):
        a, b = whole.step(), parts.step()
        assert (a["tokens"], a["passes"], a["macs"]) == (b["tokens"], b["passes"], b["macs"])
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)


def test_the_gradient_is_clipped_and_its_norm_reported_unclipped(data, tmp_path):
    at = trainer(data, tmp_path / "run", clip=1e-3)
    seen = []
    at.optimizer.register_step_pre_hook(lambda *_: seen.append(gradient(at).norm().item()))
    record = at.step()
    assert record["grad_norm"] > 0.1
    assert seen == [pytest.approx(1e-3, rel=1e-3)]


def test_the_first_update_moves_a_vector_by_the_rate_of_the_schedule(data, tmp_path):
    """Adam's first update is the rate times the sign of the gradient."""
    at = trainer(data, tmp_path / "run", lr=1e-2, warmup=4)
    norm = at.model.backbone.final_norm.weight
    before = norm.detach().clone()
    assert at.step()["lr"] == 1e-2 / 4
    torch.testing.assert_close((norm.detach() - before).abs(), torch.full_like(before, 1e-2 / 4), rtol=1e-3, atol=0)


def gradient(at):
    return torch.cat([p.grad.flatten() for p in at.model.parameters() if p.grad is not None])


def test_bf16_keeps_weights_and_moments_in_fp32(data, tmp_path):
    result = run(data, tmp_path / "run", precision="bf16", steps=4)
    opened = open_checkpoint(result.checkpoint)
    for name in ("model", "optimizer"):
        assert {tensor.dtype for tensor in opened.tensors(name).values()} == {torch.float32}
    full = run(data, tmp_path / "full", precision="fp32", steps=4)
    assert sums(full.checkpoint) != sums(result.checkpoint)
    assert result.val_loss == pytest.approx(full.val_loss, rel=1e-2)


def test_auto_precision_is_bf16_only_where_it_is_native(data, tmp_path, monkeypatch):
    assert trainer(data, tmp_path / "auto", precision="auto").bf16 == multiplies_bf16(torch.device("cpu"))
    for native in (False, True):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda native=native: native)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        assert trainer(data, tmp_path / f"{native}", precision="auto").bf16 == native
        assert not trainer(data, tmp_path / f"{native}", precision="fp32").bf16
    assert not multiplies_bf16(torch.device("meta"))


def test_an_unknown_device_is_refused():
    for name in ("tpu", "cuda:99", ""):
        with pytest.raises(ContextReadyError, match="is not available on this machine"):
            find_device(name)


def test_a_cut_off_line_of_metrics_is_dropped(data, tmp_path):
    whole = run(data, tmp_path / "whole")
    run(data, tmp_path / "run", steps=8)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "loss": 1.0}\n{"step": 10, "lo')
    assert read_metrics(tmp_path / "run")[-1]["step"] == 9
    assert sums(run(data, tmp_path / "run").checkpoint) == sums(whole.checkpoint)
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 0, "lo\n{"step": 1}\n')
    with pytest.raises(ContextReadyError, match="line 1 is not JSON"):
        read_metrics(tmp_path / "run")


def test_a_run_killed_before_its_first_checkpoint_begins_afresh(data, tmp_path):
    at = trainer(data, tmp_path / "run")
    at.objective = None  # dies in its first step
    with pytest.raises(AttributeError):
        at.run(no_interrupts())
    run(data, tmp_path / "run")
    run(data, tmp_path / "whole")
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_gets_every_number(data, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for last in (8, 12):
        run(data, tmp_path / "run", steps=last, tensorboard=True)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    for name in ("loss", "lr", "grad_norm", "passes", "residual", "val_loss", "val_perplexity"):
        expected = [(r["step"], r[name]) for r in read_metrics(tmp_path / "run") if name in r]
        found = [(event.step, event.value) for event in events.Scalars(name)]
        assert found == [(step, pytest.approx(value, rel=1e-6)) for step, value in expected]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_wandb_runs_offline(data, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    assert run(data, tmp_path / "run", steps=4, wandb="tiny").step == 4
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))


def test_the_live_line_shows_what_matters(data, tmp_path):
    from rich.console import Console

    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, color_system=None, width=160)
    train(tiny(data, tmp_path / "run"), ConsoleDisplay(console))
    shown = screen.getvalue()
    for part in ("loss ", "ppl ", " tokens/s", "K=", "residual ", "/12", "val loss "):
        assert part in shown
    assert "12 steps of 64 tokens" in shown.replace("\n", " ")


def test_elsewhere_only_validations_are_lines(data, tmp_path, capsys):
    assert main(["train", recipe_file(tmp_path), *words(data, tmp_path / "run")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("val loss" in line for line in lines) == 4
    assert not any("K=" in line for line in lines)


def test_paths_are_printed_as_they_are_where_there_is_no_terminal(data, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    folder = tmp_path / "a [b] c" / "run-with-a-name-that-is-longer-than-a-line-of-eighty-columns-can-hold"
    assert main(["train", recipe_file(tmp_path), *words(data, folder, steps=2)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"Next: crt eval {folder}")


def test_metrics_are_strict_json(data, tmp_path):
    run(data, tmp_path / "run", steps=2, eval_tokens=16)
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)


def test_a_run_larger_than_the_memory_is_refused_before_a_model_is_built(data, tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "total_memory", lambda: 10_000)
    with pytest.raises(ContextReadyError, match=r"Training .* parameters .* would take"):
        trainer(data, tmp_path / "run")
