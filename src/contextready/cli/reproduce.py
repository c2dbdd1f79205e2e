"""`crt reproduce`: run what is missing, show it as it goes, report what there is."""

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contextready.cli.console import make_console
from contextready.cli.options import Verbs, parse_numbers, verb
from contextready.cli.pointer import describe_outcome
from contextready.errors import ContextReadyError
from contextready.files import locked

if TYPE_CHECKING:
    from rich.console import Console

    from contextready.train.jobs import Job


def add(verbs: Verbs) -> None:
    """Describe `crt reproduce`."""
    from contextready.pointer.trials import PARTS, SCALES

    reproduce = verb(
        verbs,
        "reproduce",
        "the paper's experiments, with one command each",
        "Run an experiment of the paper, all its rows and both readings of the task, several at a\n"
        "time; the same command goes on where it stopped. Prints the tables of all that the folder\n"
        "holds, and writes them as report.md and report.json, with pictures as PNG and SVG.\n\n"
        "  headline   one context-ready layer against a transformer of two: minutes on two cores\n"
        "  table      transformers of every depth and one context-ready layer, in both readings\n"
        "  growth     one context-ready layer with more hops\n"
        "  parallel   one context-ready layer trained by parallel passes\n"
        "  all        all of them",
        "examples:\n"
        "  crt reproduce pointer --part headline\n"
        "  crt reproduce pointer --scale cpu --seeds 0,1,2\n"
        "  crt reproduce pointer --scale paper --part table",
    )
    reproduce.add_argument("experiment", choices=["pointer"], help="which one")
    reproduce.add_argument(
        "settings", nargs="*", metavar="key=value", help="settings that change every run, for example steps=500"
    )
    reproduce.add_argument(
        "--scale", choices=list(SCALES), default="cpu", help="miniature or as in the paper (default: cpu)"
    )
    reproduce.add_argument("--part", choices=[*PARTS, "all"], help="which rows to run (default: table)")
    reproduce.add_argument("--seeds", help="with which seeds, as 0,1,2 (default: 0)")
    reproduce.add_argument("--out", type=Path, help="folder of all runs (default: runs/pointer-SCALE)")
    reproduce.add_argument(
        "--jobs", type=int, help="runs at a time (default: one for each core, or one where there is a GPU)"
    )
    reproduce.add_argument("--report", action="store_true", help="only report what the folder holds; train nothing")
    reproduce.set_defaults(run=_run, more_words="settings")


def _run(options: argparse.Namespace) -> int:
    from contextready.pointer.trials import PARTS

    out = options.out or Path(f"runs/pointer-{options.scale}")
    if options.report:
        for name in ("part", "seeds", "jobs", "settings"):
            if getattr(options, name) not in (None, []):
                given = " ".join(options.settings) if name == "settings" else f"--{name}"
                raise ContextReadyError(f"--report tells of all runs in {out} as they were made; leave {given} out.")
        report(options.scale, out)
        return 0
    if options.jobs is not None and options.jobs < 1:
        raise ContextReadyError(f"--jobs {options.jobs} is too few; give at least 1.")
    text = "0" if options.seeds is None else options.seeds
    seeds = parse_numbers("--seeds", text, "0,1,2")
    if len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise ContextReadyError(f"--seeds {text}: give each seed once, 0 or above.")
    parts = PARTS if options.part == "all" else [options.part or "table"]
    return run_reproduce(options.scale, parts, seeds, out, options.settings, at_once=options.jobs)


def run_reproduce(
    scale: str,
    parts: Sequence[str],
    seeds: Sequence[int],
    out: Path,
    changes: Sequence[str],
    *,
    at_once: int | None,
) -> int:
    """Make the runs of these parts that are not finished, then report all that the folder holds."""
    import torch

    from contextready.pointer.results import jobs_of, results_of
    from contextready.pointer.trials import PARTS, trials_of
    from contextready.train.jobs import run_jobs

    console = make_console()
    trials = trials_of(scale, parts)
    at_once = at_once or (1 if torch.accelerator.is_available() else os.cpu_count() or 1)
    with locked(out / ".lock", f"making the runs in {out}"):
        jobs = jobs_of(trials, seeds, out, changes)
        console.print(f"{out}: {len(jobs)} of {len(trials) * len(seeds)} runs to make, {at_once} at a time.")
        with Overview(console, len(jobs)) as overview:
            stopped = run_jobs(jobs, at_once, overview.show, overview.ended)
    if stopped is None:
        report(scale, out)
        return 0
    if results_of(trials_of(scale, PARTS), out):
        report(scale, out)
    console.print("Stopped; the same command goes on from here.")
    return 128 + stopped


def report(scale: str, out: Path) -> None:
    """Print and write tables and pictures of all runs in a folder, whichever parts and seeds they are of."""
    from contextready.pointer.report import as_markdown, draw_report, write_report
    from contextready.pointer.results import results_of
    from contextready.pointer.trials import PARTS, trials_of

    console, results = make_console(), results_of(trials_of(scale, PARTS), out)
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

    def show(self, running: "Sequence[Job]", done: int) -> None:
        """Refresh the table."""
        if self._live is not None:
            self._live.update(self._table(running, done), refresh=True)

    def _table(self, running: "Sequence[Job]", done: int) -> Any:
        from rich.console import Group

        from contextready.cli.pointer_display import level_table
        from contextready.pointer.outcome import outcome

        rows = []
        for job in running:
            newest = outcome(job.out)
            if newest is not None:
                rows.append((job.name, newest.accuracy, f"step {newest.step:,} of {job.steps:,}"))
        minutes = (time.monotonic() - self.began) / 60
        levels = max((len(row[1]) for row in rows), default=0)
        return Group(level_table("run", rows, levels), f"{done} of {self.total} runs done, {minutes:.0f} min")

    def ended(self, job: "Job") -> None:
        """Say what a run came to."""
        from contextready.pointer.outcome import outcome

        newest = outcome(job.out)
        assert newest is not None
        minutes = (time.monotonic() - self.began) / 60
        self.console.print(f"{minutes:5.1f} min  {job.name}: {describe_outcome(newest, len(newest.accuracy))}")
