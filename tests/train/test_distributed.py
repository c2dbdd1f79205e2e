"""Two processes under a real torchrun: the same numbers as one, whatever wraps the model and whatever stops them.

Started as a script, this file is what the processes run: many small tasks in one launch, as starting takes the longest.
"""

import contextlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import contractive_model
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from train_helpers import kept_steps, metrics, recipe_file, run, sums, tiny, words

from contextready.analysis import perplexity
from contextready.analysis.perplexity import Score, parallel_scores, sequential_score
from contextready.cli import main
from contextready.data.batches import Windows
from contextready.data.shards import TokenRow
from contextready.errors import ContextReadyError
from contextready.train import checkpoint as checkpoints
from contextready.train import trainer as trainers
from contextready.train.checkpoint import newest_checkpoint, open_checkpoint, step_folder, unshard
from contextready.train.config import check_for_team
from contextready.train.metrics import read_metrics
from contextready.train.objective import Loss, Objective
from contextready.train.team import joined, local_part
from contextready.train.trainer import Interrupts, Trainer

SHORT = {"accumulate": 2, "steps": 8, "log_every": 1, "eval_every": 4, "save_every": 4, "keep": 9, "lr": 3e-3}
LONG = {"steps": 120, "log_every": 5, "eval_every": 40, "save_every": 10, "dropout": 0.1}
GRADIENTS = {
    "unroll": {},
    "implicit": {"gradient": "implicit", "adjoint_steps": 2},
    "bptt": {"gradient": "bptt"},
    "transformer": {"correction": None},
}
KINDS = [(parallel, gradient) for parallel in ("ddp", "fsdp") for gradient in GRADIENTS]
BAD = {
    "a K of 1": ({"k_min": 1}, "K=1 leaves the correction without a gradient"),
    "one pass": ({"k_min": "none", "passes": 1}, "K=1 leaves the correction without a gradient"),
    "an odd batch": ({"batch_size": 3}, "batch_size=3 cannot be shared by 2 processes; give a multiple of 2."),
}


# What the processes do.


def work(path):
    """Do the tasks of a file one after the other, in one group of processes, and write down what came of each."""
    tasks, results = json.loads(Path(path).read_text()), []
    with joined("cpu") as team:
        trainers.joined = lambda _: contextlib.nullcontext(team)
        for task in tasks:
            try:
                results.append(TASKS[task.pop("do")](team, **task))
            except Exception:
                results.append({"error": traceback.format_exc()})
            team.wait()
        if team.size > 1:
            Path(f"{path}.{team.rank}").write_text(json.dumps(results))


def do_command(team, arguments, of_rank=None):
    """A command of crt, perhaps with a word more that is different in each process."""
    out, err = io.StringIO(), io.StringIO()
    arguments = arguments + ([] if of_rank is None else [of_rank[team.rank]])
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


def do_copy(team, source, to):
    if team.is_first:
        shutil.copytree(source, to)


def do_save_again(team, settings, to):
    """Open the newest checkpoint of a run and save it into another folder without a step."""
    at = Trainer(tiny(**settings), None, team)
    config = at.config.as_dict()
    checkpoints.save_checkpoint(Path(to), config, at.progress, at.model, at.optimizer, team, at.data.folder, 9)


def do_save_again_alone(team, **task):
    """The same in a single process."""
    if team.is_first:
        path = Path(task["to"]).with_suffix(".json")
        path.write_text(json.dumps([{"do": "save_again", **task}]))
        lone = {key: value for key, value in os.environ.items() if not key.startswith("TORCHELASTIC")}
        subprocess.run([sys.executable, __file__, str(path)], check=True, env=lone, timeout=100)


def do_break(team, settings, what, rank, step):
    """Let the loss or its gradient become nan at a step of one process."""
    at = Trainer(tiny(**settings), None, team)
    read, forward, before = at.batches.read, Objective.forward, []

    def remember(*arguments):
        before[:] = state_of(at)
        return read(*arguments)

    def break_it(self, *arguments):
        loss = forward(self, *arguments)
        if at.progress.step != step or team.rank != rank:
            return loss
        if what == "loss":
            return Loss(loss.mean * float("nan"), loss.residual)
        loss.mean.register_hook(lambda gradient: gradient * float("nan"))
        return loss

    at.batches.read, Objective.forward = remember, break_it
    message = None
    try:
        at.run(Interrupts())
    except ContextReadyError as error:
        message = str(error)
    finally:
        Objective.forward = forward
    same = all(torch.equal(a, b) for a, b in zip(before, state_of(at), strict=True))
    return {"message": message, "step": at.progress.step, "same": same}


