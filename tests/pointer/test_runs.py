"""Runs on pointer chasing: they learn, stop when all is solved, resume to the same bits, and reject bad settings."""

import json

import numpy as np
import pytest
import torch
from distributed_helpers import launch
from train_helpers import no_interrupts

from contextready.cli.main import main
from contextready.cli.pointer import describe_outcome
from contextready.errors import ContextReadyError
from contextready.model.context_ready import build_model
from contextready.pointer.outcome import outcome, resolve_pointer
from contextready.pointer.source import SOLVED_ON, PointerSource
from contextready.pointer.task import PointerTask
from contextready.runs.checkpoint import newest_checkpoint, open_checkpoint
from contextready.runs.config import RunConfig, build_run
from contextready.runs.metrics import read_metrics
from contextready.train.source import open_source
from contextready.train.team import Team
from contextready.train.trainer import Trainer, train

SMALL = ["hops=1", "keys=2", "values=3", "width=16", "heads=2", "batch_size=8", "eval_every=4", "save_every=4"]


def small(out, *changes):
    given = {word.partition("=")[0] for word in changes}
    kept = [word for word in (*SMALL, "steps=10", "lr=1e-2") if word.partition("=")[0] not in given]
    return resolve_pointer([*kept, f"out={out}", *changes])


MODELS = {
    "transformer": ("correction=none",),
    "hybrid": ("correction=none", "extra_ffn=true"),
    "bptt": (),
    "unroll": ("gradient=unroll", "passes=2..3"),
    "implicit": ("gradient=implicit", "passes=4"),
}


def weights(run):
    return open_checkpoint(run).tensors("model")


@pytest.mark.parametrize("kind", MODELS)
def test_every_kind_of_model_learns_and_is_scored(tmp_path, kind):
    config = small(tmp_path / "run", "steps=30", *MODELS[kind])
    result = train(config)
    records = read_metrics(tmp_path / "run")
    scored = [record for record in records if "accuracy" in record]
    assert [record["step"] for record in scored] == [0, 4, 8, 12, 16, 20, 24, 28, 30]
    assert all(len(record["accuracy"]) == 2 for record in scored)
    assert scored[-1]["val_loss"] < 0.7 * scored[0]["val_loss"]
    assert result.val_loss == pytest.approx(scored[-1]["val_loss"])
    assert outcome(tmp_path / "run").step == 30


@pytest.mark.parametrize("queries", ["level", "none"])
def test_other_layouts_are_learned_and_the_final_query_is_scored(tmp_path, queries):
    config = small(tmp_path / "run", "steps=30", "answers=absent", f"queries={queries}")
    train(config)
    scored = [record for record in read_metrics(tmp_path / "run") if "accuracy" in record]
    assert all(len(record["accuracy"]) == 3 for record in scored)
    assert scored[-1]["val_loss"] < 0.7 * scored[0]["val_loss"]
    assert RunConfig.from_dict(open_checkpoint(tmp_path / "run").config) == config


def test_a_large_clip_clips_nothing(tmp_path):
    """The recipe for 20 hops relies on this: the gradient keeps its bits."""
    at = Trainer(small(tmp_path / "run", "clip=1e9"))
    for parameter in at.model.parameters():
        parameter.grad = torch.randn_like(parameter)
    before = [parameter.grad.clone() for parameter in at.model.parameters()]
    torch.nn.utils.clip_grad_norm_(at.model.parameters(), at.config.train.clip)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(at.model.parameters(), before, strict=True))


@pytest.mark.parametrize("kind", ["transformer", "bptt"])
def test_a_run_resumes_to_the_same_bits(tmp_path, kind):
    train(small(tmp_path / "whole", *MODELS[kind]))
    train(small(tmp_path / "parts", *MODELS[kind], "steps=4"))
    assert outcome(tmp_path / "parts").step == 4
    train(small(tmp_path / "parts", *MODELS[kind]))
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(one[name], other[name]) for name in one)
    whole, parts = ([r for r in read_metrics(tmp_path / run) if "accuracy" in r] for run in ("whole", "parts"))
    drop = ("seconds",)
    # Step 4 was the last step of the first part, so it was scored thoroughly there.
    assert [{k: v for k, v in r.items() if k not in drop} for r in whole if r["step"] != 4] == [
        {k: v for k, v in r.items() if k not in drop} for r in parts if r["step"] != 4
    ]


