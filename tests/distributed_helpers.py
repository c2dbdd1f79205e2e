"""Two processes under a real torchrun: what they do, how they are started, and how their runs are compared.

Started as a script, this file is what the processes run: many small tasks in one launch, as starting takes the longest.
"""

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from train_helpers import recipe_file, tiny, words

from contextready.cli.main import main
from contextready.errors import ContextReadyError
from contextready.runs.checkpoint import open_checkpoint, unshard
from contextready.train import trainer as trainers
from contextready.train.objective import Objective
from contextready.train.saving import save_checkpoint
from contextready.train.team import joined, local_part
from contextready.train.trainer import Interrupts, Trainer

# What the processes do.


def work(path):
    """Do the tasks in a file one after the other, in one process group, and write their results."""
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
    """Run a crt command, with an extra word per process if `of_rank` gives one."""
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
    config = replace(at.config, train=replace(at.config.train, out=to))
    save_checkpoint(config, at.progress, at.model, at.optimizer, team, at.source.folder)


def do_save_again_alone(team, **task):
    """The same in a single process."""
    if team.is_first:
        path = Path(task["to"]).with_suffix(".json")
        path.write_text(json.dumps([{"do": "save_again", **task}]))
        lone = {key: value for key, value in os.environ.items() if not key.startswith("TORCHELASTIC")}
        subprocess.run([sys.executable, __file__, str(path)], check=True, env=lone, timeout=100)


def do_break(team, settings, what, rank, step):
    """Make the loss or its gradient NaN at one step in one process."""
    at = Trainer(tiny(**settings), None, team)
    read, forward, before = at.source.read, Objective.forward, []

    def remember(*arguments):
        before[:] = state_of(at)
        return read(*arguments)

    def break_it(self, *arguments):
        loss = forward(self, *arguments)
        if at.progress.step != step or team.rank != rank:
            return loss
        if what == "loss":
            return loss._replace(mean=loss.mean * float("nan"), total=loss.total * float("nan"))
        loss.total.register_hook(lambda gradient: gradient * float("nan"))
        return loss

    at.source.read, Objective.forward = remember, break_it
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
    """Counts the collective operations."""

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
    """Count the collective operations of one step, by kind."""
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
    """torchrun with two processes (or as many as `start` says). Its output goes to files, so that no pipe fills up."""

    def __init__(self, folder, *arguments, options=(), start=("--standalone", "--nproc-per-node", "2"), processes=2):
        self.processes = processes
        folder.mkdir(parents=True, exist_ok=True)
        self.files = [folder / "stdout", folder / "stderr"]
        tests = str(Path(__file__).parent)
        more = {"OMP_NUM_THREADS": "1", "COLUMNS": "400", "NO_COLOR": "1", "PYTHONPATH": tests}
        command = [sys.executable, "-m", "torch.distributed.run", *start]
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
        """Wait until a condition is true while the launch keeps running, and return its value."""
        deadline = time.monotonic() + 60
        while not (found := condition()):
            assert self.process.poll() is None, self.files[1].read_text()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return found

    def end(self, timeout=240):
        """Wait for the end, and return the exit code, output and errors."""
        code = self.process.wait(timeout=timeout)
        return code, *(file.read_text() for file in self.files)

    def ranks(self, but=()):
        """Return the process ids by rank, if all are running and none of them is in `but`."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if parent != self.process.pid:
                    continue
                for variable in (entry / "environ").read_bytes().split(b"\0"):
                    if variable.startswith(b"RANK="):
                        found[int(variable[5:])] = int(entry.name)
        return found if len(found) == self.processes and not {*found.values()} & {*but} else {}


def launch(folder, *arguments):
    with Launch(folder, *arguments) as launched:
        return launched.end()


def settings_of(data, out, **changes):
    return {"data": str(data), "out": str(out), **changes}


def command_task(data, out, of_rank=None, **changes):
    """A task that trains with the command."""
    arguments = ["train", recipe_file(out.parent), *map(str, words(data, out, **changes))]
    return {"do": "command", "arguments": arguments, "of_rank": of_rank}


def do_together(folder, tasks):
    """Let two processes do all tasks in one launch, and return the results of both for each task."""
    file = folder / "tasks.json"
    file.write_text(json.dumps(list(tasks.values())))
    code, _, err = launch(folder / "launch", __file__, file)
    assert code == 0, err
    results = [json.loads(Path(f"{file}.{rank}").read_text()) for rank in (0, 1)]
    return dict(zip(tasks, zip(*results, strict=True), strict=True))


# How their runs are compared.


def went_well(results):
    assert [result["code"] for result in results] == [0, 0], results


def everything(path, tmp_path):
    """Weights and moments of a run's newest checkpoint, sharded or plain."""
    opened = open_checkpoint(path)
    folder = opened.folder
    if opened.sharded:
        folder = unshard(path, tmp_path / f"{path.name} whole")
    return {"model": load_file(folder / "model.safetensors"), "optimizer": load_file(folder / "optimizer.safetensors")}


def assert_equal_tensors(ours, theirs, **tolerances):
    for part in ("model", "optimizer"):
        assert ours[part].keys() == theirs[part].keys()
        for name in ours[part]:
            if tolerances:
                torch.testing.assert_close(ours[part][name], theirs[part][name], **tolerances)
            else:
                assert torch.equal(ours[part][name], theirs[part][name]), name


if __name__ == "__main__":
    work(sys.argv[1])
