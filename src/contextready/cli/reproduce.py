"""`crt reproduce`: run the experiments that are missing, show their progress, and report all results."""

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contextready.cli.console import make_console
from contextready.cli.options import LARGEST_SEED, Verbs, parse_numbers, verb, whole_number
from contextready.cli.pointer import describe_outcome
from contextready.errors import ContextReadyError
from contextready.files import locked
from contextready.formats.limits import check_count, shown

if TYPE_CHECKING:
    from rich.console import Console

    from contextready.train.jobs import Job


DESCRIPTION = """\
Reproduce an experiment of the paper. The one available is pointer chasing, the task that
measures how many lookups in a row a model can make. Each row of a table is a training run of its
own, and several run at a time. Run the same command again to resume. At the end the command
prints the tables of all runs in the folder. It writes them to report.md and report.json, with
plots as PNG and SVG."""
EXAMPLES = """\
crt reproduce pointer --part headline
crt reproduce pointer --seeds 0,1,2                # the table in miniature, with three seeds
crt reproduce pointer --scale paper --part table   # the sizes of the paper, for GPUs
crt reproduce pointer --report                     # report the runs so far, train nothing"""
NOTES = """\
parts:
  headline                one context-ready layer against a two-layer transformer, with masked
                          answers; minutes on two cores
  table                   one context-ready layer and transformers of several depths, in both
                          variants of the task: with masked and with visible answers
  growth                  one context-ready layer with more hops (lookups in a row)
  parallel                one context-ready layer trained by K parallel passes instead of
                          backpropagation through time (BPTT)
  all                     everything above

crt pointer --help explains hops, levels, the window and masked answers."""


MOST_JOBS = 1024


def add(verbs: Verbs) -> None:
    """Add `crt reproduce`."""
    from contextready.pointer.trials import PARTS, SCALES

    reproduce = verb(
        verbs,
        "reproduce",
        "run an experiment of the paper and report its tables and plots",
        DESCRIPTION,
        EXAMPLES,
        NOTES,
    )
    reproduce.add_argument("experiment", choices=["pointer"], help="the experiment")
    reproduce.add_argument(
        "settings", nargs="*", metavar="key=value", help="settings for every run, for example steps=500"
    )
    reproduce.add_argument(
        "--scale", choices=list(SCALES), default="cpu", help="cpu: a miniature; paper: the sizes of the paper"
    )
    reproduce.add_argument("--part", choices=[*PARTS, "all"], help="the rows to run (default: table)")
    reproduce.add_argument("--seeds", help="random seeds to run each row with, such as 0,1,2 (default: 0)")
    reproduce.add_argument("--out", type=Path, help="folder for all runs (default: runs/pointer-SCALE)")
    reproduce.add_argument(
        "--jobs", type=whole_number, help="number of runs at a time (default: one per core, or one if there is a GPU)"
    )
    reproduce.add_argument("--report", action="store_true", help="report all runs in the folder and train nothing")
    reproduce.set_defaults(run=_run, more_words="settings")


def _run(options: argparse.Namespace) -> int:
    from contextready.pointer.trials import PARTS

    out = options.out or Path(f"runs/pointer-{options.scale}")
    if options.report:
        for name in ("part", "seeds", "jobs", "settings"):
            if getattr(options, name) not in (None, []):
                given = " ".join(options.settings) if name == "settings" else f"--{name}"
                raise ContextReadyError(f"--report covers all runs in {out} as they are; leave {given} out.")
        report(options.scale, out)
        return 0
    if options.jobs is not None:
        check_count("--jobs", options.jobs, 1, MOST_JOBS)
    text = "0" if options.seeds is None else options.seeds
    seeds = parse_numbers("--seeds", text, "0,1,2", LARGEST_SEED, least=-LARGEST_SEED)
    if len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise ContextReadyError(f"--seeds must be different numbers that are at least 0, but got {shown(text)}.")
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
    """Train the runs of these parts that are not finished, then report all runs in the folder."""
    import torch

    from contextready.pointer.results import jobs_of, results_of
    from contextready.pointer.trials import PARTS, trials_of
    from contextready.train.jobs import run_jobs

    console = make_console()
    trials = trials_of(scale, parts)
    at_once = at_once or (1 if torch.accelerator.is_available() else os.cpu_count() or 1)
    with locked(out / ".lock", f"training the runs in {out}"):
        jobs = jobs_of(trials, seeds, out, changes)
        console.print(f"{out}: {len(jobs)} of {len(trials) * len(seeds)} runs are still to train, {at_once} at a time.")
        with Overview(console, len(jobs)) as overview:
            stopped = run_jobs(jobs, at_once, overview.show, overview.ended)
    if stopped is None:
        report(scale, out)
        return 0
    if results_of(trials_of(scale, PARTS), out):
        report(scale, out)
    console.print("Stopped. Run the same command again to resume.")
    return 128 + stopped


def report(scale: str, out: Path) -> None:
    """Print and write the tables and plots of all runs in a folder, of all parts and seeds."""
    from contextready.pointer.report import as_markdown, draw_report, write_report
    from contextready.pointer.results import results_of
    from contextready.pointer.trials import PARTS, trials_of

    console, results = make_console(), results_of(trials_of(scale, PARTS), out)
    if not results:
        raise ContextReadyError(f"There is no run of this experiment in {out} yet; leave out --report to train.")
    markdown = as_markdown(results, out)
    console.print(f"\n{markdown}\n")
    write_report(markdown, results, out)
    try:
        plots = draw_report(results, out)
        console.print(f"The report is {out / 'report.md'}. The plots beside it: {', '.join(p.name for p in plots)}")
    except ContextReadyError as error:
        console.print(f"The report is {out / 'report.md'}. Its plots were not drawn. {error}")


class Overview:
    """Shows the running jobs and their progress: a live table in a terminal, a line per finished run elsewhere."""

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
        """Refresh the live table."""
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
        """Print the outcome of a run that has ended."""
        from contextready.pointer.outcome import outcome

        newest = outcome(job.out)
        assert newest is not None
        minutes = (time.monotonic() - self.began) / 60
        self.console.print(f"{minutes:5.1f} min  {job.name}: {describe_outcome(newest, len(newest.accuracy))}")
