"""Progress of a run on pointer chasing: a live table of all levels in a terminal, a line per validation elsewhere."""

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from contextready.model.config import ModelConfig
from contextready.pointer.score import SOLVED
from contextready.pointer.task import PointerTask
from contextready.runs.config import RunConfig
from contextready.runs.metrics import Record

if TYPE_CHECKING:
    from rich.console import Console

ROWS = 16
"""Number of validations that the live table shows."""


class PointerDisplay:
    """Shows the accuracy of every level during training."""

    def __init__(self, console: "Console") -> None:
        from rich.live import Live

        self.console = console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._rows: deque[tuple[str, list[float], str]] = deque(maxlen=ROWS)
        self._line, self._loss = "", 0.0

    def start(self, config: RunConfig, step: int, note: str) -> None:
        """Print what is trained and where."""
        assert isinstance(config.task, PointerTask)
        assert isinstance(config.model, ModelConfig)
        t, task = config.train, config.task
        resuming = f", resuming from step {step:,}" if step else ""
        self.console.print(
            f"{t.out}: {note}; {task.hops} hops, {task.keys} keys, {task.values} values, answers {task.answers}, "
            f"window {config.model.window or 'none'}; up to {t.steps:,} steps of {t.sequences_per_step} sequences"
            f"{resuming}.",
            soft_wrap=True,
        )
        self._levels, self._steps = task.levels, t.steps
        self._rows.clear()
        if self._live is not None:
            self._live.start()
        else:
            self.console.print(
                " step  " + " ".join(f"{f'L{level}':>4}" for level in range(task.levels)), soft_wrap=True
            )

    def update(self, record: Record) -> None:
        """Update the line under the table after a step; add a row after a validation."""
        if "accuracy" not in record:
            self._loss = record["loss"] if not self._loss else 0.95 * self._loss + 0.05 * record["loss"]
            self._line = (
                f"step {record['step']:,} of {self._steps:,}, loss {self._loss:.3f}, {record['seconds']:,.0f} s"
            )
            if self._live is not None and record["step"] % 5 == 0:
                self._live.update(self._table(), refresh=True)
            return
        solved = f"{record['levels_solved']} of {self._levels} solved"
        if self._live is not None:
            self._rows.append((f"{record['step']:,}", record["accuracy"], solved))
            self._live.update(self._table(), refresh=True)
        else:
            cells = " ".join(f"{part:4.2f}" for part in record["accuracy"])
            self.console.print(f"{record['step']:>6,} {cells}  {solved}", soft_wrap=True)

    def _table(self) -> Any:
        from rich.console import Group

        return Group(level_table("step", self._rows, self._levels), self._line)

    def stop(self) -> None:
        """Stop updating and leave the table on the screen."""
        if self._live is not None:
            self._line = ""
            self._live.update(self._table(), refresh=True)
            self._live.stop()


def level_table(first: str, rows: Iterable[tuple[str, list[float], str]], levels: int) -> Any:
    """Build a table with a name, the accuracy of each level and a remark per row; solved levels are highlighted."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column(first, justify="right" if first == "step" else "left", no_wrap=True)
    for level in range(levels):
        table.add_column(f"L{level}", justify="right")
    table.add_column("")
    for name, accuracy, remark in rows:
        cells = [Text(f"{part:.2f}", style="bold green" if part >= SOLVED else "") for part in accuracy]
        table.add_row(name, *cells, *[""] * (levels - len(cells)), remark)
    return table
