"""Opening files safely: regular files only, and no larger than expected."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from contextready.errors import ContextReadyError


def regular_size(path: Path) -> int:
    """The size of a regular file. Pipes, devices and folders are refused, because reading them may never end."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        raise ContextReadyError(f"{path} does not exist.") from None
    except (OSError, ValueError) as error:
        raise ContextReadyError(f"{path} cannot be read: {error}.") from None
    return _checked_size(path, status)


@contextmanager
def open_regular(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """Open a regular file for reading, and give the file and its size. A failure to read it is one sentence too."""
    regular_size(path)
    try:
        # Opening does not wait, in case the file was replaced by a pipe in the meantime.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
            yield file, _checked_size(path, os.fstat(file.fileno()))
    except OSError as error:
        raise ContextReadyError(f"{path} cannot be read: {error}.") from None


def read_bytes(path: Path, largest: int) -> bytes:
    """The contents of a regular file of at most `largest` bytes."""
    with open_regular(path) as (file, size):
        if size > largest:
            raise ContextReadyError(
                f"{path} has {size:,} bytes, but files of its kind have at most {largest:,}; it is damaged or not what "
                "it claims to be."
            )
        return file.read(largest)


def read_text(path: Path, largest: int) -> str:
    """The contents of a regular UTF-8 file of at most `largest` bytes."""
    try:
        return read_bytes(path, largest).decode("utf-8")
    except UnicodeDecodeError:
        raise ContextReadyError(f"{path} is not UTF-8 text.") from None


def _checked_size(path: Path, status: os.stat_result) -> int:
    if not stat.S_ISREG(status.st_mode):
        raise ContextReadyError(f"{path} is not a regular file.")
    return status.st_size
