"""Shows the progress of a run: a live line in a terminal, one line per validation elsewhere."""

from math import exp
from typing import TYPE_CHECKING

from contextready.cli.console import make_console
from contextready.runs.config import RunConfig
from contextready.runs.metrics import Record

if TYPE_CHECKING:
    from rich.console import Console


class ConsoleDisplay:
    """Shows loss, perplexity, tokens per second, K, the residual and the remaining time."""

    def __init__(self, console: "Console | None" = None) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.console = console or make_console()
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[line]}"),
            TimeRemainingColumn(compact=True),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self._loss: float | None = None
        self._residual = ""
        self._began: tuple[float, int] | None = None
        self._rate = ""

    def start(self, config: RunConfig, step: int, note: str) -> None:
        """Print the size and length of the run, and start the live line."""
        t = config.train
        resuming = f", resuming from step {step:,}" if step else ""
        self.console.print(
            f"{t.out}: {note}; {t.steps:,} steps of {t.tokens_per_step:,} tokens{resuming}.", soft_wrap=True
        )
        self._task = self._bar.add_task(t.out.rpartition("/")[2], total=t.steps, completed=step, line="")
        self._began = None
        self._bar.start()

    def update(self, record: Record) -> None:
        """Update the live line, or print the line of a validation."""
        if "val_loss" in record:
            trained = "" if self._loss is None else f", train {self._loss:.3f}{self._rate}"
            self.console.print(
                f"step {record['step']:>6,}, {record['tokens'] / 1e6:.2f}M tokens: "
                f"val loss {record['val_loss']:.4f}, ppl {record['val_perplexity']:.2f}{trained}",
                soft_wrap=True,
            )
            return
        # Single batches are noisy, so a running mean over about twenty of them is shown.
        self._loss = record["loss"] if self._loss is None else 0.95 * self._loss + 0.05 * record["loss"]
        if record["residual"] is not None:
            self._residual = f", residual {record['residual']:.1e}"
        # The first step is a warm-up. The time of validations and saves is not included.
        self._began = self._began or (record["seconds"], record["tokens"])
        seconds, tokens = record["seconds"] - self._began[0], record["tokens"] - self._began[1]
        self._rate = f", {tokens / seconds:,.0f} tokens/s" if seconds > 0 else ""
        perplexity = exp(min(self._loss, 99.0))
        passes = "" if record["passes"] is None else f", K={record['passes']}"
        line = f"loss {self._loss:.3f}, ppl {perplexity:.1f}{self._rate}{passes}{self._residual}"
        self._bar.update(self._task, completed=record["step"], line=line)

    def stop(self) -> None:
        """Remove the live line."""
        self._bar.stop()
