"""Errors of the disk at chosen calls of a save, without help of the system.

While a checkpoint is being saved, every function with which Python reaches the disk is counted, and the chosen call
raises an error instead. safetensors writes in native code, so its call writes half of the file and then fails. A limit
on the size of files makes the system itself refuse the rest of a file, in native code too.
"""

import builtins
import errno
import io
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch

from contextready.train.trainer import Trainer

READS = ("os.stat", "os.lstat", "os.fstat", "os.scandir", "os.listdir", "open to read")
CHANGES = (
    *("open", "mkdir", "rename", "replace", "chmod", "fsync"),
    *("unlink", "remove", "rmdir", "close", "write", "sendfile"),
)
CALLS = CHANGES + tuple(name.removeprefix("os.") for name in READS if name.startswith("os."))


class _Injector:
    """Counts the calls of a save, and fails at one of them."""

    def __init__(self, number: int | None, code: int) -> None:
        self.number, self.code, self.seen, self.saving, self.failed = number, code, [], False, False

    def reached(self, name: str) -> bool:
        """Note a call; whether it is the one that has to fail."""
        if not self.saving:
            return False
        self.seen.append(name)
        self.failed |= len(self.seen) - 1 == self.number
        return len(self.seen) - 1 == self.number

    def check(self, name: str) -> None:
        """Note a call, and raise an error if it is the one that has to fail."""
        if self.reached(name):
            raise OSError(self.code, os.strerror(self.code))


class _File:
    """An open file whose writes, flushes and closing are counted too."""

    def __init__(self, inner: Any, injector: _Injector) -> None:
        self._inner, self._injector = inner, injector

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __enter__(self) -> "_File":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._inner)

    def write(self, content: Any) -> int:
        if self._injector.reached("file.write"):
            self._inner.write(content[: len(content) // 2])
            raise OSError(self._injector.code, os.strerror(self._injector.code))
        return int(self._inner.write(content))

    def flush(self) -> None:
        self._injector.check("file.flush")
        self._inner.flush()

    def close(self) -> None:
        self._inner.close()  # the file is closed even if closing reports an error
        self._injector.check("file.close")


@contextmanager
def _injected(injector: _Injector) -> Iterator[None]:
    """Replace every function that reaches the disk. Meant for a process that ends soon: nothing is restored."""
    for name in CALLS:
        setattr(os, name, _counted(f"os.{name}", getattr(os, name), injector))
    real_open = io.open

    def opened(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        writes = not {*mode}.isdisjoint("wax+")
        injector.check("open to write" if writes else "open to read")
        inner = real_open(file, mode, *arguments, **options)
        return _File(inner, injector) if injector.saving and writes else inner

    builtins.open = io.open = opened  # type: ignore[assignment]
    save_file = safetensors.torch.save_file

    def saved(tensors: Any, path: Any, *arguments: Any, **options: Any) -> None:
        fails = injector.reached("safetensors.save_file")
        save_file(tensors, path, *arguments, **options)
        if fails:
            os.truncate(path, Path(path).stat().st_size // 2)
            what = os.strerror(injector.code)
            raise safetensors.SafetensorError(f"Error while serializing: I/O error: {what} (os error {injector.code})")

    safetensors.torch.save_file = saved
    real_save = Trainer._save

    def save(self: Any, *arguments: Any) -> Any:
        injector.saving = True
        try:
            return real_save(self, *arguments)
        finally:
            injector.saving = False

    Trainer._save = save  # type: ignore[method-assign]
    yield


def _counted(name: str, function: Callable[..., Any], injector: _Injector) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        if name == "os.close":
            function(*arguments, **options)  # the file is closed even if closing reports an error
            injector.check(name)
            return None
        injector.check(name)
        return function(*arguments, **options)

    return call


def count_calls(save: Callable[[], Any]) -> list[str]:
    """The names of all calls of the saves that happen in `save`."""
    injector = _Injector(None, 0)
    with _injected(injector):
        save()
    return injector.seen


@contextmanager
def errors_at(number: int, code: str) -> Iterator[None]:
    """Let the call with this number fail with an error such as EIO."""
    with _injected(_Injector(number, getattr(errno, code))):
        yield


@contextmanager
def limit_file_size(size: int) -> Iterator[None]:
    """Let the system refuse to write more than this many bytes to a file while a checkpoint is saved."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    real_save = Trainer._save

    def save(self: Any, *arguments: Any) -> Any:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        try:
            return real_save(self, *arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    Trainer._save = save  # type: ignore[method-assign]
    yield
