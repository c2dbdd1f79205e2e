"""Training on state tracking: scores, the curriculum, resuming, the GRU control, and pretrained models."""

from pathlib import Path

import numpy as np
import pytest
import torch
from train_helpers import no_interrupts

from contextready.cli.main import main
from contextready.data.shards import IGNORED
from contextready.model.config import ModelConfig
from contextready.model.context_ready import build_model
from contextready.runs.checkpoint import open_checkpoint
from contextready.runs.metrics import read_metrics
from contextready.state.lengths import measure, read_lengths
from contextready.state.names import TASKS, resolve_task
from contextready.state.score import StateScore, score_passes, score_stream, solved_length
from contextready.state.source import StateSource
from contextready.state.word import WordTask
from contextready.train.trainer import Trainer, train

MODEL = Path(__file__).parents[2] / ".." / "shared" / "models" / "stories260K-hf"
SMALL = ("width=16", "heads=2", "batch_size=16", "eval_every=5", "eval_tokens=500", "save_every=5", "length=8")


@pytest.fixture(autouse=True)
def _few_tests(monkeypatch):
    for name in ("TESTED_ON", "TESTED_ON_IF_PRETRAINED", "PASSES_ON"):
        monkeypatch.setattr(f"contextready.state.lengths.{name}", 8)
    monkeypatch.setattr("contextready.state.source.SOLVED_ON", 40)


def config(out, *words, task="parity"):
    return resolve_task(task, [*SMALL, f"out={out}", *words])


def random_model(vocab_size=3, **changes):
    settings = {"vocab_size": vocab_size, "width": 16, "layers": 1, "heads": 2, "correction": "add"} | changes
    model = build_model(ModelConfig(**settings)).double().eval()
    torch.manual_seed(1)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model


@torch.no_grad()
def test_a_score_counts_the_answers_after_each_symbol():
    task, model = WordTask(length=6, group="Z2"), random_model()
    batch = task.batch("test", 0, 0, 50)
    score = score_stream(model, task, batch)
    logits_BTV = torch.cat([model.stream(row_T[None], model.init_state(1))[0] for row_T in batch.inputs_BT])
    right_BT = logits_BTV.argmax(-1) == batch.targets_BT
    assert score.asked_N.tolist() == [50] * 6
    assert score.right_N.tolist() == right_BT[:, 1:].sum(0).tolist()
    nll = torch.nn.functional.cross_entropy(logits_BTV[:, 1:].flatten(0, 1), batch.targets_BT[:, 1:].flatten())
    assert score.loss == pytest.approx(float(nll), rel=1e-5)


def test_enough_passes_give_the_streamed_score():
    task, model = WordTask(length=6, group="Z2"), random_model(window=3)
    batch = task.batch("test", 0, 0, 50)
    by_passes = score_passes(model, task, batch, [1, 8])
    streamed = score_stream(model, task, batch)
    assert by_passes[8].right_N.tolist() == streamed.right_N.tolist()
    assert by_passes[8].loss == pytest.approx(streamed.loss)
    assert by_passes[1].loss != pytest.approx(streamed.loss)


def test_a_length_is_solved_if_all_shorter_ones_are():
    score = StateScore(np.full(16, 1000.0), np.array([1000.0] * 12 + [900.0] + [1000.0] * 3), np.zeros(16))
    # The last quarter of 13 symbols are 3, one of which is bad; of 16 symbols they are 4.
    assert score.accuracy(13) == pytest.approx(2900 / 3000)
    assert score.accuracy(16) == pytest.approx(3900 / 4000)
    assert score.solved == 12
    assert solved_length([1.0, 0.98, 1.0]) == 1
    assert solved_length([0.5]) == 0
    assert solved_length([1.0, 0.99]) == 2


def test_a_position_that_is_never_asked_counts_as_solved():
    score = StateScore(np.array([0.0, 10.0]), np.array([0.0, 10.0]), np.zeros(2))
    assert score.curve == [1.0, 1.0]


