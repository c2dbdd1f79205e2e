"""Writing files and folders so that each is either complete or absent; manifests with checksums; locks."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, NoReturn

from contextready.errors import ContextReadyError
from contextready.formats.json_file import read_json as read_json
from contextready.formats.limits import shown
from contextready.formats.record import Count, FileName, Sha256, read_record

MANIFEST = "manifest.json"
LARGEST_MANIFEST = 64 << 20
LOCK = ".lock"
ATTEMPTS = 100
"""How often a name that other processes create and delete at the same time is tried."""
NO_LOCKS = (errno.EBADF, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)
"""Errors of file systems that cannot lock folders, such as some network file systems."""


@dataclass(frozen=True)
class FileEntry:
    """A file in a manifest."""

    bytes: Count
    sha256: Sha256


@dataclass(frozen=True)
class Manifest:
    """What all manifests have in common."""

    files: dict[FileName, FileEntry]


@contextmanager
def staged_folder(target: Path) -> Iterator[Path]:
    """Yield a folder to fill. It is renamed to `target` if the block succeeds and deleted if it fails.

    Every file is flushed to disk before the rename, so even a power cut leaves a complete folder or none. All files get
    the mode that the umask gives to new files, because some libraries write files that only their owner can read. The
    folder is locked while it is filled, so two processes never mix their files.
    """
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with _claimed(target) as (staging, handle):
            yield staging
            mode = os.fstat(handle).st_mode & 0o666
            for path in staging.rglob("*"):
                if path.is_symlink():
                    continue
                if path.is_file():
                    path.chmod(mode)
                fsync(path)
            fsync(staging)
            _check_still(handle, staging)
            _rename_folder(staging, target)
            fsync(target.parent)


@contextmanager
def staged_file(target: Path) -> Iterator[Path]:
    """Yield the path of a file to write. It is renamed to `target` if the block succeeds and deleted if it fails.

    Like the files of `staged_folder`, it gets the mode that the umask gives to new files, and only one process at a
    time can write it.
    """
    with writing(target), _claimed(target) as (folder, handle):
        staging = folder / target.name
        yield staging
        staging.chmod(os.fstat(handle).st_mode & 0o666)
        fsync(staging)
        _check_still(handle, folder)
        staging.replace(target)


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Report a failure to write `target` in one sentence."""
    try:
        yield
    except BaseException as error:
        if is_disk_full(error):
            raise ContextReadyError(
                f"The disk is full, so {target} was not written and no partial files were kept; free some space."
            ) from error
        if isinstance(error, OSError) or type(error).__name__ == "SafetensorError":
            raise ContextReadyError(f"{target} could not be written: {error}.") from error
        raise


def partial_name(target: Path) -> Path:
    """The temporary name of a folder while it is being written or deleted. A file is written inside such a folder."""
    if target.name in ("", ".."):
        raise ContextReadyError(f"{target} is not a name for a new file or folder; choose another one.")
    return target.with_name(f".{target.name}.partial")


