"""After signals, kills, a full disk or numbers that are not finite, the same command resumes the run."""

import os
import random
import signal
import subprocess
import time

import pytest
from train_helpers import (
    change_weights,
    finish,
    kept_steps,
    metrics,
    no_interrupts,
    recipe_file,
    run,
    start,
    sums,
    trainer,
    words,
)

from contextready.cli.main import main
from contextready.errors import ContextReadyError
from contextready.runs.checkpoint import newest_checkpoint, open_checkpoint

LARGER = {"width": 96, "layers": 2, "lr": 1e-3, "save_every": 2, "eval_every": 50, "log_every": 5, "dropout": 0.1}
"""Large enough that a save takes a while."""


def wait_for(condition, process):
    """Wait until a condition is true while the process keeps running, and return its value."""
    deadline = time.monotonic() + 120
    while not (found := condition()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return found


def is_saving(folder):
    """Whether a new checkpoint is being written at this moment."""
    newest = newest_checkpoint(folder)
    partial = [path.name[1:14] for path in (folder / "checkpoints").glob(".step-*.partial")]
    return newest is not None and any(name > newest.name for name in partial)


def has_logged(folder):
    return (folder / "metrics.jsonl").exists() and '"loss"' in (folder / "metrics.jsonl").read_text()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_the_same_command_resumes(data, tmp_path, capsys, number, code):
    folder, recipe = tmp_path / "run", recipe_file(tmp_path)
    rarely = {"eval_every": 10**6, "save_every": 10**6, "dropout": 0.1}
    process = start("train", recipe, *words(data, folder, steps=10**6, **rarely))
    wait_for(lambda: has_logged(folder), process)
    # A second process in the same folder is refused and does not disturb the first.
    assert main(["train", recipe, *words(data, folder, steps=10**6, **rarely)]) == 2
    assert "Another process is training in" in capsys.readouterr().err
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (code, "")
    (stopped,) = kept_steps(folder)
    saved = newest_checkpoint(folder)
    ending = f"Interrupted by {number.name} at step {stopped:,}; saved {saved}. Run the same command again to resume."
    assert out.splitlines()[-1] == ending
    assert main(["train", recipe, *words(data, folder, steps=stopped + 3, **rarely)]) == 0
    assert f"resuming from step {stopped:,}" in " ".join(capsys.readouterr().out.split())
    whole = run(data, tmp_path / "whole", steps=stopped + 3, **rarely)
    assert sums(newest_checkpoint(folder)) == sums(whole.checkpoint)
    assert metrics(folder) == metrics(tmp_path / "whole")


def kill_and_resume(data, tmp_path, steps, kills, seed):
    """Kill a run repeatedly; `kills` says for each kill whether it hits a save. All checkpoints stay complete."""
    chance, changes = random.Random(seed), LARGER | {"steps": steps}
    folder, hits = tmp_path / "run", 0
    command = ("train", recipe_file(tmp_path), *words(data, folder, **changes))
    for inside_a_save in kills:
        process = start(*command)
        begun = newest_checkpoint(folder)
        wait_for(lambda begun=begun: newest_checkpoint(folder) not in (None, begun), process)
        if inside_a_save:
            wait_for(lambda: is_saving(folder), process)
        else:
            time.sleep(chance.uniform(0.0, 0.3))
        process.kill()
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL
        hits += is_saving(folder)
        for checkpoint in (folder / "checkpoints").glob("step-*"):
            open_checkpoint(checkpoint)
    assert hits >= sum(kills) / 2  # a kill that came too late is not counted
    assert main(command) == 0
    whole = run(data, tmp_path / "whole", **changes)
    assert sums(newest_checkpoint(folder)) == sums(whole.checkpoint)
    assert metrics(folder) == metrics(tmp_path / "whole")
    assert kept_steps(folder) == kept_steps(tmp_path / "whole")
    assert not list((folder / "checkpoints").glob(".*"))
    return hits


def test_a_killed_run_resumes_as_if_nothing_had_happened(data, tmp_path):
    kill_and_resume(data, tmp_path, 40, [True, False, True], seed=1)


@pytest.mark.slow
def test_a_run_killed_twenty_times_resumes_as_if_nothing_had_happened(data, tmp_path):
    assert kill_and_resume(data, tmp_path, 500, [True, False] * 10, seed=2) >= 5


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 12 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount here")
    if done.returncode:
        pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk, leave):
    """Fill the disk except for `leave` bytes."""
    stat = os.statvfs(disk)
    (disk / "filler").write_bytes(b"x" * (stat.f_bavail * stat.f_frsize - leave))


def size_of(folder):
    return sum(path.stat().st_size for path in folder.iterdir())


@pytest.mark.parametrize("room", [0.2, 0.7, 0.998])
def test_a_full_disk_is_one_sentence_and_costs_nothing(data, tmp_path, small_disk, room):
    """The disk becomes full while the weights, the moments, or the small files after them are written."""
    folder, changes = small_disk / "run", LARGER | {"keep": 1}
    first = run(data, folder, **changes | {"steps": 2})
    before = sums(first.checkpoint)
    fill(small_disk, int(room * size_of(first.checkpoint)))
    command = ("train", recipe_file(tmp_path), *words(data, folder, **changes | {"steps": 4}))
    code, _, err = finish(*command)
    assert code == 2, "killed by a signal" if code < 0 else err
    assert err.startswith("crt train: The disk is full")
    assert err.count("\n") == 1
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [first.checkpoint.name]
    assert sums(open_checkpoint(folder).folder) == before
    (small_disk / "filler").unlink()
    assert main(command) == 0
    whole = run(data, tmp_path / "whole", **changes | {"steps": 4})
    assert sums(newest_checkpoint(folder)) == sums(whole.checkpoint)