def test_a_run_stops_when_everything_is_solved_and_stays_so(tmp_path, capsys):
    words = ["pointer", "hops=1", "keys=2", "values=3", "width=32", "heads=2", "batch_size=16", "correction=none"]
    words += ["layers=2", "lr=5e-3", "warmup=10", "eval_every=25", "eval_tokens=5000", "steps=600", "beta2=0.95"]
    words += [f"out={tmp_path / 'run'}"]
    assert main(words) == 0
    said = capsys.readouterr().out
    found = outcome(tmp_path / "run")
    assert found.solved
    assert found.levels_solved == 2
    assert found.step < 600
    assert f"All 2 levels solved at step {found.step:,}" in said
    assert open_checkpoint(tmp_path / "run").progress.solved
    assert (tmp_path / "run" / "wave.png").is_file()
    assert (tmp_path / "run" / "wave.svg").read_text().startswith("<?xml")
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert main(words) == 0
    assert f"All 2 levels solved at step {found.step:,}" in capsys.readouterr().out
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def source(*changes):
    config = small("run", *changes)
    return open_source(config, Team(torch.device("cpu"))), config


def test_a_batch_is_the_same_for_any_number_of_processes():
    one, _ = source("batch_size=6")
    for first in (0, 6, 12):
        whole = one.read(first, 6)
        parts = [one.read(first + i * 2, 2) for i in range(3)]
        for kind in range(2):
            assert torch.equal(whole[kind], torch.cat([part[kind] for part in parts]))
    assert not torch.equal(one.read(0, 6)[0], one.read(6, 6)[0])
    other, _ = source("batch_size=6", "seed=1")
    assert not torch.equal(one.read(0, 6)[0], other.read(0, 6)[0])
    assert one.identity != other.identity


def test_two_processes_learn_what_one_learns(tmp_path):
    words = [*SMALL, "steps=6", "lr=1e-2"]
    train(resolve_pointer([*words, f"out={tmp_path / 'one'}"]))
    code, said, errors = launch(tmp_path / "launch", "-m", "contextready", "pointer", *words, f"out={tmp_path / 'two'}")
    assert code == 0, errors
    assert said.count("levels solved after all 6 steps") == 1
    one, two = (read_metrics(tmp_path / name) for name in ("one", "two"))
    assert [r["step"] for r in one] == [r["step"] for r in two]
    for ours, theirs in zip(one, two, strict=True):
        key = "loss" if "loss" in ours else "val_loss"
        assert ours[key] == pytest.approx(theirs[key], rel=1e-5)
    scored = [[r["accuracy"] for r in records if "accuracy" in r] for records in (one, two)]
    np.testing.assert_allclose(*scored, atol=0.01)


def test_validations_are_fresh_and_the_last_is_thorough(monkeypatch):
    drawn = []
    original = PointerTask.batch

    def remember(self, split, seed, step, rows):
        drawn.append((split, seed, step, rows))
        return original(self, split, seed, step, rows)

    monkeypatch.setattr(PointerTask, "batch", remember)
    assert SOLVED_ON == 2000
    config = small("unused", "eval_tokens=none")
    model = build_model(config.model)
    assert PointerSource(config).score(model, 0, (0, 1), False).asked_L.tolist() == [4000, 2000]
    drawn.clear()
    config = small("unused")
    assert config.train.eval_tokens == 500 * config.task.tokens
    one = PointerSource(config)
    shares = [one.score(model, 7, (i, 2), False) for i in range(2)] + [one.score(model, 7, (0, 1), True)]
    assert [(split, rows) for split, _, _, rows in drawn] == [("test", 500), ("test", 500), ("test", 2000)]
    assert len({step for _, _, step, _ in drawn}) == 2
    assert [share.asked_L.tolist() for share in shares] == [[500, 250], [500, 250], [4000, 2000]]
    drawn.clear()
    one.score(model, 8, (0, 1), False)
    one.score(model, 8, (0, 1), True)
    numbers = {step for _, _, step, _ in drawn}
    assert len(numbers) == 2
    assert not numbers & {14, 15}


