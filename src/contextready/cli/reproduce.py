"""`crt reproduce`: run the experiments that are missing, show their progress, and report all results."""

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from contextready.cli.console import make_console
from contextready.cli.options import LARGEST_SEED, Verbs, parse_numbers, verb, whole_number
from contextready.cli.reproduce_pointer import PointerExperiment
from contextready.cli.reproduce_training import TrainingExperiment
from contextready.errors import ContextReadyError
from contextready.files import locked
from contextready.formats.limits import check_count, shown

if TYPE_CHECKING:
    from rich.console import Console

    from contextready.train.jobs import Job


class Experiment(Protocol):
    """An experiment: its runs, how their progress is shown, and its report."""

    @property
    def help(self) -> str:
        """Its parts, for the help text."""

    @property
    def scales(self) -> Sequence[str]:
        """The scales that it has runs for."""

    @property
    def parts(self) -> Sequence[str]:
        """The names of its parts."""

    @property
    def default_part(self) -> str:
        """The part that is run if none is named."""

    def jobs(
        self, scale: str, parts: Sequence[str], seeds: Sequence[int], out: Path, changes: Sequence[str]
    ) -> tuple[list["Job"], int]:
        """Return the runs of these parts that are still to train, and the number of all."""

    def has_results(self, scale: str, out: Path) -> bool:
        """Whether there is anything to report."""

    def report(self, scale: str, out: Path) -> None:
        """Print and write the tables and plots of all runs in a folder, of all parts and seeds."""

    def progress(self, running: Sequence["Job"]) -> Any:
        """Return a table of the running jobs."""

    def outcome(self, job: "Job") -> str:
        """Describe how a run ended."""


EXPERIMENTS: dict[str, Experiment] = {"pointer": PointerExperiment(), "training": TrainingExperiment()}

DESCRIPTION = """\
Run an experiment: pointer chasing from the paper, the task that measures how many lookups in a
row a model can make, or our study of training, which compares context-ready models with
transformers at equal training compute. Each row of a table is a training run of its own, and
several run at a time. Run the same command again to resume. At the end the command prints the
tables of all runs in the folder. It writes them to report.md and report.json, with plots."""
EXAMPLES = """\
crt reproduce pointer --part headline
crt reproduce pointer --seeds 0,1,2                # the table in miniature, with three seeds
crt reproduce pointer --scale paper --part table   # the sizes of the paper, for GPUs
crt reproduce pointer --report                     # report the runs so far, train nothing
crt reproduce training --part headline             # one context-ready layer at equal compute"""
MOST_JOBS = 1024


def add(verbs: Verbs) -> None:
    """Add `crt reproduce`."""
    reproduce = verb(
        verbs,
        "reproduce",
        "run an experiment and report its tables and plots",
        DESCRIPTION,
        EXAMPLES,
        "\n\n".join(experiment.help for experiment in EXPERIMENTS.values()),
    )
    reproduce.add_argument("experiment", choices=list(EXPERIMENTS), help="the experiment")
    reproduce.add_argument(
        "settings", nargs="*", metavar="key=value", help="settings for every run, for example steps=500"
    )
    reproduce.add_argument(
        "--scale", choices=["cpu", "paper"], default="cpu", help="cpu: a miniature; paper: the sizes of the paper"
    )
    reproduce.add_argument("--part", metavar="PART", help="the rows to run, or all (see below)")
    reproduce.add_argument("--seeds", help="random seeds to run each row with, such as 0,1,2 (default: 0)")
    reproduce.add_argument("--out", type=Path, help="folder for all runs (default: runs/EXPERIMENT-SCALE)")
    reproduce.add_argument(
        "--jobs", type=whole_number, help="number of runs at a time (default: one per core, or one if there is a GPU)"
    )
    reproduce.add_argument("--report", action="store_true", help="report all runs in the folder and train nothing")
    reproduce.set_defaults(run=_run, more_words="settings")


def _run(options: argparse.Namespace) -> int:
    name, scale = options.experiment, options.scale
    experiment = EXPERIMENTS[name]
    if scale not in experiment.scales:
        raise ContextReadyError(
            f"{name} has no runs at scale {scale}; choose one of: {', '.join(experiment.scales)}. Every setting can be "
            "changed, for example width=1024."
        )
    out = options.out or Path(f"runs/{name}-{scale}")
    if options.report:
        for option in ("part", "seeds", "jobs", "settings"):
            if getattr(options, option) not in (None, []):
                given = " ".join(options.settings) if option == "settings" else f"--{option}"
                raise ContextReadyError(f"--report covers all runs in {out} as they are; leave {given} out.")
        report(experiment, scale, out)
        return 0
    if options.jobs is not None:
        check_count("--jobs", options.jobs, 1, MOST_JOBS)
    text = "0" if options.seeds is None else options.seeds
    seeds = parse_numbers("--seeds", text, "0,1,2", LARGEST_SEED, least=-LARGEST_SEED)
    if len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise ContextReadyError(f"--seeds must be different numbers that are at least 0, but got {shown(text)}.")
    part = options.part or experiment.default_part
    if part not in (*experiment.parts, "all"):
        raise ContextReadyError(
            f"{name} has no part '{shown(part)}'; choose one of: {', '.join((*experiment.parts, 'all'))}."
        )
    parts = experiment.parts if part == "all" else [part]
    return run_reproduce(experiment, scale, parts, seeds, out, changes=options.settings, at_once=options.jobs)


def run_reproduce(
    experiment: Experiment,
    scale: str,
    parts: Sequence[str],
    seeds: Sequence[int],
    out: Path,
    *,
    changes: Sequence[str],
    at_once: int | None,
) -> int:
    """Train the runs of these parts that are not finished, then report all runs in the folder."""
    import torch

    from contextready.train.jobs import run_jobs

    console = make_console()
    at_once = at_once or (1 if torch.accelerator.is_available() else os.cpu_count() or 1)
    with locked(out / ".lock", f"training the runs in {out}"):
        jobs, total = experiment.jobs(scale, parts, seeds, out, changes)
        console.print(f"{out}: {len(jobs)} of {total} runs are still to train, {at_once} at a time.")
        with Overview(console, experiment, len(jobs)) as overview:
            stopped = run_jobs(jobs, at_once, overview.show, overview.ended)
    if stopped is None:
        report(experiment, scale, out)
        return 0
    if experiment.has_results(scale, out):
        report(experiment, scale, out)
    console.print("Stopped. Run the same command again to resume.")
    return 128 + stopped


def report(experiment: Experiment, scale: str, out: Path) -> None:
    """Print and write the report, if there are runs."""
    if not experiment.has_results(scale, out):
        raise ContextReadyError(f"There is no run of this experiment in {out} yet; leave out --report to train.")
    experiment.report(scale, out)


class Overview:
    """Shows the running jobs and their progress: a live table in a terminal, a line per finished run elsewhere."""

    def __init__(self, console: "Console", experiment: Experiment, total: int) -> None:
        from rich.live import Live

        self.console, self.experiment, self.total, self.began = console, experiment, total, time.monotonic()
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
            from rich.console import Group

            minutes = (time.monotonic() - self.began) / 60
            line = f"{done} of {self.total} runs done, {minutes:.0f} min"
            self._live.update(Group(self.experiment.progress(running), line), refresh=True)

    def ended(self, job: "Job") -> None:
        """Print the outcome of a run that has ended."""
        minutes = (time.monotonic() - self.began) / 60
        self.console.print(f"{minutes:5.1f} min  {job.name}: {self.experiment.outcome(job)}")