def test_a_disk_full_while_parts_are_written_is_one_sentence(data, tmp_path, small_disk):
    folder, changes = small_disk / "run", LARGER | {"keep": 1, "parallel": "fsdp"}
    first = run(data, folder, **changes | {"steps": 2})
    fill(small_disk, int(0.5 * size_of(first.checkpoint)))
    command = ("train", recipe_file(tmp_path), *words(data, folder, **changes | {"steps": 4}))
    code, _, err = finish(*command)
    assert code == 2, err
    assert err.startswith("crt train: ")
    assert "the disk" in err
    assert err.count("\n") == 1
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [first.checkpoint.name]
    (small_disk / "filler").unlink()
    assert main(command) == 0


def test_a_pickle_that_the_manifest_does_not_list_is_not_opened(data, tmp_path):
    folder = tmp_path / "run"
    first = run(data, folder, steps=2)
    (first.checkpoint / ".metadata").write_bytes(b"cos\nsystem\n(S'touch " + bytes(tmp_path / "opened") + b"'\ntR.")
    assert run(data, folder, steps=4).step == 4
    assert not (tmp_path / "opened").exists()
    assert open_checkpoint(first.checkpoint).model() is not None


def test_a_disk_full_from_the_start_is_one_sentence(data, tmp_path, small_disk, capsys):
    run(data, small_disk / "run", steps=4)
    before = metrics(small_disk / "run")
    fill(small_disk, 0)
    command = ["train", recipe_file(tmp_path), *words(data, small_disk / "run", steps=8)]
    assert main(command) == 2
    err = capsys.readouterr().err
    assert "The disk is full" in err
    assert err.count("\n") == 1
    assert metrics(small_disk / "run") == before
    (small_disk / "filler").unlink()
    assert main(command) == 0


class FillsTheDisk:
    """A display that fills the disk after the first step, and remembers whether it was stopped."""

    def __init__(self, disk):
        self.disk, self.stopped = disk, False

    def start(self, config, step, note):
        pass

    def update(self, record):
        if record["step"] == 1 and "loss" in record:
            fill(self.disk, 0)

    def stop(self):
        self.stopped = True


def test_the_live_line_is_taken_away_when_metrics_cannot_be_written(data, small_disk):
    at = trainer(data, small_disk / "run", steps=200, log_every=1, save_every=200, eval_every=200)
    at.display = FillsTheDisk(small_disk)
    with pytest.raises(ContextReadyError, match=r"The disk is full, so .*metrics\.jsonl was not written"):
        at.run(no_interrupts())
    (small_disk / "filler").unlink()
    assert at.display.stopped


def not_a_number(tensors):
    tensors["backbone.layers.0.ffn.up.weight"][0, 0] = float("nan")


def overflow_the_norm(tensors):
    """Logits of 1e25 leave the loss finite, but the squares of their gradients overflow float32."""
    tensors["backbone.unembedding.weight"] *= 1e25


@pytest.mark.parametrize(
    ("change", "message"), [(not_a_number, "loss is nan"), (overflow_the_norm, "gradient norm is inf")]
)
def test_what_is_not_finite_stops_before_the_update(data, tmp_path, change, message, capsys):
    saved = run(data, tmp_path / "run", steps=4).checkpoint
    change_weights(saved, change)
    before = sums(saved)
    assert main(["train", recipe_file(tmp_path), *words(data, tmp_path / "run", steps=8)]) == 2
    err = capsys.readouterr().err
    assert f"At step 4 the {message}" in err
    assert str(saved) in err
    assert err.count("\n") == 1
    assert kept_steps(tmp_path / "run")[-1] == 4
    assert sums(saved) == before


def test_a_run_that_diverges_leaves_a_good_checkpoint(data, tmp_path, capsys):
    command = ["train", recipe_file(tmp_path), *words(data, tmp_path / "run", lr=1e30, warmup=0, save_every=1)]
    assert main(command) == 2
    saved = newest_checkpoint(tmp_path / "run")
    assert f"(last good checkpoint: {saved})" in capsys.readouterr().err
    assert all(p.isfinite().all() for p in open_checkpoint(tmp_path / "run").model().parameters())


def test_weights_that_are_not_finite_are_never_saved(data, tmp_path, capsys):
    command = ["train", recipe_file(tmp_path), *words(data, tmp_path / "run", lr=1e39, warmup=0, save_every=1)]
    assert main(command) == 2
    assert "a weight is not finite, so nothing was saved (last good checkpoint: none yet)" in capsys.readouterr().err
    assert newest_checkpoint(tmp_path / "run") is None


def test_divergence_before_any_checkpoint_says_so(data, tmp_path):
    import torch

    at = trainer(data, tmp_path / "run")
    with torch.no_grad():
        at.model.backbone.embedding.weight.fill_(float("inf"))
    with pytest.raises(ContextReadyError, match="last good checkpoint: none yet"):
        at.run(no_interrupts())
