"""Runs many `crt` commands, a few at a time, each in its own process."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from contextready.errors import ContextReadyError
from contextready.train.trainer import Interrupts

LOG = "console.txt"
POLL_SECONDS = 0.5
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}
"""Keeps glibc from returning the memory of activations to the system, only to page it in again at the next step."""


class Job(NamedTuple):
    """One `crt` command that writes to a folder."""

    name: str
    out: Path
    words: tuple[str, ...]
    steps: int
    """The largest number of steps that it makes."""


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
                while waiting and len(running) < at_once:
                    running.append(_start(waiting.pop(0), threads))
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
    )
    return _Running(job, process, log)


def _finish(one: _Running) -> None:
    one.log.close()
    if one.process.returncode:
        path = one.job.out / LOG
        lines = path.read_text(errors="replace").strip().splitlines() or ["it printed nothing"]
        raise ContextReadyError(f"{one.job.name} failed: {lines[-1]} (full output: {path})")
