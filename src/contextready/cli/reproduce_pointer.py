"""Pointer chasing as an experiment of `crt reproduce`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contextready.cli.console import make_console
from contextready.cli.pointer import describe_outcome
from contextready.errors import ContextReadyError

if TYPE_CHECKING:
    from contextready.train.jobs import Job


class PointerExperiment:
    """The tables of pointer chasing, in miniature or at the sizes of the paper."""

    scales = ("cpu", "paper")
    parts = ("headline", "table", "layout", "growth", "parallel")
    default_part = "table"
    help = """\
parts of pointer (default: table):
  headline                one context-ready layer against a two-layer transformer, with masked
                          answers; minutes on two cores
  table                   one context-ready layer and transformers of several depths, in both
                          variants of the task: with masked and with visible answers
  layout                  one context-ready layer against transformers with two and four layers,
                          on sequences as in the author's runs: without any answer or placeholder
  growth                  one context-ready layer with more hops (lookups in a row)
  parallel                one context-ready layer trained by K parallel passes instead of
                          backpropagation through time (BPTT)
  all                     everything above

With --scale paper, answers are absent where they are masked here, as in the author's runs.
crt pointer --help explains hops, levels, the window, and masked and absent answers."""

    def folder(self, scale: str) -> Path:
        """The folder for its runs."""
        return Path(f"runs/pointer-{scale}")

    def jobs(
        self,
        scale: str,
        parts: Sequence[str],
        seeds: Sequence[int],
        out: Path,
        changes: Sequence[str],
        missing_ok: bool = False,
    ) -> tuple[list["Job"], int]:
        """Return the runs of these parts that are still to train, and the number of all."""
        from contextready.pointer.results import jobs_of
        from contextready.pointer.trials import trials_of

        trials = trials_of(scale, parts)
        return jobs_of(trials, seeds, out, changes), len(trials) * len(seeds)

    def has_results(self, scale: str, out: Path) -> bool:
        """Whether any run has been validated."""
        from contextready.pointer.results import results_of
        from contextready.pointer.trials import trials_of

        return bool(results_of(trials_of(scale, self.parts), out))

    def report(self, scale: str, out: Path) -> None:
        """Print and write the tables and plots of all runs in a folder, of all parts and seeds."""
        from contextready.pointer.report import as_markdown, draw_report, write_report
        from contextready.pointer.results import results_of
        from contextready.pointer.trials import trials_of

        console, results = make_console(), results_of(trials_of(scale, self.parts), out)
        markdown = as_markdown(results, out)
        console.print(f"\n{markdown}\n")
        write_report(markdown, results, out)
        try:
            plots = draw_report(results, out)
            console.print(f"The report is {out / 'report.md'}. The plots beside it: {', '.join(p.name for p in plots)}")
        except ContextReadyError as error:
            console.print(f"The report is {out / 'report.md'}. Its plots were not drawn. {error}")

    def progress(self, running: Sequence["Job"]) -> Any:
        """Return the accuracies of the running jobs by level."""
        from contextready.cli.pointer_display import level_table
        from contextready.pointer.outcome import outcome

        rows = []
        for job in running:
            newest = outcome(job.out)
            if newest is not None:
                rows.append((job.name, newest.accuracy, f"step {newest.step:,} of {job.steps:,}"))
        return level_table("run", rows, max((len(row[1]) for row in rows), default=0))

    def outcome(self, job: "Job") -> str:
        """Describe how a run ended."""
        from contextready.pointer.outcome import outcome

        newest = outcome(job.out)
        assert newest is not None
        return describe_outcome(newest, len(newest.accuracy))