def state_of(at):
    moments = [value for state in at.optimizer.state.values() for value in state.values()]
    return [local_part(tensor).detach().clone() for tensor in [*at.model.parameters(), *moments]]


class Counting(TorchDispatchMode):
    """Counts what the processes say to each other."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func.namespace in ("c10d", "_c10d_functional"):
            self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


def do_count(team, settings):
    """How often the processes speak to each other in a step, by kind."""
    at = Trainer(tiny(**settings), None, team)
    for _ in range(2):
        at.step()
    with Counting() as counting:
        at.step()
    return counting.counts


TASKS = {
    "command": do_command,
    "copy": do_copy,
    "save_again": do_save_again,
    "save_again_alone": do_save_again_alone,
    "break": do_break,
    "count": do_count,
}


# How they are started.


class Launch:
    """torchrun with two processes, its output in files so that no pipe fills up."""

    def __init__(self, folder, *arguments, options=()):
        folder.mkdir(parents=True, exist_ok=True)
        self.files = [folder / "stdout", folder / "stderr"]
        tests = str(Path(__file__).parents[1])
        more = {"OMP_NUM_THREADS": "1", "COLUMNS": "400", "NO_COLOR": "1", "PYTHONPATH": tests}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["--monitor-interval", "0.2", *options, *map(str, arguments)]
        with self.files[0].open("w") as out, self.files[1].open("w") as err:
            self.process = subprocess.Popen(command, stdout=out, stderr=err, env=os.environ | more)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=45)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def wait_for(self, condition):
        """Until something is true of a launch that must still be running; returns what it gave."""
        deadline = time.monotonic() + 60
        while not (found := condition()):
            assert self.process.poll() is None, self.files[1].read_text()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return found

    def end(self, timeout=240):
        """Exit code, output, errors."""
        code = self.process.wait(timeout=timeout)
        return code, *(file.read_text() for file in self.files)

    def ranks(self, but=()):
        """The ids of the two processes by rank, if both are there and neither is one of these."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if parent != self.process.pid:
                    continue
                for variable in (entry / "environ").read_bytes().split(b"\0"):
                    if variable.startswith(b"RANK="):
                        found[int(variable[5:])] = int(entry.name)
        return found if len(found) == 2 and not {*found.values()} & {*but} else {}


def launch(folder, *arguments):
    with Launch(folder, *arguments) as launched:
        return launched.end()


def settings_of(data, out, **changes):
    return {"data": str(data), "out": str(out), **changes}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("together")


