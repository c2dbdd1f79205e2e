"""A save in which any single call fails: one sentence, the earlier checkpoint is intact, and the next save works."""

import builtins
import errno
import fcntl
import hashlib
import io
import os
import pathlib
import shutil

import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError
from train_helpers import recipe_file, run, sums, tiny, trainer, words

from contextready.cli.main import main
from contextready.errors import ContextReadyError
from contextready.files import locked_folder
from contextready.model.context_ready import build_model
from contextready.model.shapes import weight_shapes
from contextready.runs.checkpoint import Progress, clear_leftovers, named_weights, newest_checkpoint, open_checkpoint
from contextready.runs.config import build_model_settings
from contextready.train.saving import save_checkpoint

CALLS = [
    *((os, name) for name in ("open", "fsync", "mkdir", "rename", "replace", "chmod", "stat", "lstat", "scandir")),
    *((os, name) for name in ("unlink", "rmdir", "close")),
    *((io, "open"), (builtins, "open"), (pathlib.Path, "write_text"), (shutil, "copyfile")),
    *((fcntl, "flock"), (hashlib, "file_digest"), (safetensors.torch, "save_file")),
]


class Failing:
    """Counts the calls of all functions in CALLS, and lets one of them fail."""

    def __init__(self, monkeypatch, number, error):
        self.left, self.error, self.failed = number, error, None
        for module, name in CALLS:
            monkeypatch.setattr(module, name, self.wrapped(getattr(module, name), name))

    def wrapped(self, function, name):
        def call(*arguments, **options):
            self.left -= 1
            if self.left == -1:
                self.failed = name
                if name == "close":
                    function(*arguments, **options)  # the system closes the file even if it reports an error
                if name == "save_file":
                    raise SafetensorError(f"I/O error: (os error {self.error})")
                raise OSError(self.error, os.strerror(self.error))
            return function(*arguments, **options)

        return call


@pytest.fixture
def saved(data, tmp_path):
    """A run with one checkpoint, and a function that saves the next one."""
    at = trainer(data, tmp_path / "run", keep=1)

    def save(step):
        progress = Progress(step=step, best_step=None)
        return save_checkpoint(at.config, progress, at.model, at.optimizer, at.team, data)

    save(1)
    at.step()
    return at.folder, save


def calls_of_a_save(save):
    """How many calls a save makes."""
    with pytest.MonkeyPatch.context() as patch:
        counter = Failing(patch, 10**9, errno.EIO)
        save(2)
    return 10**9 - counter.left


def fail_at(saved, original, i, number):
    """Let the i-th call of a save fail, check what is left, and return the name of the call if it was reported."""
    folder, save = saved
    if {path.name for path in (folder / "checkpoints").iterdir()} != {"step-00000001"}:
        shutil.rmtree(folder)
        shutil.copytree(original, folder)
    with pytest.MonkeyPatch.context() as patch:
        failing = Failing(patch, i, number)
        try:
            save(2)
            message = None
        except ContextReadyError as error:
            message = str(error)
    opened = open_checkpoint(folder)
    opened.model()
    if message is None:
        assert opened.progress.step == 2
        return None
    assert "\n" not in message
    assert str(folder) in message
    # Either the new checkpoint is complete, or the earlier one is as it was.
    assert opened.progress.step == 2 or sums(opened.folder) == sums(newest_checkpoint(original))
    return failing.failed


def fail_everywhere(saved, numbers, first, stride, monkeypatch):
    folder, save = saved
    monkeypatch.setattr(os, "fsync", lambda _: None)  # takes most of the time
    original = shutil.copytree(folder, folder.with_name("original"))
    calls = calls_of_a_save(save)
    assert calls > 100
    failed = {fail_at(saved, original, i, number) for number in numbers for i in range(first, calls, stride)}
    clear_leftovers(folder)
    save(3)
    assert open_checkpoint(folder).progress.step == 3
    return failed


def test_any_call_of_a_save_may_fail(saved, monkeypatch):
    failed = fail_everywhere(saved, [errno.EIO], 0, 3, monkeypatch)
    assert failed >= {"open", "fsync", "mkdir", "flock", "save_file"}


@pytest.mark.slow
def test_every_call_of_a_save_may_fail(saved, monkeypatch):
    failed = fail_everywhere(saved, [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EACCES], 0, 1, monkeypatch)
    every = {"open", "fsync", "mkdir", "rename", "replace", "chmod", "flock", "file_digest", "save_file", "write_text"}
    assert failed >= every | {"copyfile"}


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("name", ["fsync", "mkdir", "flock", "save_file"])
def test_a_failing_disk_ends_training_in_one_sentence(data, tmp_path, capsys, monkeypatch, name, error):
    folder = tmp_path / "run"
    before = sums(run(data, folder, steps=2, save_every=2).checkpoint)
    command = ["train", recipe_file(tmp_path), *words(data, folder, steps=4, save_every=2)]

    def fail(*_, **__):
        if name == "save_file":
            raise SafetensorError(f"I/O error: (os error {error})")
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr({name: module for module, name in CALLS}[name], name, fail)
    assert main(command) == 2
    monkeypatch.undo()
    err = capsys.readouterr().err
    assert err.startswith("crt train: ")
    assert err.count("\n") == 1
    assert str(folder) in err
    assert sums(newest_checkpoint(folder)) == before
    assert main(command) == 0


def test_a_failing_read_ends_training_in_one_sentence(data, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    run(data, folder, steps=2)

    def fail(*_, **__):
        raise RuntimeError("unable to mmap: Input/output error (5)")

    monkeypatch.setattr(torch, "from_file", fail)
    with pytest.raises(ContextReadyError, match=r"model\.safetensors could not be loaded: .*Input/output error"):
        run(data, folder, steps=4)


def test_a_folder_whose_name_is_not_utf8_is_refused_at_the_start(data, tmp_path):
    folder = tmp_path / os.fsdecode(b"run\xff")
    with pytest.raises(ContextReadyError, match="choose another name"):
        run(data, folder, steps=2)
    assert not folder.exists()


def test_deleting_the_lock_lets_no_second_run_in(data, tmp_path):
    folder = tmp_path / "run"
    with locked_folder(folder, "training"):
        (folder / ".lock").unlink()
        with pytest.raises(ContextReadyError, match="Another process is training in"):
            run(data, folder, steps=2)
    assert run(data, folder, steps=2).step == 2


def test_a_run_does_not_write_through_links(data, tmp_path):
    folder, theirs = tmp_path / "run", tmp_path / "theirs"
    folder.mkdir()
    theirs.write_text("precious")
    for name in ("metrics.jsonl", "config.json", ".config.json.partial", ".metrics.jsonl.partial"):
        (folder / name).symlink_to(theirs)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").touch()
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / ".step-00000002.partial").symlink_to(tmp_path / "elsewhere")
    theirs.write_text("")  # an empty file of metrics is valid
    assert run(data, folder, steps=2, save_every=2).step == 2
    assert theirs.read_text() == ""
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["kept"]


@pytest.mark.parametrize("correction", [None, "add", "balanced", "concat", "block_head", "tied"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("extra_ffn", [False, True])
def test_the_shapes_of_weights_follow_from_the_settings(data, tmp_path, correction, bias, extra_ffn):
    config = tiny(data, tmp_path / "run", correction=correction, bias=bias, extra_ffn=extra_ffn, layers=2).model
    found = {name: tuple(p.shape) for name, p in named_weights(build_model(config)).items()}
    assert dict(weight_shapes(config)) == found
    assert build_model_settings({"vocab_size": 3, "width": 4, "layers": 10**6, "heads": 2}).layers == 10**6
