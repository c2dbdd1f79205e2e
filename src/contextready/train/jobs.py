"""Runs many `crt` commands, a few at a time, each in its own process."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from contextready.errors import ContextReadyError
from contextready.files import is_locked
from contextready.train.trainer import Interrupts

LOG = "console.txt"
POLL_SECONDS = 0.5
PR_SET_PDEATHSIG = 1
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}
"""Keeps glibc from returning the memory of activations to the system, only to page it in again at the next step."""


class Job(NamedTuple):
    """One `crt` command that writes to a folder."""

    name: str
    out: Path
    words: tuple[str, ...]
    steps: int
    """The largest number of steps that it makes."""
    after: Path | None = None
    """The folder of a job that must end first, if it is among those that are run together."""
    macs: float = 0.0
    """The multiply-accumulates that are still to do, for estimates of the time."""


class Watcher(Protocol):
    """A callback that shows the progress of the jobs."""

    def __call__(self, running: Sequence[Job], done: int) -> None:
        """Called repeatedly while jobs run; `done` is the number of finished jobs."""


@dataclass
class _Running:
    job: Job
    process: subprocess.Popen[bytes]
    log: Any = field(repr=False)


def run_jobs(jobs: Sequence[Job], at_once: int, watch: Watcher, ended: Callable[[Job], None]) -> int | None:
    """Run all jobs. The first SIGINT or SIGTERM stops them after their current step, and its number is returned.

    If a job fails, the others are stopped and its error is raised. Each job may use an equal share of the CPU cores,
    unless the user has set OMP_NUM_THREADS.
    """
    waiting, threads = list(jobs), max(1, (os.cpu_count() or 1) // at_once)
    running: list[_Running] = []
    with Interrupts() as stopped:
        try:
            while (waiting or running) and stopped.received is None:
                while len(running) < at_once and (ready := _first_ready(waiting, running)) is not None:
                    waiting.remove(ready)
                    running.append(_start(ready, threads))
                watch([one.job for one in running], len(jobs) - len(waiting) - len(running))
                time.sleep(POLL_SECONDS)
                for one in [one for one in running if one.process.poll() is not None]:
                    running.remove(one)
                    _finish(one)
                    ended(one.job)
        finally:
            for one in running:
                one.process.terminate()
            for one in running:
                one.process.wait()
                one.log.close()
    return stopped.received


def _first_ready(waiting: Sequence[Job], running: Sequence[_Running]) -> Job | None:
    """Return the first job that waits for no other one, and whose folder no other process is writing to.

    Such a process may be the job of a command that was killed. It ends soon, and its run is resumed.
    """
    unfinished = {job.out for job in waiting} | {one.job.out for one in running}
    return next((job for job in waiting if job.after not in unfinished and not is_locked(job.out)), None)


def _start(job: Job, threads: int) -> _Running:
    job.out.mkdir(parents=True, exist_ok=True)
    log = (job.out / LOG).open("ab")
    environment = {"OMP_NUM_THREADS": str(threads)} | KEEP_MEMORY | os.environ
    # In a session of its own the job does not receive Ctrl-C; this process passes it on once.
    process = subprocess.Popen(
        [sys.executable, "-m", "contextready", *job.words],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
        preexec_fn=_end_with_parent if sys.platform == "linux" else None,
    )
    return _Running(job, process, log)


_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def _end_with_parent() -> None:
    """Ask Linux to send this process a SIGTERM, after which it saves and ends, if its parent is killed."""
    assert _LIBC is not None
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _finish(one: _Running) -> None:
    one.log.close()
    if one.process.returncode:
        path = one.job.out / LOG
        lines = path.read_text(errors="replace").strip().splitlines() or ["it printed nothing"]
        raise ContextReadyError(f"{one.job.name} failed: {lines[-1]} (full output: {path})")
