"""The table of decoding speeds as an experiment of `crt reproduce`: the models of the paper, timed side by side."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contextready.cli.console import make_console
from contextready.errors import ContextReadyError

if TYPE_CHECKING:
    from contextready.train.jobs import Job


class TimingExperiment:
    """The speed of random models with the shapes of the paper, in eager PyTorch."""

    scales = ("cpu",)
    parts = ()
    default_part = ""
    help = ""

    def folder(self, scale: str) -> Path:
        """The folder for its results, beside the runs of the tables."""
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
        """Return the benchmark if it has not been run yet."""
        from contextready.reproduce.measured import BENCH, FOLDER, timing_results
        from contextready.train.jobs import Job

        if changes or len(seeds) > 1:
            raise ContextReadyError(
                "timing measures random models, so it has neither settings nor seeds; leave them out."
            )
        return [] if timing_results(out) is not None else [Job("timing", out / FOLDER, BENCH, 0)], 1

    def has_results(self, scale: str, out: Path) -> bool:
        """Whether the benchmark has been run."""
        from contextready.reproduce.measured import timing_results

        return timing_results(out) is not None

    def report(self, scale: str, out: Path) -> None:
        """Print what was measured beside the paper's figures."""
        from contextready.reproduce.measured import timing_results, timing_table

        found = timing_results(out)
        assert found is not None
        make_console(tables=True).print(timing_table(found), soft_wrap=True)

    def progress(self, running: Sequence["Job"]) -> Any:
        """Say that the benchmark is running; it has no steps."""
        return "Timing the models side by side …" if running else ""

    def outcome(self, job: "Job") -> str:
        """Describe how it ended."""
        return "measured"
