"""Many runs of `crt`, a few at a time, each in its own process; what is done is not done again."""

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
"""For glibc: do not give every activation's memory back to the system, to fault it in again at the next step."""


class Job(NamedTuple):
    """One command of `crt` that fills a folder."""

    name: str
    out: Path
    words: tuple[str, ...]
    steps: int
    """How many it makes at most."""


class Watcher(Protocol):
    """What shows the jobs to a person."""

    def __call__(self, running: Sequence[Job], done: int) -> None:
        """Called again and again while jobs run."""


@dataclass
class _Running:
    job: Job
    process: subprocess.Popen[bytes]
    log: Any = field(repr=False)


def run_jobs(jobs: Sequence[Job], at_once: int, watch: Watcher, ended: Callable[[Job], None]) -> int | None:
    """Run all jobs; the first signal stops them after their step, and its number is returned.

    A job that fails stops the others and is told of in one sentence.
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
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)} | KEEP_MEMORY
    # A session of its own: Ctrl-C reaches this process alone, which passes it on once.
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
        lines = path.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
        raise ContextReadyError(f"{one.job.name} failed: {lines[-1]} (All it said: {path})")