def test_solved_on_few_is_confirmed_on_many(tmp_path, monkeypatch):
    """A validation that finds everything solved is repeated thoroughly, and only that counts."""
    at = Trainer(small(tmp_path / "run", "steps=4"))
    calls = []

    def summary(shares):
        calls.append(at.progress.step)
        # Few say it is solved at step 4; many say it is not.
        return {"val_loss": 1.0, "accuracy": [1.0, 1.0], "levels_solved": 2, "solved": len(calls) == 1}

    monkeypatch.setattr(at.source, "summary", summary)
    at._validate(None)
    assert len(calls) == 2
    assert not at.progress.solved
    monkeypatch.undo()
    assert at.run(no_interrupts()).step == 4


def test_the_task_decides_vocabulary_length_and_window():
    config = resolve_pointer(["hops=3", "keys=4", "values=5"])
    task = PointerTask(hops=3, keys=4, values=5)
    assert config.task == task
    assert (config.model.vocab_size, config.train.block_size, config.model.window) == (task.vocab_size, task.tokens, 32)
    assert resolve_pointer(["window=9"]).model.window == 9
    assert resolve_pointer(["window=none"]).model.window is None


def test_the_miniature_and_the_papers_recipes():
    mini = resolve_pointer([])
    assert (mini.task.hops, mini.task.keys, mini.task.values) == (4, 3, 10)
    assert (mini.model.width, mini.model.window, mini.model.layers, mini.train.gradient) == (64, 26, 1, "bptt")
    paper = resolve_pointer(["pointer-d1-c256"])
    assert (paper.model.width, paper.model.heads, paper.model.window, paper.train.block_size) == (256, 4, 38, 272)
    assert (paper.train.batch_size, paper.train.lr, paper.train.steps) == (64, 1e-4, 50_000)
    wave = resolve_pointer(["pointer-d1-c128"])
    assert (wave.model.width, wave.model.window, wave.train.lr, wave.train.block_size) == (128, 52, 1e-3, 522)
    assert (wave.task.keys, wave.task.values, wave.model.vocab_size) == (10, 20, 124)
    long = resolve_pointer(["pointer-d1-c512"])
    assert (long.model.width, long.model.window, long.train.lr, long.train.block_size) == (512, None, 1e-4, 502)
    assert (long.task.hops, long.task.keys, long.task.values, long.model.vocab_size) == (19, 8, 16, 180)
    for run in (paper, wave, long):
        t = run.train
        # Adam without decay at a constant rate.
        assert (t.weight_decay, t.beta1, t.beta2, t.schedule, t.warmup) == (0.0, 0.9, 0.999, "constant", 0)
        assert (t.batch_size, t.precision, run.model.dropout, run.task.answers) == (64, "fp32", 0.0, "absent")
    assert (paper.train.clip, wave.train.clip, long.train.clip) == (1.0, 1.0, 1e9)
    deep = resolve_pointer(["pointer/pointer-n12-c256", "answers=visible"])
    assert (deep.model.layers, deep.model.correction, deep.train.passes) == (12, None, "1")
    assert deep.task.answers == "visible"