def test_the_names_of_tasks():
    for name in TASKS:
        assert resolve_task(name, []).train.out == f"runs/{name}"
    s5 = resolve_task("s5", ["alphabet=none", "window=4"])
    assert (s5.task.group, s5.task.alphabet, s5.model.window, s5.model.vocab_size) == ("S5", None, 4, 121)
    assert resolve_task("parity", []).task == WordTask(group="Z2")


def test_a_curriculum_shortens_sequences_and_their_cost(tmp_path):
    at = Trainer(config(tmp_path / "run", "curriculum=0.5", "steps=16"))
    lengths = [at.source.read(16 * step, 16)[0].shape[1] - 1 for step in range(16)]
    assert lengths == [1, 2, 3, 4, 5, 6, 7, 8] + [8] * 8
    for _ in range(16):
        record = at.step()
    assert record["tokens"] == 16 * sum(1 + n for n in lengths)
    full = Trainer(config(tmp_path / "full", "curriculum=0", "steps=16"))
    for _ in range(16):
        longer = full.step()
    assert longer["tokens"] == 16 * 16 * 9
    assert record["macs"] < longer["macs"]
    assert at.macs(None, 0, 9) == full.macs(None, 0, 9)


def test_a_resumed_run_ends_with_the_same_bits(tmp_path):
    whole = train(config(tmp_path / "whole", "steps=10"))
    at = Trainer(config(tmp_path / "cut", "steps=10"))
    for _ in range(5):
        at.step()
    at._save(None, None)
    resumed = Trainer(config(tmp_path / "cut", "steps=10")).run(no_interrupts())
    first, second = (open_checkpoint(r.checkpoint).model() for r in (whole, resumed))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert open_checkpoint(whole.checkpoint).progress.skipped_tokens > 0
    tokens = [[r["tokens"] for r in read_metrics(tmp_path / name) if r["step"] == 10][-1] for name in ("whole", "cut")]
    assert tokens[0] == tokens[1]


def test_one_layer_learns_parity_and_reads_longer_sequences(tmp_path, capsys):
    words = [*SMALL, "width=32", "batch_size=64", "window=4", "steps=300", "eval_every=50", "lr=3e-3"]
    names = {word.partition("=")[0]: word for word in words}
    assert main(["task", "parity", *names.values(), f"out={tmp_path / 'run'}"]) == 0
    out = capsys.readouterr().out
    found = read_lengths(tmp_path / "run")
    assert found.lengths == [8, 16, 32, 64]
    assert found.solved == 64
    assert found.accuracy == [1.0] * 4
    assert found.step < 300
    assert "Longest length solved: 64 of 64." in out
    # A finished run is not trained or tested again.
    before = (tmp_path / "run" / "lengths.json").stat().st_mtime_ns
    assert main(["task", "parity", *names.values(), f"out={tmp_path / 'run'}"]) == 0
    assert (tmp_path / "run" / "lengths.json").stat().st_mtime_ns == before


def test_a_gru_is_trained_on_the_same_sequences(tmp_path, capsys):
    words = [*SMALL, "steps=6", f"out={tmp_path / 'gru'}"]
    assert main(["task", "parity", "--gru", *words]) == 0
    first = read_lengths(tmp_path / "gru")
    assert "a GRU, as a control" in capsys.readouterr().out
    assert first.step == 6
    assert first.passes == {}
    assert [r["step"] for r in read_metrics(tmp_path / "gru")] == [0, 5, 6]
    assert main(["task", "parity", "--gru", *words]) == 0
    assert read_lengths(tmp_path / "gru") == first


def test_parallel_passes_are_measured_beside_the_stream(tmp_path):
    train(config(tmp_path / "run", "gradient=unroll", "passes=2..3", "steps=2"))
    found = measure(tmp_path / "run")
    assert list(found.passes) == ["2", "4", "8", "16", "32"]
    assert found.lengths == [8, 16, 32, 64]
    # Full attention sees everything in every pass.
    assert found.best_passes == {}


