"""Progress of a run on state tracking: the accuracy at several lengths, in a live line and after every validation."""

from typing import TYPE_CHECKING

from contextready.runs.config import RunConfig
from contextready.runs.metrics import Record
from contextready.state.task import StateTask

if TYPE_CHECKING:
    from rich.console import Console

COLUMNS = 8
"""Number of lengths whose accuracy is shown."""


class TaskDisplay:
    """Shows the accuracy at several lengths during training."""

    def __init__(self, console: "Console") -> None:
        from rich.live import Live

        self.console = console
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._loss: float | None = None

    def start(self, config: RunConfig, step: int, note: str) -> None:
        """Print what is trained and where."""
        assert isinstance(config.task, StateTask)
        t, task = config.train, config.task
        resuming = f", resuming from step {step:,}" if step else ""
        window = getattr(config.model, "window", None)
        seen = f", window {window}" if window else ""
        self.console.print(
            f"{t.out}: {note}; {task.title}, length {task.length}{seen}; up to {t.steps:,} steps of "
            f"{t.sequences_per_step} sequences{resuming}.",
            soft_wrap=True,
        )
        self._steps = t.steps
        self._lengths = sorted({max(1, task.length * i // COLUMNS) for i in range(1, COLUMNS + 1)})
        self.console.print(" step  " + " ".join(f"{f'n={n}':>5}" for n in self._lengths) + "  solved", soft_wrap=True)
        if self._live is not None:
            self._live.start()

    def update(self, record: Record) -> None:
        """Update the live line after a step; print a line after a validation."""
        if "accuracy" in record:
            cells = " ".join(f"{record['accuracy'][n - 1]:5.2f}" for n in self._lengths)
            self.console.print(f"{record['step']:>6,} {cells}  {record['solved_length']}", soft_wrap=True)
            return
        self._loss = record["loss"] if self._loss is None else 0.95 * self._loss + 0.05 * record["loss"]
        if self._live is not None and record["step"] % 5 == 0:
            self._live.update(
                f"step {record['step']:,} of {self._steps:,}, loss {self._loss:.3f}, {record['seconds']:,.0f} s",
                refresh=True,
            )

    def stop(self) -> None:
        """Remove the live line."""
        if self._live is not None:
            self._live.stop()
