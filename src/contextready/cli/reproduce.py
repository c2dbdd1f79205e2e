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
from contextready.cli.reproduce_state import StateExperiment
from contextready.cli.reproduce_tables import TableExperiment
from contextready.cli.reproduce_timing import TimingExperiment
from contextready.cli.reproduce_training import TrainingExperiment
from contextready.errors import ContextReadyError, nearest
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

    def folder(self, scale: str) -> Path:
        """The folder for its runs if the user names none."""

    def jobs(
        self,
        scale: str,
        parts: Sequence[str],
        seeds: Sequence[int],
        out: Path,
        changes: Sequence[str],
        missing_ok: bool = False,
    ) -> tuple[list["Job"], int]:
        """Return the runs of these parts that are still to train, and the number of all.

        With `missing_ok`, the data may be missing, because nothing will be trained.
        """

    def has_results(self, scale: str, out: Path) -> bool:
        """Whether there is anything to report."""

    def report(self, scale: str, out: Path) -> None:
        """Print and write the tables and plots of all runs in a folder, of all parts and seeds."""

    def progress(self, running: Sequence["Job"]) -> Any:
        """Return a table of the running jobs."""

    def outcome(self, job: "Job") -> str:
        """Describe how a run ended."""


TABLES = (
    *("main", "efficiency", "width", "d1", "seq", "correction", "variants", "scale", "k_min", "k10", "depth-d1"),
    *("depth-deep", "block-size", "token-matched", "fine-tuning", "wikipedia", "controls", "trend"),
)
"""The tables that are reproduced by training on text, and two of ours. Importing them would import torch."""
EXPERIMENTS: dict[str, Experiment] = {
    "pointer": PointerExperiment(),
    "state": StateExperiment(),
    "training": TrainingExperiment(),
    **{name: TableExperiment([name]) for name in TABLES},
    "timing": TimingExperiment(),
}
ALL, LEDGER = "all", "ledger"
ELSEWHERE = {
    "pointer-wave": "The table pointer-wave shows how one run learns; crt reproduce pointer draws it as wave.png.",
    "hyperparameters": "The table hyperparameters has settings, not results; crt info --table hyperparameters prints "
    "it, and crt train RECIPE --dry-run those of a recipe.",
}
"""Tables that have no runs of their own."""

DESCRIPTION = """\
Check the paper: train the rows of a table, print them beside the paper's figures, and write
the ledger of its claims. Each row is a training run of its own, several run at a time, and
tables share their runs. Run the same command again to resume.

With --scale cpu, the tables are miniatures that keep the question of the table: the same
comparisons, with small models and short runs on any text. With --scale paper, they have the
sizes and settings of the author's runs, and need GPUs."""
EXAMPLES = """\
crt reproduce all --dry-run                        # what will run, and how long it takes
crt reproduce k_min --seeds 0,1,2                  # one table, three seeds
crt reproduce all --jobs 2                         # every table in miniature
crt reproduce ledger                               # the claims, what we measured, and a verdict
crt reproduce efficiency --scale paper --dry-run   # the sizes of the paper
crt reproduce pointer --part headline
crt reproduce state --part headline                # one context-ready layer follows a state
crt reproduce training --part headline             # one context-ready layer at equal compute"""
TABLES_HELP = f"""\
experiments:
  {", ".join(TABLES[:8])},
  {", ".join(TABLES[8:14])},
  {", ".join(TABLES[14:])}
                          tables of the paper (crt info --table describes them); the last two
                          are ours: controls, and differences during the training
  timing                  the table of decoding speeds, measured on this machine
  all                     all of these and pointer, one after another
  ledger                  the claims of the paper with our figures and verdicts; trains nothing
  pointer                 pointer chasing
  state                   state tracking: word problems of groups, parity, variable assignment
  training                our study of training, at equal compute

The tables use data/small unless data=FOLDER is given. Their runs, results.json and report.md
are in one folder."""
MOST_JOBS = 1024
CORE = 16e9
"""Multiply-accumulates per second that one core made in our runs of the miniature, with everything around them."""
A100, UTILISATION = 312e12, 0.4
"""Peak speed in FLOP/s, and the fraction of it that is reached, as in crt plan."""


