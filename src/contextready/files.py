"""Writing files and folders so that each is either complete or absent; manifests with checksums; locks."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any

from contextready.errors import ContextReadyError

MANIFEST = "manifest.json"


@contextmanager
def staged_folder(target: Path) -> Iterator[Path]:
    """Yield a folder to fill. It is renamed to `target` if the block succeeds and deleted if it fails.

    Every file is flushed to disk before the rename, so even a power cut leaves a complete folder or none. All files get
    the mode that the umask gives to new files, because some libraries write files that only their owner can read.
    """
    staging = partial_name(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    mode = staging.stat().st_mode & 0o666
    try:
        yield staging
        for path in staging.rglob("*"):
            if path.is_file() and not path.is_symlink():
                path.chmod(mode)
            fsync(path)
        fsync(staging)
        staging.rename(target)
        fsync(target.parent)
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        if is_disk_full(error):
            raise ContextReadyError(
                f"The disk is full, so {target} was not written and no partial files were kept; free some space."
            ) from error
        raise


@contextmanager
def staged_file(target: Path) -> Iterator[Path]:
    """Yield the path of a file to write. It is renamed to `target` if the block succeeds and deleted if it fails.

    Like the files of `staged_folder`, it gets the mode that the umask gives to new files.
    """
    staging = partial_name(target)
    try:
        mode = _mode_of_new_file(staging)
        yield staging
        staging.chmod(mode)
        fsync(staging)
        staging.replace(target)
    except BaseException as error:
        staging.unlink(missing_ok=True)
        if is_disk_full(error):
            raise ContextReadyError(
                f"The disk is full, so {target} was not written and no partial file was kept; free some space."
            ) from error
        if isinstance(error, OSError) or type(error).__name__ == "SafetensorError":
            raise ContextReadyError(f"{target} could not be written: {error}.") from error
        raise


def _mode_of_new_file(path: Path) -> int:
    """The mode that the umask gives to a new file at this path; reading the umask itself would change it briefly."""
    path.unlink(missing_ok=True)
    path.touch()
    mode = path.stat().st_mode & 0o666
    path.unlink()
    return mode


def partial_name(target: Path) -> Path:
    """The temporary name of a file or folder while it is being written or deleted."""
    return target.with_name(f".{target.name}.partial")


def remove_folder(target: Path) -> None:
    """Delete a folder without ever leaving a partly deleted one at its path."""
    aside = partial_name(target)
    shutil.rmtree(aside, ignore_errors=True)
    target.rename(aside)
    shutil.rmtree(aside)


def is_disk_full(error: BaseException) -> bool:
    """Whether the error means that the disk is full (safetensors wraps the system's error in its own)."""
    if isinstance(error, OSError):
        # numpy reports a full disk without an error number, as "N requested and M written".
        return error.errno in (errno.ENOSPC, errno.EDQUOT) or "requested and" in str(error)
    return type(error).__name__ == "SafetensorError" and ("os error 28" in str(error) or "os error 122" in str(error))


def write_manifest(folder: Path, format: str, about: Mapping[str, Any]) -> None:
    """Write the manifest of a folder: its format, what it holds, and the size and SHA-256 of every file."""
    files = {path.name: describe_file(path) for path in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps({"format": format, "version": 1, **about, "files": files}, indent=1))


def describe_file(path: Path) -> dict[str, Any]:
    """Return the size and SHA-256 of a file."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def read_manifest(folder: Path, format: str, what: str) -> dict[str, Any]:
    """Read the manifest of a folder of this format, and check the sizes of its files."""
    path = folder / MANIFEST
    if not path.is_file():
        raise ContextReadyError(f"{folder} is not {what}: it has no {MANIFEST}.")
    manifest = read_json(path)
    if not isinstance(manifest, dict) or manifest.get("format") != format:
        raise ContextReadyError(f"{folder} is not {what}: its {MANIFEST} has another format.")
    if manifest.get("version") != 1:
        raise ContextReadyError(
            f"{folder} has format version {manifest.get('version')}, which needs a newer contextready; update it."
        )
    if not isinstance(manifest.get("files"), dict):
        raise ContextReadyError(f"{path} lists no files. The folder is damaged; create or copy it again.")
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
        if describe_file(folder / name)["sha256"] != manifest["files"][name]["sha256"]:
            raise ContextReadyError(
                f"{folder / name} does not match its checksum. The folder is damaged; create or copy it again."
            )


def read_json(path: Path) -> Any:
    """Read a JSON file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ContextReadyError(f"{path} cannot be read as JSON: {error}.") from None


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
    """Hold a lock against other processes. The system releases it even if this process is killed."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ContextReadyError(
            f"{lock.parent} cannot be created because a file is in the way; choose another folder."
        ) from None
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ContextReadyError(
                f"Another process is {doing}; wait for it to finish, or choose another folder."
            ) from None
        yield


def fsync(path: Path) -> None:
    """Flush a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
