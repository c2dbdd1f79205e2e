"""The paper's tables as experiments of `crt reproduce`: in miniature, or at the sizes of the paper."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contextready.cli.console import make_console
from contextready.cli.reproduce_pointer import PointerExperiment
from contextready.errors import ContextReadyError

if TYPE_CHECKING:
    from contextready.train.jobs import Job
POINTER = PointerExperiment()
"""Its results are part of the result file, too."""


class TableExperiment:
    """One or several tables of the paper, each row a run of its own; tables share their runs."""

    scales = ("cpu", "paper")
    parts = ()
    default_part = ""
    help = ""

    def __init__(self, tables: Sequence[str]) -> None:
        self.tables = list(tables)

    def folder(self, scale: str) -> Path:
        """The folder for the runs of all tables."""
        return Path(f"runs/reproduce-{scale}")

    def jobs(
        self,
        scale: str,
        parts: Sequence[str],
        seeds: Sequence[int],
        out: Path,
        changes: Sequence[str],
        missing_ok: bool = False,
    ) -> tuple[list["Job"], int]:
        """Return the runs of these tables that are still to train, and the number of all."""
        if scale == "paper":
            from contextready.reproduce.paper_scale import jobs_of as paper_jobs

            return paper_jobs(self.tables, seeds, out, changes, missing_ok)
        from contextready.reproduce.lines import runs_of
        from contextready.reproduce.records import jobs_of

        return jobs_of(runs_of(self.tables), seeds, out, changes, missing_ok)

    def has_results(self, scale: str, out: Path) -> bool:
        """Whether any run is finished."""
        if scale == "paper":
            from contextready.reproduce.paper_scale import finished_runs as finished_at_paper_scale

            return bool(finished_at_paper_scale(self.tables, out))
        from contextready.reproduce.records import finished_runs

        return bool(finished_runs(out))

    def report(self, scale: str, out: Path) -> None:
        """Print these tables, and write the result file, the report and the plots of all finished runs in a folder."""
        console = make_console()
        if scale == "paper":
            from contextready.reproduce.paper_scale import as_markdown as paper_markdown

            console.print(f"\n{paper_markdown(self.tables, out)}\n")
            return
        from contextready.cli.reproduce_ledger import collect
        from contextready.reproduce.lines import MINIATURES
        from contextready.reproduce.plots import draw_tables
        from contextready.reproduce.report import as_markdown

        records = collect(out, POINTER.folder(scale))["runs"]
        console.print(f"\n{as_markdown(self.tables, records)}\n")
        (out / "report.md").write_text(as_markdown(list(MINIATURES), records) + "\n", encoding="utf-8")
        try:
            plots = draw_tables(self.tables, records, out)
            console.print(f"The report is {out / 'report.md'}. The plots beside it: {', '.join(p.name for p in plots)}")
        except ContextReadyError as error:
            console.print(f"The report is {out / 'report.md'}. Its plots were not drawn. {error}")

    def progress(self, running: Sequence["Job"]) -> Any:
        """Return the newest validations of the running jobs."""
        from contextready.cli.reproduce_training import perplexity_table

        return perplexity_table(running)

    def outcome(self, job: "Job") -> str:
        """Evaluate a run of the miniature and describe the result; at paper scale, its last validation."""
        from contextready.cli.reproduce_training import newest
        from contextready.reproduce.records import record_of
        from contextready.reproduce.runs import RUNS

        step, perplexity = newest(job)
        key, _, seed = job.out.name.rpartition("-seed")
        if key not in RUNS:
            return f"validation perplexity {perplexity} after {step:,} steps"
        found = record_of(RUNS[key], int(seed), job.out.parent)["evaluation"]
        parallel = list(found["parallel"].values())[-1]["perplexity"]
        streamed = "" if found["sequential"] is None else f", streamed {found['sequential']['perplexity']:.2f}"
        return f"perplexity {parallel:.2f}{streamed} after {step:,} steps"