def add(verbs: Verbs) -> None:
    """Add `crt reproduce`."""
    reproduce = verb(
        verbs,
        "reproduce",
        "run an experiment and report its tables and plots",
        DESCRIPTION,
        EXAMPLES,
        "\n\n".join([TABLES_HELP, *(experiment.help for experiment in EXPERIMENTS.values() if experiment.help)]),
    )
    reproduce.add_argument(
        "experiment", metavar="EXPERIMENT", help="a table, all, ledger, pointer, state, timing or training"
    )
    reproduce.add_argument(
        "settings", nargs="*", metavar="key=value", help="settings for every run, for example steps=500"
    )
    reproduce.add_argument(
        "--scale", choices=["cpu", "paper"], default="cpu", help="cpu: a miniature; paper: the sizes of the paper"
    )
    reproduce.add_argument("--part", metavar="PART", help="the rows to run, or all (see below)")
    reproduce.add_argument("--seeds", help="random seeds to run each row with, such as 0,1,2 (default: 0)")
    reproduce.add_argument(
        "--out", type=Path, help="folder for all runs (default: runs/reproduce-SCALE, or runs/EXPERIMENT-SCALE)"
    )
    reproduce.add_argument(
        "--jobs", type=whole_number, help="number of runs at a time (default: one per core, or one if there is a GPU)"
    )
    reproduce.add_argument("--report", action="store_true", help="report all runs in the folder and train nothing")
    reproduce.add_argument(
        "--dry-run", action="store_true", help="print what would run and how long, and train nothing"
    )
    reproduce.add_argument(
        "--results", type=Path, metavar="FILE", help="result file for the ledger (default: results.json in the folder)"
    )
    reproduce.set_defaults(run=_run, more_words="settings")


def _run(options: argparse.Namespace) -> int:
    name, scale = options.experiment, options.scale
    if name == LEDGER:
        return _ledger(options)
    if name in ELSEWHERE:
        raise ContextReadyError(ELSEWHERE[name])
    if name not in (*EXPERIMENTS, ALL):
        raise ContextReadyError(f"Unknown experiment '{shown(name)}'; {nearest(name, [*EXPERIMENTS, ALL, LEDGER])}")
    if options.results is not None:
        raise ContextReadyError("--results is for crt reproduce ledger; leave it out.")
    if options.jobs is not None:
        check_count("--jobs", options.jobs, 1, MOST_JOBS)
    text = "0" if options.seeds is None else options.seeds
    seeds = parse_numbers("--seeds", text, "0,1,2", LARGEST_SEED, least=-LARGEST_SEED)
    if len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise ContextReadyError(f"--seeds must be different numbers that are at least 0, but got {shown(text)}.")
    if name == ALL:
        return _run_all(options, seeds)
    experiment = EXPERIMENTS[name]
    if scale not in experiment.scales:
        raise ContextReadyError(
            f"{name} has no runs at scale {scale}; choose one of: {', '.join(experiment.scales)}. Every setting can be "
            "changed, for example width=1024."
        )
    out = options.out or experiment.folder(scale)
    if options.report:
        _refuse_beside("--report", f"covers all runs in {out} as they are", options, "dry_run")
        report(experiment, scale, out)
        return 0
    parts = _parts(name, experiment, options.part)
    if options.dry_run:
        print_plan(experiment, scale, parts, seeds, out, options.settings, options.jobs)
        return 0
    return run_reproduce(experiment, scale, parts, seeds, out, changes=options.settings, at_once=options.jobs)


def _run_all(options: argparse.Namespace, seeds: Sequence[int]) -> int:
    """Run the tables, pointer chasing, and the timing last, when nothing else runs."""
    scale, pointer = options.scale, EXPERIMENTS["pointer"]
    if options.part is not None or options.report:
        raise ContextReadyError(
            "all has neither parts nor a report of its own; crt reproduce ledger reports everything."
        )
    stages: list[tuple[Experiment, Path, Sequence[str], Sequence[int], Sequence[str]]] = [
        (TableExperiment(TABLES), TableExperiment(TABLES).folder(scale), (), seeds, options.settings),
        (pointer, pointer.folder(scale), ("table",), seeds, ()),
    ]
    if scale == "cpu":
        stages.append((EXPERIMENTS["timing"], EXPERIMENTS["timing"].folder(scale), (), (0,), ()))
    for experiment, folder, parts, of_stage, changes in stages:
        out = folder if options.out is None else options.out / "pointer" if experiment is pointer else options.out
        if options.dry_run:
            print_plan(experiment, scale, parts, of_stage, out, changes, options.jobs)
            continue
        code = run_reproduce(experiment, scale, parts, of_stage, out, changes=changes, at_once=options.jobs)
        if code:
            return code
    return 0


def _parts(name: str, experiment: Experiment, part: str | None) -> Sequence[str]:
    if not experiment.parts:
        if part is not None:
            raise ContextReadyError(f"{name} has no parts; leave --part out.")
        return ()
    part = part or experiment.default_part
    if part not in (*experiment.parts, "all"):
        raise ContextReadyError(
            f"{name} has no part '{shown(part)}'; choose one of: {', '.join((*experiment.parts, 'all'))}."
        )
    return experiment.parts if part == "all" else [part]