def test_the_command_train_knows_the_task_too(tmp_path, capsys):
    words = ["train", "pointer-mini", *SMALL, "steps=2", f"out={tmp_path / 'run'}"]
    assert main(words) == 0
    assert "0 of 2 levels solved after all 2 steps" in capsys.readouterr().out
    assert main(["train", "pointer-mini", "--dry-run"]) == 0
    assert json.loads(capsys.readouterr().out)["task"]["hops"] == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data=here"], "data=here cannot be used with pointer chasing"),
        (["vocab_size=9"], "vocab_size=9 cannot be used with pointer chasing"),
        (["block_size=9"], "block_size=9 cannot be used with pointer chasing"),
        (["init_from=there"], "There is no run or checkpoint at there"),
        (["pretrained=there"], "pretrained=there cannot be used with pointer chasing"),
        (["hops=0"], "hops must be at least 1, but got 0"),
        (["hops=two"], "hops must be a whole number, but got two"),
        (["answers=maskd"], "did you mean 'masked'?"),
        (["queries=some"], "queries=some is unknown; choose one of: level, all, none"),
        (["queries=none"], "queries=none has no queries that answers=masked could follow; set answers=absent."),
        (["hops=1", "keys=1", "values=2", "out=runs/none"], "has too few sequences to hold some out for testing"),
        (["hopps=3"], "Unknown setting 'hopps'; did you mean 'hops'?"),
        (["task=language"], "task=language is unknown"),
        (["mini-d1"], "The recipe mini-d1 is for text, not pointer chasing; use: crt train mini-d1"),
        (["task=text"], "crt pointer cannot train with task=text; remove it"),
        (["correction=none", "gradient=bptt"], "gradient=bptt needs a correction"),
        (
            ["passes=10"],
            "passes=10 does not apply to gradient=bptt, which makes no parallel passes; set gradient=truncated",
        ),
        (["passes=2..5"], "passes=2..5 does not apply to gradient=bptt"),
        (["out=file"], "file cannot be created because a file is in the way; choose another"),
        (["out=file/below"], "file/below cannot be created because a file is in the way"),
    ],
)
def test_bad_settings_are_rejected_in_a_sentence(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert main(["pointer", *words]) == 2
    assert message in capsys.readouterr().err


def test_settings_of_the_task_are_not_for_text():
    with pytest.raises(ContextReadyError, match=r"hops=3 is a setting of pointer chasing \(crt pointer\)"):
        build_run({"hops": 3, "width": 8})


def test_a_transformers_weights_can_be_the_start(tmp_path):
    train(small(tmp_path / "plain", "correction=none", "steps=6"))
    ready = Trainer(small(tmp_path / "ready", f"init_from={tmp_path / 'plain'}"))
    assert ready.config.model.correction_init == "zero"
    theirs = weights(tmp_path / "plain")
    ours = dict(ready.model.backbone.named_parameters())
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_run_of_another_variant_is_not_resumed(tmp_path):
    train(small(tmp_path / "run", "steps=2"))
    with pytest.raises(ContextReadyError, match="was trained with answers=masked, not answers=visible"):
        train(small(tmp_path / "run", "answers=visible"))


def test_verbs_for_text_report_that_a_run_learned_another_task(tmp_path, capsys):
    train(small(tmp_path / "run", "steps=2"))
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    for words in (["eval", run], ["generate", run, "text"], ["convert", run, out], ["export", run, f"{out}.gguf"]):
        assert main(words) == 2
        assert "was trained on pointer chasing, not on text" in capsys.readouterr().err


def test_the_example_is_shown_and_nothing_is_trained(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["pointer", "--show", "hops=2", "answers=visible"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(
        "52 tokens, vocabulary of 23, answers visible, attention window 26:\nLevel 0 (base table and queries)"
    )
    assert list(tmp_path.iterdir()) == []
    shown = [(["window=9"], "9"), (["window=none"], "none"), (["pointer-d1-c256", "keys=3"], "26")]
    shown += [(["pointer-d1-c256"], "38"), (["pointer-d1-c128"], "52"), (["pointer-d1-c512"], "none")]
    for words, window in shown:
        assert main(["pointer", "--show", *words]) == 0
        assert f"window {window}:" in capsys.readouterr().out


def test_in_a_terminal_the_table_is_live(tmp_path):
    from io import StringIO

    from rich.console import Console

    from contextready.cli.pointer_display import PointerDisplay

    shown = StringIO()
    display = PointerDisplay(Console(file=shown, force_terminal=True, width=100, highlight=False))
    train(small(tmp_path / "run"), display)
    text = shown.getvalue()
    assert "L0" in text
    assert "L1" in text
    assert "of 2 solved" in text
    assert "step 5 of 10, loss" in text


def test_outcomes_are_described_in_a_sentence(tmp_path):
    assert outcome(tmp_path) is None
    train(small(tmp_path / "run", "steps=2"))
    found = outcome(tmp_path / "run")
    assert describe_outcome(found, 2).startswith("0 of 2 levels solved after all 2 steps (")
    done = found._replace(solved=True, levels_solved=2, step=1234)
    assert describe_outcome(done, 2).startswith("All 2 levels solved at step 1,234, after ")


def test_damaged_folders_are_reported_in_a_sentence(tmp_path, capsys):
    run = tmp_path / "run"
    words = ["pointer", *SMALL, "steps=2", f"out={run}"]
    assert main(words) == 0
    capsys.readouterr()
    metrics = run / "metrics.jsonl"
    for content, message in (
        ("", "is finished, but its file metrics.jsonl with the validations is missing or empty"),
        ('{"loss": 1}\n', "metrics.jsonl, line 1 is not a record of a run"),
        ("5\n", "metrics.jsonl, line 1 is not a record of a run"),
    ):
        metrics.write_text(content)
        assert main(words) == 2
        assert message in capsys.readouterr().err
    (newest_checkpoint(run) / "config.json").write_text("{}")
    assert main(words) == 2
    assert "config.json" in capsys.readouterr().err
