"""State tracking as an experiment of `crt reproduce`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contextready.cli.console import make_console
from contextready.errors import ContextReadyError

if TYPE_CHECKING:
    from contextready.train.jobs import Job


class StateExperiment:
    """Tasks that need a state: how far models of several depths follow it, and ways to train them."""

    scales = ("cpu",)
    parts = ("headline", "table", "ways", "convert")
    default_part = "table"
    _text: Path | None = None
    """Prepared text on which converted models are scored."""
    help = """\
parts of state (default: table):
  headline                S5 with one context-ready layer and with transformers of two and four
                          layers; minutes on two cores
  table                   S5, A5, Z60, parity and variable assignment with one and two
                          context-ready layers, one to six layers of a transformer, and a GRU
  ways                    one context-ready layer on S5 and parity, trained in other ways: parallel
                          passes, implicit gradients, without a curriculum
  convert                 a pretrained model trained further on parity and variable assignment, with
                          and without a correction; needs pretrained=FOLDER, and with
                          text=FOLDER (prepared data) also measures perplexity on text
  all                     headline, table and ways

crt task --help explains the tasks."""

    def folder(self, scale: str) -> Path:
        """The folder for its runs."""
        return Path(f"runs/state-{scale}")

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
        from contextready.state.results import jobs_of, split_text
        from contextready.state.trials import trials_of

        self._text, changes = split_text(changes)
        if self._text is not None and tuple(parts) != ("convert",):
            raise ContextReadyError("text= is for --part convert only; leave it out.")
        if len(parts) > 1:
            # The converted models need settings that the others do not have.
            parts = [part for part in parts if part != "convert"]
        trials = trials_of(parts)
        return jobs_of(trials, seeds, out, changes), len(trials) * len(seeds)

    def has_results(self, scale: str, out: Path) -> bool:
        """Whether any run is finished."""
        return bool(self._records(out))

    def report(self, scale: str, out: Path) -> None:
        """Print and write the tables and plots of all finished runs in a folder."""
        from contextready.files import write_json
        from contextready.state.report import as_markdown, draw_depths, draw_lengths

        console, records = make_console(), self._records(out)
        markdown = as_markdown(records)
        console.print(f"\n{markdown}\n")
        (out / "report.md").write_text(markdown + "\n", encoding="utf-8")
        write_json(out / "report.json", {"runs": records})
        try:
            if any(record["part"] == "table" for record in records):
                draw_lengths(records, out / "lengths.png", out / "lengths.svg")
                draw_depths(records, out / "depths.png", out / "depths.svg")
            console.print(f"The report is {out / 'report.md'}.")
        except ContextReadyError as error:
            console.print(f"The report is {out / 'report.md'}. Its plots were not drawn. {error}")

    def progress(self, running: Sequence["Job"]) -> Any:
        """Return the newest validations of the running jobs."""
        from rich.table import Table

        from contextready.state.results import newest_validation

        table = Table(box=None, padding=(0, 2, 0, 0))
        for column in ("run", "step", "solved in training"):
            table.add_column(column, justify="left" if column == "run" else "right")
        for job in running:
            newest = newest_validation(job.out)
            if newest is not None:
                table.add_row(job.name, f"{newest['step']:,} of {job.steps:,}", str(newest["solved_length"]))
        return table

    def outcome(self, job: "Job") -> str:
        """Describe how a run ended."""
        from contextready.cli.task import describe_lengths
        from contextready.state.lengths import read_lengths
        from contextready.state.text import measure_text

        found = read_lengths(job.out)
        assert found is not None
        if self._text is None:
            return describe_lengths(found)
        on_text = measure_text(job.out, self._text)
        return f"{describe_lengths(found)} Perplexity on text: {on_text.before:.2f} before, {on_text.after:.2f} after."

    def _records(self, out: Path) -> list[dict[str, Any]]:
        from contextready.state.results import records_of
        from contextready.state.trials import trials_of

        return records_of(trials_of(self.parts), out)
