"""Files that are whole or absent: folders written aside and renamed, checksums, locks."""

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
    """Give a folder to fill that becomes `target` in one step when the block ends well, and vanishes when it does not.

    Every file reaches the disk before the rename, so even a power cut leaves a whole folder or none.
    """
    staging = partial_name(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        yield staging
        for path in staging.iterdir():
            fsync(path)
        fsync(staging)
        staging.rename(target)
        fsync(target.parent)
    except BaseException as error:
        shutil.rmtree(staging, ignore_errors=True)
        if is_disk_full(error):
            raise ContextReadyError(
                f"The disk is full: {target} was not written and nothing half-written was kept; free some space."
            ) from error
        raise


@contextmanager
def staged_file(target: Path) -> Iterator[Path]:
    """Give a file to write that becomes `target` in one step when the block ends well, and vanishes otherwise."""
    staging = partial_name(target)
    try:
        yield staging
        fsync(staging)
        staging.replace(target)
    except BaseException as error:
        staging.unlink(missing_ok=True)
        if is_disk_full(error):
            raise ContextReadyError(
                f"The disk is full: {target} was not written and nothing half-written was kept; free some space."
            ) from error
        if isinstance(error, OSError) or type(error).__name__ == "SafetensorError":
            raise ContextReadyError(f"{target} could not be written: {error}.") from error
        raise


def partial_name(target: Path) -> Path:
    """Where a file or folder lies while it is written or deleted."""
    return target.with_name(f".{target.name}.partial")


def remove_folder(target: Path) -> None:
    """Delete a folder so that no moment shows half of it."""
    aside = partial_name(target)
    shutil.rmtree(aside, ignore_errors=True)
    target.rename(aside)
    shutil.rmtree(aside)


def is_disk_full(error: BaseException) -> bool:
    """Whether this is the system saying there is no room (safetensors wraps it in an error of its own)."""
    if isinstance(error, OSError):
        # numpy tells of a full disk in words of its own: how much it wanted to write, and how much it did.
        return error.errno in (errno.ENOSPC, errno.EDQUOT) or "requested and" in str(error)
    return type(error).__name__ == "SafetensorError" and ("os error 28" in str(error) or "os error 122" in str(error))


def write_manifest(folder: Path, format: str, about: Mapping[str, Any]) -> None:
    """Describe a folder: what it is, and the size and SHA-256 of every file in it."""
    files = {path.name: describe_file(path) for path in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps({"format": format, "version": 1, **about, "files": files}, indent=1))


def describe_file(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def read_manifest(folder: Path, format: str, what: str) -> dict[str, Any]:
    """The manifest of a folder of this kind, with the sizes of its files checked."""
    path = folder / MANIFEST
    if not path.is_file():
        raise ContextReadyError(f"{folder} is not {what}: it has no {MANIFEST}.")
    manifest = read_json(path)
    if not isinstance(manifest, dict) or manifest.get("format") != format:
        raise ContextReadyError(f"{folder} is not {what}: its {MANIFEST} is of another kind.")
    if manifest.get("version") != 1:
        raise ContextReadyError(
            f"{folder} was written by a newer contextready (version {manifest.get('version')}); update this one."
        )
    if not isinstance(manifest.get("files"), dict):
        raise ContextReadyError(f"{path} lists no files: the folder is damaged, so make or copy it again.")
    for name, described in manifest["files"].items():
        file = folder / name
        size = file.stat().st_size if file.is_file() else None
        if size != described["bytes"]:
            state = "is missing" if size is None else f"has {size:,} bytes instead of {described['bytes']:,}"
            raise ContextReadyError(f"{file} {state}: the folder is damaged, so make or copy it again.")
    return manifest


def check_sums(folder: Path, manifest: Mapping[str, Any], names: list[str] | None = None) -> None:
    """Refuse files whose bytes are not the ones that were written."""
    for name in manifest["files"] if names is None else names:
        if describe_file(folder / name)["sha256"] != manifest["files"][name]["sha256"]:
            raise ContextReadyError(
                f"{folder / name} does not match its checksum: the folder is damaged, so make or copy it again."
            )


def read_json(path: Path) -> Any:
    """A JSON file, or one sentence on why not."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ContextReadyError(f"{path} cannot be read as JSON: {error}.") from None


def to_json(value: Any, indent: int | None = None) -> str:
    """Strict JSON: a number that is not finite, which JSON does not know, becomes null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file in one step."""
    with staged_file(path) as staging:
        staging.write_text(to_json(value, indent=1))


@contextmanager
def locked(lock: Path, doing: str) -> Iterator[None]:
    """Keep a second process out; the system lets go of the lock whatever happens to this one."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ContextReadyError(f"{lock.parent} cannot be a folder: a file is in the way; choose another.") from None
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ContextReadyError(f"Another process is {doing}; wait for it, or choose another folder.") from None
        yield


def fsync(path: Path) -> None:
    """Force a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
