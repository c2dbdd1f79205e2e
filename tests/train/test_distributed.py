"""Two processes under a real torchrun train as one does, with ddp or fsdp, and resume each other's runs."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from distributed_helpers import (
    assert_equal_tensors,
    command_task,
    do_together,
    everything,
    settings_of,
    went_well,
)
from helpers import contractive_model
from train_helpers import kept_steps, recipe_file, run, words

from contextready.cli.main import main
from contextready.data.batches import Sequences
from contextready.data.shards import TokenArray
from contextready.measure import perplexity
from contextready.measure.perplexity import Score, parallel_scores, sequential_score
from contextready.runs.checkpoint import newest_checkpoint, open_checkpoint, unshard
from contextready.runs.metrics import read_metrics

SHORT = {"accumulate": 2, "steps": 8, "log_every": 1, "eval_every": 4, "save_every": 4, "keep": 9, "lr": 3e-3}
GRADIENTS = {
    "unroll": {},
    # The first half of the steps does not use the correction, so its weights have no gradient and no moments yet.
    "stages": {"gradient": "truncated", "passes": "1@0.5,2@0.5"},
    "implicit": {"gradient": "implicit", "adjoint_steps": 2},
    "bptt": {"gradient": "bptt"},
    "transformer": {"correction": None},
}
KINDS = [(parallel, gradient) for parallel in ("ddp", "fsdp") for gradient in GRADIENTS]
# Enough passes to reach the tolerance. In a few steps, half of the batch needs fewer products than the whole batch.
TO_TOLERANCE = {"gradient": "implicit", "adjoint_steps": None, "adjoint_tolerance": 3e-4, "passes": 12}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("together")


@pytest.fixture(scope="module")
def together(data, place):
    """The results of all tasks, in either process; two processes do them all in one launch."""
    tasks = {}

    def command(key, out, **changes):
        tasks[key] = command_task(data, place / out, **changes)

    def copy(source, to):
        tasks[f"copy {to}"] = {"do": "copy", "source": str(place / source), "to": str(place / to)}

    def save_again(source, to, alone):
        do = "save_again_alone" if alone else "save_again"
        settings = settings_of(data, place / source, **SHORT | {"steps": 4, "parallel": "fsdp"})
        tasks[to] = {"do": do, "settings": settings, "to": str(place / to)}

    for gradient, changes in GRADIENTS.items():
        run(data, place / f"one {gradient}", **SHORT | changes)
    run(data, place / "one to tolerance", **SHORT | TO_TOLERANCE)
    run(data, place / "one half", **SHORT | {"steps": 4, "parallel": "fsdp"})
    shutil.copytree(place / "one half", place / "one, then two")

    for parallel, gradient in KINDS:
        changes = SHORT | GRADIENTS[gradient] | {"parallel": parallel}
        command((parallel, gradient), f"{parallel} {gradient}", **changes)
    command("to tolerance", "to tolerance", **SHORT | TO_TOLERANCE | {"parallel": "ddp"})
    for parallel in ("ddp", "fsdp"):
        command(f"{parallel} half", f"{parallel} half", **SHORT | {"steps": 4, "parallel": parallel})
    for parallel, other in (("ddp", "fsdp"), ("fsdp", "ddp")):
        copy(f"{parallel} half", f"{parallel}, then {other}")
        command(f"{parallel}, then {other}", f"{parallel}, then {other}", **SHORT | {"parallel": other})
    command("one, then two", "one, then two", **SHORT | {"parallel": "fsdp"})
    save_again("fsdp half", "alone", alone=True)
    save_again("alone", "by two", alone=False)
    save_again("by two", "alone again", alone=True)
    for parallel in ("ddp", "fsdp"):
        for accumulate in (1, 3):
            key = ("count", parallel, accumulate)
            settings = settings_of(data, place / " ".join(map(str, key)), parallel=parallel, accumulate=accumulate)
            tasks[key] = {"do": "count", "settings": settings}
    return do_together(place, tasks)


def assert_same_curves(one, other):
    """The same records in the same order, and losses that differ by rounding only."""
    ours, theirs = read_metrics(one), read_metrics(other)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.keys() == b.keys()
        for key in ("step", "tokens", "macs", "passes", "lr"):
            assert a.get(key) == b.get(key)
        for key in ("loss", "val_loss"):
            assert a.get(key, 0.0) == pytest.approx(b.get(key, 0.0), rel=0, abs=1e-5)


@pytest.mark.parametrize(("parallel", "gradient"), KINDS)
def test_two_processes_train_as_one_does(together, place, tmp_path, parallel, gradient):
    went_well(together[parallel, gradient])
    one, two = place / f"one {gradient}", place / f"{parallel} {gradient}"
    assert_same_curves(two, one)
    assert_equal_tensors(everything(two, tmp_path), everything(one, tmp_path), rtol=0, atol=1e-4)
    assert kept_steps(two) == kept_steps(one)
    assert open_checkpoint(two).sharded == (parallel == "fsdp")


def test_an_adjoint_run_to_tolerance_trains_as_one_process_does(together, place):
    """Each process stops its adjoint by its own rows alone, so the gradients agree only up to the tolerance."""
    went_well(together["to tolerance"])
    one, two = read_metrics(place / "one to tolerance"), read_metrics(place / "to tolerance")
    assert [record["step"] for record in two] == [record["step"] for record in one]
    for ours, theirs in zip(two, one, strict=True):
        assert ours.keys() == theirs.keys()
        for key in ours.keys() & {"loss", "val_loss"}:
            assert ours[key] == pytest.approx(theirs[key], rel=0, abs=1e-3)
    assert two[-1]["macs"] != one[-1]["macs"], "no process made fewer or more products than one alone"
    assert kept_steps(place / "to tolerance") == kept_steps(place / "one to tolerance")


@pytest.mark.parametrize("name", ["ddp, then fsdp", "fsdp, then ddp", "one, then two"])
def test_a_run_resumes_with_another_kind_of_parallelism(together, place, tmp_path, name):
    went_well(together[name])
    assert_same_curves(place / name, place / "one unroll")
    found, expected = everything(place / name, tmp_path), everything(place / "one unroll", tmp_path)
    assert_equal_tensors(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_one_process_resumes_what_two_wrote(together, data, place, tmp_path, parallel):
    folder = Path(shutil.copytree(place / "fsdp half", tmp_path / "run"))
    done = run(data, folder, **SHORT | {"parallel": parallel})
    assert open_checkpoint(done.checkpoint).sharded == (parallel == "fsdp")
    assert_same_curves(folder, place / "one unroll")
    found, expected = everything(folder, tmp_path), everything(place / "one unroll", tmp_path)
    assert_equal_tensors(found, expected, rtol=0, atol=1e-4)


def test_a_checkpoint_passes_from_two_to_one_and_back_without_a_changed_bit(together, place, tmp_path):
    assert [together[name] for name in ("alone", "by two", "alone again")] == [(None, None)] * 3
    first = everything(place / "fsdp half", tmp_path)
    assert any(tensor.any() for tensor in first["optimizer"].values())
    for name in ("alone", "by two", "alone again"):
        assert_equal_tensors(everything(place / name, tmp_path), first)
    parts = [len(list(newest_checkpoint(place / name).glob("*.distcp"))) for name in ("alone", "by two")]
    assert parts == [1, 2]


def test_each_process_holds_and_writes_a_part(together, place):
    one, other = (path.stat().st_size for path in newest_checkpoint(place / "fsdp unroll").glob("*.distcp"))
    assert abs(one - other) < 0.2 * (one + other)


def test_only_one_process_speaks(together, place):
    for parallel in ("ddp", "fsdp"):
        first, second = together[parallel, "unroll"]
        assert first["out"].count("Done at step 8") == 1
        assert f"2 processes ({parallel})" in first["out"]
        assert second["out"] == ""
        records = read_metrics(place / f"{parallel} unroll")
        assert [r["step"] for r in records if "loss" in r] == list(range(1, 9))
        assert [r["step"] for r in records if "val_loss" in r] == [0, 4, 8]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_run_that_goes_well_has_no_errors_to_show(together, parallel):
    assert [result["err"] for result in together[parallel, "unroll"]] == ["", ""]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_gradients_are_exchanged_once_a_step(together, parallel):
    once, thrice = together["count", parallel, 1], together["count", parallel, 3]
    kind = "allreduce" if parallel == "ddp" else "reduce_scatter"
    for counts in (*once, *thrice):
        # With ddp, the loss is summed by the same operation.
        assert sum(count for name, count in counts.items() if kind in name) == (2 if parallel == "ddp" else 1)
    assert [without_gathers(counts) for counts in once] == [without_gathers(counts) for counts in thrice]


def without_gathers(counts):
    return {name: count for name, count in counts.items() if "allgather" not in name}


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_weights_are_gathered_once_a_step(together, parallel):
    for counts in together["count", parallel, 3]:
        gathers = sum(count for name, count in counts.items() if "allgather" in name)
        assert gathers == (0 if parallel == "ddp" else 1)


def refused(capsys, *arguments):
    """Return the error message of a command that fails."""
    assert main([str(word) for word in arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err


def test_evaluating_a_sharded_checkpoint_says_how_to(together, place, tmp_path, capsys):
    folder = newest_checkpoint(place / "fsdp unroll")
    assert f"crt unshard {folder} OUT" in refused(capsys, "eval", place / "fsdp unroll", "--device", "cpu")
    assert f"crt unshard {folder} OUT" in refused(capsys, "eval", folder, "--device", "cpu")
    assert main(["unshard", str(folder), str(tmp_path / "plain")]) == 0
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "plain"), "--device", "cpu", "--passes", "3", "--tokens", "256", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    last = [r["val_loss"] for r in read_metrics(place / "fsdp unroll") if "val_loss" in r][-1]
    assert f"{np.exp(last):.4f}"[:5] in json.dumps(found)


def test_starting_from_a_sharded_checkpoint_says_how_to(together, data, place, tmp_path, capsys):
    origin = place / "fsdp unroll"
    command = ["train", recipe_file(tmp_path), *words(data, tmp_path / "run", init_from=origin)]
    assert f"crt unshard {newest_checkpoint(origin)} OUT" in refused(capsys, *command)


def test_a_plain_checkpoint_cannot_be_unsharded(together, place, tmp_path, capsys):
    folder = newest_checkpoint(place / "ddp unroll")
    err = refused(capsys, "unshard", place / "ddp unroll", tmp_path / "out")
    assert err == f"crt unshard: {folder} is already a plain checkpoint.\n"
    assert not (tmp_path / "out").exists()


def test_unsharding_never_overwrites(together, place, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    err = refused(capsys, "unshard", place / "fsdp unroll", tmp_path / "out")
    assert err == f"crt unshard: {tmp_path / 'out'} already exists; choose another folder.\n"
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp", ".metadata"])
def test_a_damaged_part_is_found_before_it_is_read(together, data, place, tmp_path, capsys, name):
    folder = Path(shutil.copytree(place / "fsdp half", tmp_path / "run"))
    file = newest_checkpoint(folder) / name
    flip_a_byte(file)
    sentence = f"{file} does not match its checksum. The folder is damaged; create or copy it again.\n"
    assert refused(capsys, "unshard", folder, tmp_path / "out") == f"crt unshard: {sentence}"
    assert not (tmp_path / "out").exists()
    command = ["train", recipe_file(tmp_path), *words(data, folder, **SHORT | {"parallel": "fsdp"})]
    assert refused(capsys, *command) == f"crt train: {sentence}"


def flip_a_byte(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_an_unsharded_checkpoint_is_the_run_with_ddp(together, place, tmp_path):
    plain = open_checkpoint(unshard(place / "fsdp unroll", tmp_path / "plain"))
    whole = open_checkpoint(place / "one unroll")
    assert not plain.sharded
    assert plain.config["train"]["parallel"] == "ddp"
    assert plain.progress.step == whole.progress.step
    for ours, theirs in zip(plain.model().parameters(), whole.model().parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


T = 6


def sequences(count=5, vocab_size=23):
    ids = np.random.default_rng(3).integers(vocab_size, size=count * T + 1).astype("<u2")
    return Sequences(TokenArray([ids[:8], ids[8:]]), T)


@pytest.mark.parametrize("count", [None, 4])
@pytest.mark.parametrize("shares", [1, 2, 3, 7])
def test_shares_of_a_score_are_the_whole(monkeypatch, shares, count):
    monkeypatch.setattr(perplexity, "PARALLEL_TOKENS", 2 * T)
    monkeypatch.setattr(perplexity, "SEQUENTIAL_ROWS", 2)
    model = contractive_model()
    whole = parallel_scores(model, sequences(), [1, 3], count)
    parts = [parallel_scores(model, sequences(), [1, 3], count, share=(i, shares)) for i in range(shares)]
    for k in (1, 3):
        found = Score.interleaved([part[k] for part in parts])
        np.testing.assert_allclose(found.nll_N, whole[k].nll_N, rtol=1e-12)
        assert found.loss == pytest.approx(whole[k].loss, rel=1e-12)
    streamed = [sequential_score(model, sequences(), count, share=(i, shares)) for i in range(shares)]
    expected = sequential_score(model, sequences(), count)
    np.testing.assert_allclose(Score.interleaved(streamed).nll_N, expected.nll_N, rtol=1e-12)


def test_shares_are_put_together_in_order():
    whole = Score.interleaved([Score(np.array([0.0, 3.0])), Score(np.array([1.0, 4.0])), Score(np.array([2.0]))])
    np.testing.assert_array_equal(whole.nll_N, np.arange(5.0))