@pytest.fixture(scope="module")
def together(data, place):
    """Everything that two processes can do in one launch: for each task, what came of it in either of them."""
    recipe, tasks = recipe_file(place), {}

    def command(key, out, of_rank=None, **changes):
        arguments = ["train", recipe, *map(str, words(data, place / out, **changes))]
        tasks[key] = {"do": "command", "arguments": arguments, "of_rank": of_rank}

    def copy(source, to):
        tasks[f"copy {to}"] = {"do": "copy", "source": str(place / source), "to": str(place / to)}

    def save_again(source, to, alone):
        do = "save_again_alone" if alone else "save_again"
        settings = settings_of(data, place / source, **SHORT | {"steps": 4, "parallel": "fsdp"})
        tasks[to] = {"do": do, "settings": settings, "to": str(place / to)}

    for gradient, changes in GRADIENTS.items():
        run(data, place / f"one {gradient}", **SHORT | changes)
    run(data, place / "one half", **SHORT | {"steps": 4, "parallel": "fsdp"})
    shutil.copytree(place / "one half", place / "one, then two")

    for parallel, gradient in KINDS:
        changes = SHORT | GRADIENTS[gradient] | {"parallel": parallel}
        command((parallel, gradient), f"{parallel} {gradient}", **changes)
    for parallel in ("ddp", "fsdp"):
        command(f"{parallel} half", f"{parallel} half", **SHORT | {"steps": 4, "parallel": parallel})
    for parallel, other in (("ddp", "fsdp"), ("fsdp", "ddp")):
        copy(f"{parallel} half", f"{parallel}, then {other}")
        command(f"{parallel}, then {other}", f"{parallel}, then {other}", **SHORT | {"parallel": other})
    command("one, then two", "one, then two", **SHORT | {"parallel": "fsdp"})
    save_again("fsdp half", "alone", alone=True)
    save_again("alone", "by two", alone=False)
    save_again("by two", "alone again", alone=True)
    command("long", "long", **LONG)
    for key, (changes, _) in BAD.items():
        command(key, key, **changes)
    command("unlike", "unlike", of_rank=["clip=0.1", "clip=0.2"])
    for parallel in ("ddp", "fsdp"):
        for what in ("loss", "gradient"):
            for rank in (0, 1):
                key = ("break", parallel, what, rank)
                settings = settings_of(data, place / " ".join(map(str, key)), parallel=parallel, save_every=2)
                tasks[key] = {"do": "break", "settings": settings, "what": what, "rank": rank, "step": 3}
        for accumulate in (1, 3):
            key = ("count", parallel, accumulate)
            settings = settings_of(data, place / " ".join(map(str, key)), parallel=parallel, accumulate=accumulate)
            tasks[key] = {"do": "count", "settings": settings}

    file = place / "tasks.json"
    file.write_text(json.dumps(list(tasks.values())))
    code, _, err = launch(place / "launch", __file__, file)
    assert code == 0, err
    results = [json.loads(Path(f"{file}.{rank}").read_text()) for rank in (0, 1)]
    return dict(zip(tasks, zip(*results, strict=True), strict=True))


def went_well(results):
    assert [result["code"] for result in results] == [0, 0], results


def everything(path, tmp_path):
    """Weights and moments of a run's newest checkpoint, sharded or plain."""
    opened = open_checkpoint(path)
    folder = opened.folder
    if opened.sharded:
        folder = unshard(path, tmp_path / f"{path.name} whole")
    return {"model": load_file(folder / "model.safetensors"), "optimizer": load_file(folder / "optimizer.safetensors")}


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


def assert_equal_tensors(ours, theirs, **tolerances):
    for part in ("model", "optimizer"):
        assert ours[part].keys() == theirs[part].keys()
        for name in ours[part]:
            if tolerances:
                torch.testing.assert_close(ours[part][name], theirs[part][name], **tolerances)
            else:
                assert torch.equal(ours[part][name], theirs[part][name]), name


@pytest.mark.parametrize(("parallel", "gradient"), KINDS)
def test_two_processes_train_as_one_does(together, place, tmp_path, parallel, gradient):
    went_well(together[parallel, gradient])
    one, two = place / f"one {gradient}", place / f"{parallel} {gradient}"
    assert_same_curves(two, one)
    assert_equal_tensors(everything(two, tmp_path), everything(one, tmp_path), rtol=0, atol=1e-4)
    assert kept_steps(two) == kept_steps(one)
    assert open_checkpoint(two).sharded == (parallel == "fsdp")