def test_what_a_window_allows_is_reported(tmp_path, capsys):
    words = [*SMALL, "window=3", "steps=1"]
    assert main(["task", "parity", "correction=none", *words, f"out={tmp_path / 'n1'}"]) == 0
    # One layer sees the last three symbols of eight or more, so it can only guess.
    assert read_lengths(tmp_path / "n1").best == [0.5] * 4
    assert "Guessing: 0.500. At best with this window: 8: 0.500, 16: 0.500" in capsys.readouterr().out
    assert main(["task", "parity", "gradient=unroll", "passes=2", *words, f"out={tmp_path / 'd1'}"]) == 0
    found = read_lengths(tmp_path / "d1")
    assert found.best is None
    # In four passes a token sees 4 · 2 + 3 = 11 positions back.
    assert [best[0] for best in found.best_passes.values()] == [0.5, 1.0, 1.0, 1.0, 1.0]


def test_examples_are_printed_without_training(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in (*TASKS, "pointer"):
        assert main(["task", name, "--show"]) == 0
        assert "Target:" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["partiy"], "There is no task 'partiy'; did you mean 'parity'?"),
        (["word", "group=S9"], "There is no group 'S9' here; choose one of S3 to S5"),
        (["s5", "task=stack"], "task=stack is named twice; write crt task stack"),
        (["s5", "hops=3"], "Unknown setting 'hops'"),
        (["s5", "length=100000"], "length must be at most 65,536"),
        (["pointer", "--gru"], "--gru is not for pointer chasing; leave it out."),
        (["parity", "data=x"], "data=x cannot be used with the word problem of a group; leave data out."),
        (["s5", "pretrained=./no/where"], "There is no model at ./no/where"),
    ],
)
def test_bad_input_is_refused(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["task", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


needs_model = pytest.mark.skipif(not MODEL.is_dir(), reason="the model stories260K is missing")


@needs_model
def test_a_pretrained_model_learns_a_task_in_its_own_tokens(tmp_path, capsys):
    words = ["length=4", "steps=2", "batch_size=4", "eval_every=2", "eval_tokens=60", "gradient=unroll", "passes=2"]
    run = tmp_path / "run"
    assert main(["task", "assign", "values=2", f"pretrained={MODEL}", *words, f"out={run}"]) == 0
    found = read_lengths(run)
    assert found.lengths == [4, 8, 16, 32]
    assert list(found.passes) == ["2", "4", "8"]
    settings = resolve_task("assign", ["values=2", f"pretrained={MODEL}", *words, f"out={run}"])
    source = StateSource(settings)
    inputs_BT, targets_BT = source.read(0, 4)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    text = tokenizer.decode(inputs_BT[0])
    plain = settings.task.batch("train", 0, 0, 4, settings.task.length_at(0.0))
    spelled = [settings.task.vocabulary[token] for token in plain.inputs_BT[0].tolist()]
    assert text.replace(" ", "").removeprefix("<s>") == "".join(spelled[1:])
    assert inputs_BT[0, 0] == tokenizer.bos_token_id
    assert ((targets_BT == IGNORED) == (plain.targets_BT == IGNORED)).all()
    # The model still knows text, so it can be converted like any other.
    assert main(["convert", str(run), str(tmp_path / "out")]) == 0


@needs_model
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["s5"], "120 of the 120 words of this task are not single tokens of"),
        (["parity", "length=600"], "Sequences of this task have 601 tokens, but"),
        (["parity", "--gru"], "--gru replaces the model by a GRU, so pretrained= does not apply; leave one out."),
    ],
)
def test_what_a_pretrained_model_cannot_do_is_refused(words, message, tmp_path, capsys):
    assert main(["task", *words, f"pretrained={MODEL}", f"out={tmp_path / 'run'}"]) == 2
    assert message in capsys.readouterr().err
