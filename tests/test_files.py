"""Complete files and folders, their modes and checksums, optional packages, and hints in error messages."""

import errno
import hashlib
import json
import os
import stat
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from contextready.errors import ContextReadyError, nearest
from contextready.extras import install_command, require
from contextready.files import (
    check_name,
    check_sums,
    describe_file,
    is_disk_full,
    partial_name,
    read_json,
    read_manifest,
    remove_folder,
    staged_file,
    staged_folder,
    write_json,
    write_manifest,
)


def test_a_folder_appears_when_it_is_complete(tmp_path):
    target = tmp_path / "new" / "folder"
    with staged_folder(target) as staging:
        (staging / "a").write_text("content")
        assert not target.exists()
        assert staging == partial_name(target)
    assert (target / "a").read_text() == "content"
    assert list(target.parent.iterdir()) == [target]


def test_every_file_is_on_the_disk_before_the_rename(tmp_path, monkeypatch):
    synced, sync = [], os.fsync

    def recording(handle):
        synced.append((os.fstat(handle).st_ino, (tmp_path / "out").exists()))
        sync(handle)

    monkeypatch.setattr(os, "fsync", recording)
    with staged_folder(tmp_path / "out") as staging:
        for name in "ab":
            (staging / name).write_text(name)
    before = {inode for inode, exists in synced if not exists}
    out = tmp_path / "out"
    assert before == {(out / "a").stat().st_ino, (out / "b").stat().st_ino, out.stat().st_ino}
    assert (tmp_path.stat().st_ino, True) in synced


@pytest.fixture(params=[0o022, 0o027], ids=oct)
def mode_of_new_files(request):
    """Set the umask, and give the mode that files should have."""
    earlier = os.umask(request.param)
    yield 0o666 & ~request.param
    os.umask(earlier)


def write_privately(path):
    """Write as safetensors does: to a temporary file that only its owner can read."""
    handle, name = tempfile.mkstemp(dir=path.parent)
    os.write(handle, b"content")
    os.close(handle)
    os.rename(name, path)


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_all_files_of_a_folder_obey_the_umask(tmp_path, mode_of_new_files):
    with staged_folder(tmp_path / "out") as staging:
        save_file({"weight": torch.zeros(2)}, staging / "model.safetensors")
        (staging / "config.json").write_text("{}")
        (staging / "below").mkdir()
        write_privately(staging / "below" / "private")
        (staging / "executable").touch(mode=0o777)
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert len(files) == 4
    assert {mode_of(path) for path in files} == {mode_of_new_files}


def test_a_single_file_obeys_the_umask(tmp_path, mode_of_new_files):
    for _ in range(2):  # new, and over an earlier file
        with staged_file(tmp_path / "file") as staging:
            write_privately(staging)
        assert mode_of(tmp_path / "file") == mode_of_new_files
    with staged_file(tmp_path / "weights") as staging:
        save_file({"weight": torch.zeros(2)}, staging)
    assert mode_of(tmp_path / "weights") == mode_of_new_files
    assert {path.name for path in tmp_path.iterdir()} == {"file", "weights"}


def test_a_link_is_kept_and_its_target_is_not_changed(tmp_path):
    write_privately(tmp_path / "theirs")
    with staged_folder(tmp_path / "out") as staging:
        (staging / "link").symlink_to(tmp_path / "theirs")
    assert (tmp_path / "out" / "link").is_symlink()
    assert mode_of(tmp_path / "theirs") == 0o600


def test_a_file_that_was_not_written_is_an_error(tmp_path):
    with pytest.raises(ContextReadyError, match="could not be written"), staged_file(tmp_path / "file"):
        pass
    assert list(tmp_path.iterdir()) == []


def fill_and_fail(target, error):
    with staged_folder(target) as staging:
        (staging / "a").write_text("half")
        raise error


@pytest.mark.parametrize("error", [RuntimeError("broke"), KeyboardInterrupt(), SystemExit(1)])
def test_an_error_leaves_nothing(tmp_path, error):
    with pytest.raises(type(error)):
        fill_and_fail(tmp_path / "out", error)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_cleared(tmp_path):
    left = partial_name(tmp_path / "out")
    left.mkdir()
    (left / "old").write_text("old")
    with staged_folder(tmp_path / "out") as staging:
        (staging / "new").write_text("new")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["new"]


def test_a_folder_created_in_the_meantime_is_kept(tmp_path):
    out = tmp_path / "out"
    staged = staged_folder(out)
    (staged.__enter__() / "mine").touch()
    out.mkdir()
    (out / "theirs").touch()
    with pytest.raises(ContextReadyError, match="out was created by another process in the meantime and is kept"):
        staged.__exit__(None, None, None)
    assert [path.name for path in out.iterdir()] == ["theirs"]
    assert list(tmp_path.iterdir()) == [out]


class SafetensorError(Exception):
    pass


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        SafetensorError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path, error):
    with pytest.raises(ContextReadyError, match=r"The disk is full, so .*out was not written"):
        fill_and_fail(tmp_path / "out", error)
    assert list(tmp_path.iterdir()) == []


def test_other_errors_do_not_mean_a_full_disk():
    assert not is_disk_full(OSError(errno.EACCES, "Permission denied"))
    assert not is_disk_full(SafetensorError("header too large"))
    assert not is_disk_full(ValueError("os error 28"))