@pytest.mark.parametrize("name", ["ddp, then fsdp", "fsdp, then ddp", "one, then two"])
def test_a_run_goes_on_in_another_way(together, place, tmp_path, name):
    went_well(together[name])
    assert_same_curves(place / name, place / "one unroll")
    found, expected = everything(place / name, tmp_path), everything(place / "one unroll", tmp_path)
    assert_equal_tensors(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_one_process_goes_on_with_what_two_wrote(together, data, place, tmp_path, parallel):
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
        # With copies, the loss is summed by the same means.
        assert sum(count for name, count in counts.items() if kind in name) == (2 if parallel == "ddp" else 1)
    assert [without_gathers(counts) for counts in once] == [without_gathers(counts) for counts in thrice]


def without_gathers(counts):
    return {name: count for name, count in counts.items() if "allgather" not in name}


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_weights_are_gathered_once_a_step(together, parallel):
    for counts in together["count", parallel, 3]:
        gathers = sum(count for name, count in counts.items() if "allgather" in name)
        assert gathers == (0 if parallel == "ddp" else 1)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("what", ["loss", "gradient"])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_what_is_not_finite_in_one_process_stops_all_before_the_update(together, place, parallel, what, rank):
    key = ("break", parallel, what, rank)
    kind = "the loss is nan" if what == "loss" else "the gradient's norm is nan"
    good = step_folder(place / " ".join(map(str, key)), 2)
    for result in together[key]:
        assert f"At step 3 {kind}: training stopped before the update" in result["message"]
        assert f"the last good one is {good}" in result["message"]
        assert (result["step"], result["same"]) == (3, True)
    assert newest_checkpoint(good.parents[1]) == good


@pytest.mark.parametrize("key", BAD)
def test_what_two_processes_cannot_train_is_refused(together, data, place, tmp_path, key):
    changes, sentence = BAD[key]
    for result in together[key]:
        assert result["code"] == 2
        assert result["err"].startswith("crt train: ")
        assert sentence in result["err"]
        assert result["err"].count("\n") == 1
    assert newest_checkpoint(place / key) is None
    config = tiny(data, tmp_path, **{name: None if value == "none" else value for name, value in changes.items()})
    check_for_team(config, 1)
    with pytest.raises(ContextReadyError):
        check_for_team(config, 2)


def test_a_transformer_may_make_one_pass_in_two_processes(data, tmp_path):
    check_for_team(tiny(data, tmp_path, correction=None), 2)


def test_processes_with_different_settings_are_refused(together, place):
    sentence = (
        "Process 1 was started with clip=0.2 and process 0 with clip=0.1; start all of them with the same command."
    )
    for result in together["unlike"]:
        assert (result["code"], result["err"]) == (2, f"crt train: {sentence}\n")
    assert newest_checkpoint(place / "unlike") is None


def test_a_bad_run_under_torchrun_says_why(data, tmp_path):
    arguments = ["-m", "contextready", "train", recipe_file(tmp_path), *words(data, tmp_path / "run", batch_size=3)]
    code, out, err = launch(tmp_path / "launch", *arguments)
    assert code != 0
    assert out == ""
    assert "crt train: batch_size=3 cannot be shared by 2 processes; give a multiple of 2.\n" in err
    assert "exitcode  : 2" in err


def test_an_unknown_way_is_refused(data, tmp_path, capsys):
    assert main(["train", recipe_file(tmp_path), *words(data, tmp_path / "run", parallel="fdsp")]) == 2
    assert "parallel=fdsp is unknown; did you mean 'fsdp'?" in capsys.readouterr().err


def refused(capsys, *arguments):
    """The one sentence of a command that is refused."""
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
    assert err == f"crt unshard: {folder} is a plain checkpoint already.\n"
    assert not (tmp_path / "out").exists()


def test_unsharding_never_overwrites(together, place, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    err = refused(capsys, "unshard", place / "fsdp unroll", tmp_path / "out")
    assert err == f"crt unshard: {tmp_path / 'out'} exists already; choose another folder.\n"
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp", ".metadata"])
def test_a_damaged_part_is_found_before_it_is_read(together, data, place, tmp_path, capsys, name):
    folder = Path(shutil.copytree(place / "fsdp half", tmp_path / "run"))
    file = newest_checkpoint(folder) / name
    flip_a_byte(file)
    sentence = f"{file} does not match its checksum: the folder is damaged, so make or copy it again.\n"
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


def test_a_signal_to_torchrun_saves_and_the_same_command_goes_on(together, data, place, tmp_path):
    went_well(together["long"])
    folder = tmp_path / "run"
    command = ["-m", "contextready", "train", recipe_file(tmp_path), *words(data, folder, **LONG)]
    with Launch(tmp_path / "first", *command) as launched:
        launched.wait_for(lambda: newest_checkpoint(folder))
        launched.process.send_signal(signal.SIGTERM)
        code, out, _ = launched.end()
    assert code != 0
    saved = newest_checkpoint(folder)
    stopped = open_checkpoint(saved).progress.step
    assert 0 < stopped < LONG["steps"]
    ending = f"SIGTERM at step {stopped:,}: saved {saved}; the same command goes on from there."
    assert out.splitlines()[-1] == ending
    assert out.count("SIGTERM") == 1
    code, out, err = launch(tmp_path / "second", *command)
    assert code == 0, err
    assert f"going on from step {stopped:,}" in out
    assert out.count("Done at step") == 1
    assert sums(newest_checkpoint(folder)) == sums(newest_checkpoint(place / "long"))
    assert metrics(folder) == metrics(place / "long")


def kill_and_go_on(data, tmp_path, kills, **changes):
    """Kill one process again and again, each rank in turn; torchrun starts both anew every time. Returns the run."""
    folder, chance, killed = tmp_path / "run", random.Random(3), set()
    command = ["-m", "contextready", "train", recipe_file(tmp_path), *words(data, folder, **LONG | changes)]
    with Launch(tmp_path / "launch", *command, options=["--max-restarts", str(kills)]) as launched:
        for number in range(kills):
            ranks = launched.wait_for(lambda: launched.ranks(but=killed))
            begun = newest_checkpoint(folder)
            launched.wait_for(lambda begun=begun: newest_checkpoint(folder) not in (None, begun))
            time.sleep(chance.uniform(0.0, 0.2))
            assert launched.ranks() == ranks
            os.kill(ranks[number % 2], signal.SIGKILL)
            killed.update(ranks.values())
        code, out, err = launched.end()
    assert code == 0, err
    assert out.count("Done at step") == 1
    assert out.count("going on from step") == kills
    assert not list((folder / "checkpoints").glob(".*"))
    return folder


needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="processes are found in /proc")


@needs_proc
def test_killed_processes_go_on_as_if_nothing_had_happened(together, data, place, tmp_path):
    folder = kill_and_go_on(data, tmp_path, 5)
    assert sums(newest_checkpoint(folder)) == sums(newest_checkpoint(place / "long"))
    assert metrics(folder) == metrics(place / "long")
    assert kept_steps(folder) == kept_steps(place / "long")


@pytest.mark.slow
@needs_proc
def test_killed_processes_with_parts_go_on_as_if_nothing_had_happened(data, tmp_path):
    folder = kill_and_go_on(data, tmp_path, 4, parallel="fsdp")
    whole = ["-m", "contextready", "train", recipe_file(tmp_path)]
    whole += words(data, tmp_path / "whole", **LONG | {"parallel": "fsdp"})
    assert launch(tmp_path / "uninterrupted", *whole)[0] == 0
    assert_equal_tensors(everything(folder, tmp_path), everything(tmp_path / "whole", tmp_path))
    assert metrics(folder) == metrics(tmp_path / "whole")
    assert kept_steps(folder) == kept_steps(tmp_path / "whole")


T = 6


def windows(count=5, vocab_size=23):
    ids = np.random.default_rng(3).integers(vocab_size, size=count * T + 1).astype("<u2")
    return Windows(TokenRow([ids[:8], ids[8:]]), T)


@pytest.mark.parametrize("count", [None, 4])
@pytest.mark.parametrize("shares", [1, 2, 3, 7])
def test_shares_of_a_score_are_the_whole(monkeypatch, shares, count):
    monkeypatch.setattr(perplexity, "PARALLEL_TOKENS", 2 * T)
    monkeypatch.setattr(perplexity, "SEQUENTIAL_ROWS", 2)
    model = contractive_model()
    whole = parallel_scores(model, windows(), [1, 3], count)
    parts = [parallel_scores(model, windows(), [1, 3], count, share=(i, shares)) for i in range(shares)]
    for k in (1, 3):
        found = Score.interleaved([part[k] for part in parts])
        np.testing.assert_allclose(found.nll_W, whole[k].nll_W, rtol=1e-12)
        assert found.loss == pytest.approx(whole[k].loss, rel=1e-12)
    streamed = [sequential_score(model, windows(), count, share=(i, shares)) for i in range(shares)]
    expected = sequential_score(model, windows(), count)
    np.testing.assert_allclose(Score.interleaved(streamed).nll_W, expected.nll_W, rtol=1e-12)


def test_shares_are_put_together_in_order():
    whole = Score.interleaved([Score(np.array([0.0, 3.0])), Score(np.array([1.0, 4.0])), Score(np.array([2.0]))])
    np.testing.assert_array_equal(whole.nll_W, np.arange(5.0))


if __name__ == "__main__":
    work(sys.argv[1])
