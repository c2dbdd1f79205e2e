"""The study of training as an experiment of `crt reproduce`."""

from collections.abc import Sequence
from math import exp
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contextready.cli.console import make_console
from contextready.errors import ContextReadyError

if TYPE_CHECKING:
    from contextready.train.jobs import Job


class TrainingExperiment:
    """Context-ready training against transformers at equal compute, and the choices behind the recipe."""

    scales = ("cpu",)
    parts = ("headline", "compute", "controls", "ways", "scale", "convergence", "conversion")
    default_part = "headline"

    help = """\
parts of training (default: headline):
  headline                one context-ready layer (C=128) and the transformer with the same cost
                          per generated token; minutes on two cores
  compute                 the same for four shapes: D=1 C=128, and D=1, 2 and 4 at C=256
  controls                the same shapes against other transformers: wider, and without the FFN
  ways                    the same shapes trained in other ways: the paper's unroll, K=2 only, and
                          other stages of K
  scale                   the size of the correction: fixed and learned factors, in short runs
  convergence             the convergence term: quality, streaming, and the cost of prompts
  conversion              a pretrained model trained further, with and without a correction; needs
                          pretrained=FOLDER data=FOLDER
  all                     everything above

The runs use data/mini unless data=FOLDER is given."""

    def folder(self, scale: str) -> Path:
        """The folder for its runs."""
        return Path(f"runs/training-{scale}")

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
        from contextready.study.results import jobs_of
        from contextready.study.trials import trials_of

        trials = trials_of(parts)
        return jobs_of(trials, seeds, out, changes), len(trials) * len(seeds)

    def has_results(self, scale: str, out: Path) -> bool:
        """Whether any run is finished."""
        from contextready.study.results import finished_runs
        from contextready.study.trials import trials_of

        return bool(finished_runs(trials_of(self.parts), out))

    def report(self, scale: str, out: Path) -> None:
        """Print and write the tables and plots of all finished runs in a folder."""
        from contextready.files import write_json
        from contextready.study.plots import draw_compute
        from contextready.study.results import read_records
        from contextready.study.tables import as_markdown, shapes_with_pairs
        from contextready.study.trials import trials_of

        console = make_console()
        records = read_records(trials_of(self.parts), out, lambda name: console.print(f"Evaluating {name} …"))
        markdown = as_markdown(records)
        console.print(f"\n{markdown}\n")
        (out / "report.md").write_text(markdown + "\n", encoding="utf-8")
        write_json(out / "report.json", {"runs": records})
        try:
            if shapes_with_pairs(records):
                draw_compute(records, out / "compute.png", out / "compute.svg")
            console.print(f"The report is {out / 'report.md'}.")
        except ContextReadyError as error:
            console.print(f"The report is {out / 'report.md'}. Its plots were not drawn. {error}")

    def progress(self, running: Sequence["Job"]) -> Any:
        """Return the newest validations of the running jobs."""
        return perplexity_table(running)

    def outcome(self, job: "Job") -> str:
        """Describe how a run ended."""
        step, perplexity = newest(job)
        return f"validation perplexity {perplexity} after {step:,} steps"


def perplexity_table(running: Sequence["Job"]) -> Any:
    """Return the newest validations of the running jobs as a table."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("run", "step", "validation perplexity"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for job in running:
        step, perplexity = newest(job)
        table.add_row(job.name, f"{step:,} of {job.steps:,}", perplexity)
    return table


def newest(job: "Job") -> tuple[int, str]:
    """Return the step of a job's newest validation, and its perplexity."""
    from contextready.study.results import newest_step

    step, loss = newest_step(job.out)
    return step, "" if loss is None else f"{exp(min(loss, 700.0)):.2f}"