def test_a_folder_is_removed(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a").touch()
    partial_name(tmp_path / "out").mkdir()
    remove_folder(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def described(tmp_path):
    (tmp_path / "a").write_bytes(b"1234")
    (tmp_path / "b").write_bytes(b"")
    write_manifest(tmp_path, "kind", {"about": 5})
    return tmp_path


def test_the_manifest_describes_every_file(described):
    manifest = read_manifest(described, "kind", "a thing")
    assert manifest == {
        "format": "kind",
        "version": 1,
        "about": 5,
        "files": {
            "a": {"bytes": 4, "sha256": hashlib.sha256(b"1234").hexdigest()},
            "b": {"bytes": 0, "sha256": hashlib.sha256(b"").hexdigest()},
        },
    }
    assert manifest["files"]["a"] == describe_file(described / "a")
    check_sums(described, manifest)


def test_changed_files_are_refused(described):
    manifest = read_manifest(described, "kind", "a thing")
    (described / "a").write_bytes(b"1235")
    check_sums(described, read_manifest(described, "kind", "a thing"), ["b"])
    with pytest.raises(ContextReadyError, match="a does not match its checksum"):
        check_sums(described, manifest)
    (described / "a").write_bytes(b"123")
    with pytest.raises(ContextReadyError, match=r"a has 3 bytes instead of 4\. The folder is damaged"):
        read_manifest(described, "kind", "a thing")
    (described / "a").unlink()
    with pytest.raises(ContextReadyError, match=r"a is missing\. The folder is damaged"):
        read_manifest(described, "kind", "a thing")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is not a thing: it has no manifest.json"),
        (b"[]", "is not a thing: its manifest.json has another format"),
        (b'{"format": "other", "version": 1}', "its manifest.json has another format"),
        (b'{"format": "kind", "version": 7}', "format version 7, which needs a newer contextready"),
        (b'{"format": ', "manifest.json cannot be read as JSON: "),
        (b"\xff", "manifest.json is not UTF-8 text"),
        (b'{"format": "kind", "version": true}', "manifest.json has no valid version"),
        (b'{"format": "kind", "version": 1}', "manifest.json lacks the key 'files'"),
        (b'{"format": "kind", "version": 1, "files": []}', "files must be an object"),
        (b'{"format": "kind", "version": 1, "files": {"a": 3}}', "manifest.json, files, a must be an object"),
        (b'{"format": "kind", "version": 1, "files": {"a": {"bytes": 1}}}', "files, a lacks the key 'sha256'"),
        (b'{"format": "kind", "version": 1, "files": {"../a": {}}}', "must be the plain name of a file"),
        (b'{"format": "kind", "version": 1, "files": {"/etc/passwd": {}}}', "must be the plain name of a file"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_other_manifests_are_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(ContextReadyError, match=message):
        read_manifest(tmp_path, "kind", "a thing")


def test_what_the_manifest_does_not_list_has_no_checksum(described):
    with pytest.raises(ContextReadyError, match=r"manifest\.json does not list c\. The folder is damaged"):
        check_sums(described, read_manifest(described, "kind", "a thing"), ["c"])


def test_a_file_that_cannot_be_read_is_one_sentence(described, monkeypatch):
    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    manifest = read_manifest(described, "kind", "a thing")
    monkeypatch.setattr(hashlib, "file_digest", broken)
    with pytest.raises(ContextReadyError, match=r"a cannot be read: .*Input/output error"):
        check_sums(described, manifest)


def test_json_is_replaced_in_one_step(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"old": 1})
    inode = path.stat().st_ino
    write_json(path, {"new": [1.5, None, "é"]})
    assert read_json(path) == {"new": [1.5, None, "é"]}
    assert path.stat().st_ino != inode
    with pytest.raises(TypeError):
        write_json(path, {"bad": object()})
    assert json.loads(path.read_text()) == {"new": [1.5, None, "é"]}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), SafetensorError("os error 5")])
@pytest.mark.parametrize("staged", [staged_folder, staged_file])
def test_an_input_or_output_error_is_one_sentence_and_leaves_nothing(tmp_path, staged, error):
    with pytest.raises(ContextReadyError, match=r"out could not be written: ") as refusal, staged(tmp_path / "out"):
        raise error
    assert "\n" not in str(refusal.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [os.fsdecode(b"r\xff"), "a\0b"])
def test_names_that_could_not_be_recorded_are_refused(name):
    with pytest.raises(ContextReadyError, match="choose another name") as refusal:
        check_name(Path(name))
    str(refusal.value).encode("utf-8")
    check_name(Path("é/日本"))


@pytest.mark.parametrize("name", ["", "/", "a/.."])
def test_a_target_needs_a_name(name):
    with pytest.raises(ContextReadyError, match="is not a name for a new file or folder"):
        partial_name(Path(name))


def test_installed_packages_are_imported():
    assert require("json", "data") is json


@pytest.mark.parametrize("module", ["no_such_package", "no_such_package.part"])
def test_missing_packages_are_named_with_the_command_that_installs_them(module):
    with pytest.raises(ContextReadyError) as refusal:
        require(module, "plot")
    assert str(refusal.value).startswith("The package no_such_package is not installed; install it with: pip install ")
    assert str(refusal.value).endswith(install_command("plot"))


def test_a_broken_package_is_not_reported_as_missing(tmp_path, monkeypatch):
    (tmp_path / "broken_package.py").write_text("import a_dependency_of_it")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_dependency_of_it"):
        require("broken_package", "plot")


def test_a_close_name_is_suggested():
    assert nearest("wdth", ["width", "heads"]) == "did you mean 'width'?"


@pytest.mark.parametrize("count", [1, 12])
def test_a_few_valid_names_are_all_listed(count):
    names = [f"name{i}" for i in range(count)]
    assert nearest("?", names) == f"choose one of: {', '.join(names)}."


@pytest.mark.parametrize("count", [13, 5000])
def test_of_many_valid_names_the_first_are_listed(count):
    names = tuple(f"name{i}" for i in range(count))
    assert nearest("?", names) == f"choose one of: {', '.join(names[:12])}, … ({count} in all)."
