"""`crt reproduce`: run what is missing, show it as it goes, report what there is."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from contextready.errors import ContextReadyError
from contextready.files import locked
from contextready.reproduce.jobs import Job, run_jobs
from contextready.reproduce.pointer import jobs_of, results_of
from contextready.reproduce.pointer_report import as_markdown, draw_report, write_report
from contextready.reproduce.pointer_rows import PARTS, rows_of
from contextready.train.pointer import describe_outcome, outcome
from contextready.train.pointer_display import level_table

if TYPE_CHECKING:
    from rich.console import Console


def run_reproduce(
    scale: str,
    parts: Sequence[str],
    seeds: Sequence[int],
    out: Path,
    changes: Sequence[str],
    at_once: int | None,
) -> int:
    """Make the runs of these parts that are not finished, then report all that the folder holds."""
    console = _console()
    rows = rows_of(scale, parts)
    at_once = at_once or (1 if torch.accelerator.is_available() else os.cpu_count() or 1)
    with locked(out / ".lock", f"making the runs in {out}"):
        jobs = jobs_of(rows, seeds, out, changes)
        console.print(f"{out}: {len(jobs)} of {len(rows) * len(seeds)} runs to make, {at_once} at a time.")
        with Overview(console, len(jobs)) as overview:
            stopped = run_jobs(jobs, at_once, overview.show, overview.ended)
    if stopped is None:
        return report(scale, out)
    if results_of(rows_of(scale, PARTS), out):
        report(scale, out)
    console.print("Stopped; the same command goes on from here.")
    return 128 + stopped


def report(scale: str, out: Path) -> int:
    """Print and write tables and pictures of all runs in a folder, whichever parts and seeds they are of."""
    console, results = _console(), results_of(rows_of(scale, PARTS), out)
    if not results:
        raise ContextReadyError(f"There is no run of these in {out} yet.")
    markdown = as_markdown(results, out)
    console.print(f"\n{markdown}\n")
    write_report(markdown, results, out)
    try:
        pictures = draw_report(results, out)
        console.print(f"The report: {out / 'report.md'}. Pictures: {', '.join(path.name for path in pictures)}")
    except ContextReadyError as error:
        console.print(f"The report: {out / 'report.md'}. No pictures: {error}")
    return 0


def _console() -> "Console":
    from rich.console import Console

    return Console(highlight=False, markup=False, soft_wrap=True)


class Overview:
    """What runs now and how far it is: a live table in a terminal, a line for each ended run elsewhere."""

    def __init__(self, console: "Console", total: int) -> None:
        from rich.live import Live

        self.console, self.total, self.began = console, total, time.monotonic()
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    def __enter__(self) -> "Overview":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, running: Sequence[Job], done: int) -> None:
        """Refresh the table."""
        if self._live is not None:
            self._live.update(self._table(running, done), refresh=True)

    def _table(self, running: Sequence[Job], done: int) -> Any:
        from rich.console import Group

        rows = []
        for job in running:
            found = outcome(job.out)
            if found is not None:
                rows.append((job.name, found.accuracy, f"step {found.step:,} of {job.steps:,}"))
        minutes = (time.monotonic() - self.began) / 60
        levels = max((len(row[1]) for row in rows), default=0)
        return Group(level_table("run", rows, levels), f"{done} of {self.total} runs done, {minutes:.0f} min")

    def ended(self, job: Job) -> None:
        """Say what a run came to."""
        found = outcome(job.out)
        assert found is not None
        minutes = (time.monotonic() - self.began) / 60
        self.console.print(f"{minutes:5.1f} min  {job.name}: {describe_outcome(found, len(found.accuracy))}")