def _refuse_beside(option: str, why: str, options: argparse.Namespace, *more: str) -> None:
    """Refuse options that have no effect beside another one."""
    for other in ("part", "seeds", "jobs", "settings", *more):
        if getattr(options, other) not in (None, [], False):
            given = " ".join(options.settings) if other == "settings" else f"--{other.replace('_', '-')}"
            raise ContextReadyError(f"{option} {why}; leave {given} out.")


def _ledger(options: argparse.Namespace) -> int:
    from contextready.cli.reproduce_ledger import collect, print_ledger
    from contextready.reproduce.ledger import read_results

    _refuse_beside("ledger", "trains nothing", options, "report", "dry_run")
    if options.scale != "cpu":
        raise ContextReadyError("The ledger is about the miniatures; leave --scale out.")
    if options.results is not None:
        if options.out is not None:
            raise ContextReadyError("--results names a result file, so --out does not apply; leave one of them out.")
        print_ledger(read_results(options.results), None)
        return 0
    tables, pointer = TableExperiment(TABLES), EXPERIMENTS["pointer"]
    out = options.out or tables.folder("cpu")
    if not tables.has_results("cpu", out):
        raise ContextReadyError(
            f"There is no finished run in {out} yet; train some with crt reproduce all, or name a result file with "
            "--results."
        )
    print_ledger(collect(out, pointer.folder("cpu") if options.out is None else out / "pointer"), out)
    return 0


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
        with Overview(console, experiment, jobs) as overview:
            stopped = run_jobs(jobs, at_once, overview.show, overview.ended)
    if stopped is None:
        report(experiment, scale, out)
        return 0
    if experiment.has_results(scale, out):
        report(experiment, scale, out)
    console.print("Stopped. Run the same command again to resume.")
    return 128 + stopped


def print_plan(
    experiment: Experiment,
    scale: str,
    parts: Sequence[str],
    seeds: Sequence[int],
    out: Path,
    changes: Sequence[str],
    at_once: int | None,
) -> None:
    """Print the runs that are still to train, and how long they take."""
    from rich import box
    from rich.table import Table

    jobs, total = experiment.jobs(scale, parts, seeds, out, changes, missing_ok=True)
    table = Table(box=box.SIMPLE)
    table.add_column("run")
    for column in ("steps", "multiply-accumulates"):
        table.add_column(column, justify="right")
    for job in jobs:
        table.add_row(job.name, f"{job.steps:,}", f"{job.macs:.2e}" if job.macs else "")
    console = make_console(tables=True)
    console.print(table)
    console.print(f"{out}: {len(jobs)} of {total} runs are still to train.")
    macs = sum(job.macs for job in jobs)
    if not macs:
        return
    if scale == "paper":
        days = 2.0 * macs / (A100 * UTILISATION * 86400)
        console.print(f"About {days:.1f} days of one A100 at {UTILISATION:.0%} of its peak speed in bf16.")
        return
    at_once = at_once or os.cpu_count() or 1
    minutes = macs / CORE / 60 / min(at_once, os.cpu_count() or 1)
    console.print(
        f"About {minutes:.0f} minutes with {at_once} at a time, if a core makes {CORE / 1e9:.0f}e9 "
        "multiply-accumulates per second, as ours did."
    )


def report(experiment: Experiment, scale: str, out: Path) -> None:
    """Print and write the report, if there are runs."""
    if not experiment.has_results(scale, out):
        raise ContextReadyError(f"There is no run of this experiment in {out} yet; leave out --report to train.")
    experiment.report(scale, out)


class Overview:
    """Shows the running jobs and their progress: a live table in a terminal, a line per finished run elsewhere."""

    def __init__(self, console: "Console", experiment: Experiment, jobs: "Sequence[Job]") -> None:
        from rich.live import Live

        self.console, self.experiment, self.total, self.began = console, experiment, len(jobs), time.monotonic()
        self._macs, self._done, self._ended = sum(job.macs for job in jobs), 0.0, 0
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
            line = f"{done} of {self.total} runs done, {minutes:.0f} min{self._left(minutes)}"
            self._live.update(Group(self.experiment.progress(running), line), refresh=True)

    def ended(self, job: "Job") -> None:
        """Print the outcome of a run that has ended."""
        outcome = self.experiment.outcome(job)
        minutes = (time.monotonic() - self.began) / 60
        self._done += job.macs
        self._ended += 1
        self.console.print(
            f"{minutes:5.1f} min  {self._ended} of {self.total}{self._left(minutes)}  {job.name}: {outcome}"
        )

    def _left(self, minutes: float) -> str:
        """The time left if the rest takes as long for each multiply-accumulate as the finished jobs took."""
        if not self._done:
            return ""
        return f", about {minutes * (self._macs / self._done - 1.0):.0f} min left"
