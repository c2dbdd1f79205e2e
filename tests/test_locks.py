"""Locks, processes that write to the same place, and links that were planted where files will be written."""

import errno
import fcntl
import os
import re
import stat
import subprocess
import sys

import pytest

from contextready.errors import ContextReadyError
from contextready.files import (
    is_locked,
    locked,
    locked_folder,
    partial_name,
    remove_folder,
    staged_file,
    staged_folder,
    write_json,
)


def test_a_lock_keeps_others_out_and_is_released(tmp_path):
    lock = tmp_path / "new" / ".lock"
    with locked(lock, "writing it"):
        with (
            pytest.raises(ContextReadyError, match="Another process is writing it; wait for it"),
            locked(lock, "writing it"),
        ):
            pass
        with lock.open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with locked(lock, "writing it"):
        pass


def test_a_locked_folder_is_seen_as_such_and_not_locked_by_looking(tmp_path):
    folder = tmp_path / "run"
    assert not is_locked(folder)
    with locked_folder(folder, "training"):
        assert is_locked(folder)
    assert not is_locked(folder)
    with locked_folder(folder, "training"):
        pass


def test_a_link_in_the_place_of_a_lock_is_refused(tmp_path):
    (tmp_path / "theirs").write_text("precious")
    (tmp_path / ".lock").symlink_to(tmp_path / "theirs")
    for lock in (locked(tmp_path / ".lock", "working"), locked_folder(tmp_path, "working")):
        with pytest.raises(ContextReadyError, match=r"\.lock is a link or a folder instead of a file; remove it"), lock:
            pass
    assert (tmp_path / "theirs").read_text() == "precious"


def test_a_lock_writes_nothing(tmp_path):
    (tmp_path / "theirs").write_text("precious")
    os.link(tmp_path / "theirs", tmp_path / ".lock")
    with locked(tmp_path / ".lock", "working"):
        pass
    assert (tmp_path / "theirs").read_text() == "precious"


def test_a_pipe_in_the_place_of_a_lock_is_refused(tmp_path):
    os.mkfifo(tmp_path / ".lock")
    with pytest.raises(ContextReadyError, match="is not a regular file"), locked(tmp_path / ".lock", "working"):
        pass


def test_deleting_the_lock_of_a_folder_lets_nobody_in(tmp_path):
    folder = tmp_path / "run"
    with locked_folder(folder, "training"):
        (folder / ".lock").unlink()
        second = locked_folder(folder, "training")
        with pytest.raises(ContextReadyError, match="Another process is training; wait for it"), second:
            pass
        (folder / ".lock").touch()
        third = locked_folder(folder, "training")
        with pytest.raises(ContextReadyError, match="Another process is training; wait for it"), third:
            pass
    with locked_folder(folder, "training"):
        pass


def test_a_lock_deleted_before_it_is_held_is_tried_again(tmp_path, monkeypatch):
    lock, flock, deleted = tmp_path / ".lock", fcntl.flock, []

    def delete_first(handle, how):
        if not deleted:
            lock.unlink()
            deleted.append(True)
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", delete_first)
    with locked(lock, "working"):
        monkeypatch.undo()
        with pytest.raises(ContextReadyError, match="Another process is working"), locked(lock, "working"):
            pass


def test_a_file_system_that_cannot_lock_folders_still_has_the_file(tmp_path, monkeypatch):
    flock = fcntl.flock

    def files_only(handle, how):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(handle, how)

    monkeypatch.setattr(fcntl, "flock", files_only)
    with locked_folder(tmp_path, "working"):
        second = locked_folder(tmp_path, "working")
        with pytest.raises(ContextReadyError, match="Another process is working"), second:
            pass
    with staged_folder(tmp_path / "out") as staging:
        (staging / "a").touch()


@pytest.mark.parametrize("staged", [staged_folder, staged_file])
def test_a_second_writer_is_refused_and_disturbs_nothing(tmp_path, staged):
    with staged(tmp_path / "out") as staging:
        (staging / "a" if staged is staged_folder else staging).write_text("mine")
        second = staged(tmp_path / "out")
        with pytest.raises(ContextReadyError, match=r"Another process is writing .*out; wait for it"), second:
            pass
    assert (tmp_path / "out" / "a" if staged is staged_folder else tmp_path / "out").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


WRITER = """
import sys, time
from pathlib import Path
from contextready.errors import ContextReadyError
from contextready.files import staged_folder
out, name = Path(sys.argv[1]), sys.argv[2]
try:
    with staged_folder(out) as staging:
        for i in range(40):
            (staging / f"{i}").write_text(name)
            time.sleep(0.005)
    print("wrote", end="")
except ContextReadyError as error:
    print(error, end="")
"""


def test_of_processes_that_write_at_once_one_wins(tmp_path):
    commands = [[sys.executable, "-c", WRITER, str(tmp_path / "out"), name] for name in "abc"]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    said = [process.communicate(timeout=60)[0] for process in started]
    assert sorted(message == "wrote" for message in said) == [False, False, True]
    assert all(re.search("Another process is writing|created by another process", m) for m in said if m != "wrote")
    contents = {path.read_text() for path in (tmp_path / "out").iterdir()}
    assert contents == {"abc"[said.index("wrote")]}
    assert len(list((tmp_path / "out").iterdir())) == 40
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("planted", ["link to a folder", "link to a file", "dangling link", "file", "pipe"])
@pytest.mark.parametrize("staged", [staged_folder, staged_file])
def test_nothing_is_written_through_what_is_planted(tmp_path, planted, staged):
    theirs, partial = tmp_path / "theirs", partial_name(tmp_path / "out")
    if planted == "link to a folder":
        theirs.mkdir()
        (theirs / "out").write_text("precious")
    elif planted == "link to a file":
        theirs.write_text("precious")
    if "link" in planted:
        partial.symlink_to(theirs)
    elif planted == "file":
        partial.write_text("left by an earlier version")
    else:
        os.mkfifo(partial)
    with staged(tmp_path / "out") as staging:
        (staging / "out" if staged is staged_folder else staging).write_text("mine")
    assert (tmp_path / "out" / "out" if staged is staged_folder else tmp_path / "out").read_text() == "mine"
    assert not os.path.lexists(partial)
    if theirs.exists():
        assert (theirs / "out" if theirs.is_dir() else theirs).read_text() == "precious"


def test_a_link_in_the_place_of_a_file_is_replaced(tmp_path):
    (tmp_path / "theirs").write_text("precious")
    (tmp_path / "a.json").symlink_to(tmp_path / "theirs")
    write_json(tmp_path / "a.json", 3)
    assert (tmp_path / "theirs").read_text() == "precious"
    assert not (tmp_path / "a.json").is_symlink()


def test_a_folder_is_removed_past_a_planted_link(tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "a").write_text("precious")
    (tmp_path / "out").mkdir()
    partial_name(tmp_path / "out").symlink_to(tmp_path / "theirs")
    remove_folder(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]
    assert (tmp_path / "theirs" / "a").exists()


def test_a_folder_that_was_replaced_while_it_was_filled_is_not_used(tmp_path):
    def replace_and_finish():
        with staged_folder(tmp_path / "out") as staging:
            staging.rename(tmp_path / "elsewhere")
            staging.mkdir()
            (staging / "theirs").touch()

    with pytest.raises(ContextReadyError, match="was deleted or replaced while it was being written"):
        replace_and_finish()
    assert not (tmp_path / "out").exists()
    assert (partial_name(tmp_path / "out") / "theirs").exists()