@contextmanager
def _claimed(target: Path) -> Iterator[tuple[Path, int]]:
    """Create and lock the temporary folder of a target, and delete it in the end if it is still there.

    A folder that is already there but not locked was left by a process that was killed, so it is replaced, and so is
    anything else with its name, such as a link.
    """
    staging = partial_name(target)
    for _ in range(ATTEMPTS):
        try:
            os.mkdir(staging)
            is_new = True
        except FileExistsError:
            is_new = False
        try:
            handle = os.open(staging, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # another process has just deleted it
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                raise
            remove(staging)
            continue
        try:
            if not _lock(handle):
                _refuse_second(f"writing {target}")
            if not _is_at(handle, staging):
                continue
            if not is_new:
                remove(staging)
                continue
            try:
                yield staging, handle
            finally:
                if _is_at(handle, staging):
                    shutil.rmtree(staging, ignore_errors=True)
            return
        finally:
            os.close(handle)
    raise ContextReadyError(f"{staging} is created and deleted by other processes all the time; choose another name.")


def _rename_folder(staging: Path, target: Path) -> None:
    try:
        staging.rename(target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise ContextReadyError(
            f"{target} was created by another process in the meantime and is kept; choose another name."
        ) from None


def _check_still(handle: int, staging: Path) -> None:
    if not _is_at(handle, staging):
        raise ContextReadyError(f"{staging} was deleted or replaced while it was being written; try again.")


def _is_at(handle: int, path: Path) -> bool:
    """Whether an open file or folder is still the one at this path."""
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except OSError:
        return False


def remove(path: Path) -> None:
    """Delete a file, a folder or a link (not what it points to), if there is one."""
    with suppress(FileNotFoundError):
        if stat.S_ISDIR(os.lstat(path).st_mode):
            shutil.rmtree(path)
        else:
            path.unlink()


def remove_folder(target: Path) -> None:
    """Delete a folder without ever leaving a partly deleted one at its path."""
    aside = partial_name(target)
    try:
        remove(aside)
        target.rename(aside)
        shutil.rmtree(aside)
    except OSError as error:
        raise ContextReadyError(f"{target} could not be deleted: {error}.") from error


def is_disk_full(error: BaseException) -> bool:
    """Whether the error means that the disk is full (safetensors wraps the system's error in its own)."""
    if isinstance(error, ContextReadyError) and error.__cause__ is not None:
        return is_disk_full(error.__cause__)
    if isinstance(error, OSError):
        # numpy reports a full disk without an error number, as "N requested and M written".
        return error.errno in (errno.ENOSPC, errno.EDQUOT) or "requested and" in str(error)
    return type(error).__name__ == "SafetensorError" and ("os error 28" in str(error) or "os error 122" in str(error))


def check_name(path: Path) -> None:
    """Refuse the name of a new file or folder that could not be recorded in a JSON file and found again."""
    try:
        name = os.fspath(path)
        name.encode("utf-8")
    except UnicodeEncodeError:
        readable = name.encode("utf-8", "backslashreplace").decode("utf-8")
        raise ContextReadyError(f"The name {readable} is not valid UTF-8; choose another name.") from None
    if "\0" in name:
        raise ContextReadyError("A name must not contain null characters; choose another name.")


def write_manifest(folder: Path, format: str, about: Mapping[str, Any]) -> None:
    """Write the manifest of a folder: its format, what it holds, and the size and SHA-256 of every file."""
    files = {path.name: describe_file(path) for path in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps({"format": format, "version": 1, **about, "files": files}, indent=1))


def describe_file(path: Path) -> dict[str, Any]:
    """Return the size and SHA-256 of a file."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def read_manifest(folder: Path, format: str, what: str, schema: type = Manifest) -> dict[str, Any]:
    """Read the manifest of a folder of this format: check its shape, then the sizes of its files.

    `schema` is a dataclass with the keys that this format has besides `format` and `version`.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise ContextReadyError(f"{folder} is not {what}: it has no {MANIFEST}.")
    manifest = read_json(path, LARGEST_MANIFEST)
    if not isinstance(manifest, dict) or manifest.get("format") != format:
        raise ContextReadyError(f"{folder} is not {what}: its {MANIFEST} has another format.")
    version = manifest.get("version")
    if type(version) is not int or version < 1:
        raise ContextReadyError(f"{path} has no valid version. The folder is damaged; create or copy it again.")
    if version > 1:
        raise ContextReadyError(
            f"{folder} has format version {shown(version)}, which needs a newer contextready; update it."
        )
    read_record(schema, manifest, str(path), extra=True)
    for name, described in manifest["files"].items():
        file = folder / name
        size = file.stat().st_size if file.is_file() else None
        if size != described["bytes"]:
            state = "is missing" if size is None else f"has {size:,} bytes instead of {described['bytes']:,}"
            raise ContextReadyError(f"{file} {state}. The folder is damaged; create or copy it again.")
    return manifest


def check_sums(folder: Path, manifest: Mapping[str, Any], names: list[str] | None = None) -> None:
    """Raise an error if the contents of a file do not match the checksum in the manifest."""
    for name in manifest["files"] if names is None else names:
        if name not in manifest["files"]:
            raise ContextReadyError(
                f"{folder / MANIFEST} does not list {name}. The folder is damaged; create or copy it again."
            )
        try:
            found = describe_file(folder / name)["sha256"]
        except OSError as error:
            raise ContextReadyError(f"{folder / name} cannot be read: {error}.") from error
        if found != manifest["files"][name]["sha256"]:
            raise ContextReadyError(
                f"{folder / name} does not match its checksum. The folder is damaged; create or copy it again."
            )


def to_json(value: Any, indent: int | None = None) -> str:
    """Format a value as strict JSON, in which infinities and NaN become null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, replacing an earlier one atomically."""
    with staged_file(path) as staging:
        staging.write_text(to_json(value, indent=1))


@contextmanager
def locked(lock: Path, doing: str) -> Iterator[None]:
    """Hold a lock against other processes. The system releases it even if this process is killed.

    Nothing is ever written to the file. A link in its place is refused.
    """
    _create_folder(lock.parent)
    handle = _open_locked(lock, doing)
    try:
        yield
    finally:
        os.close(handle)


@contextmanager
def locked_folder(folder: Path, doing: str) -> Iterator[None]:
    """Hold the lock of a folder that belongs to one process at a time.

    The folder itself is locked, so that deleting the file .lock lets nobody else in. The file is locked too, because
    some file systems cannot lock folders, and because version 0.1 looks only there.
    """
    _create_folder(folder)
    handle = None
    try:
        try:
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            if not _lock(handle):
                _refuse_second(doing)
        except OSError as error:
            raise ContextReadyError(f"{folder} cannot be locked: {error}.") from error
        with locked(folder / LOCK, doing):
            yield
    finally:
        if handle is not None:
            os.close(handle)


def is_locked(folder: Path) -> bool:
    """Whether another process holds the lock of a folder; False if there is no such folder."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not _lock(handle)
    finally:
        os.close(handle)


def _create_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ContextReadyError(
            f"{folder} cannot be created because a file is in the way; choose another folder."
        ) from None


def _open_locked(lock: Path, doing: str) -> int:
    try:
        for _ in range(ATTEMPTS):
            handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
            try:
                if not stat.S_ISREG(os.fstat(handle).st_mode):
                    raise ContextReadyError(f"{lock} is not a regular file; remove it.")
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(handle, lock):
                    return handle
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)  # the file was deleted between opening and locking
    except BlockingIOError:
        _refuse_second(doing)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR):
            raise ContextReadyError(f"{lock} is a link or a folder instead of a file; remove it.") from None
        raise ContextReadyError(f"{lock} cannot be locked: {error}.") from error
    raise ContextReadyError(f"{lock} is created and deleted by other processes all the time; choose another folder.")


def _lock(handle: int) -> bool:
    """Lock an open folder if the file system can do that; False if another process holds the lock."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    return True


def _refuse_second(doing: str) -> NoReturn:
    raise ContextReadyError(f"Another process is {doing}; wait for it to finish, or choose another folder.") from None


def fsync(path: Path) -> None:
    """Flush a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
