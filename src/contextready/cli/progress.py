"""Progress of long jobs on standard error: a bar in a terminal, now and then a line elsewhere."""

import time
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from contextready.cli.console import make_console

if TYPE_CHECKING:
    from rich.progress import ProgressColumn, TaskID

EVERY = 10.0
"""Seconds between two lines when standard error is not a terminal."""


class ProgressReport:
    """Reports the progress of one stage after the other; `advance` is the callback to pass to a long job."""

    def __init__(self, unit: Literal["bytes", "tokens"]) -> None:
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self.console = make_console(stderr=True)
        self.unit = unit
        amounts: list[ProgressColumn] = (
            [DownloadColumn(), TransferSpeedColumn()] if unit == "bytes" else [MofNCompleteColumn(), TextColumn(unit)]
        )
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            *amounts,
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._printed = time.monotonic()

    def __enter__(self) -> "ProgressReport":
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        self._finish()
        self._bar.stop()

    def advance(self, stage: str, total: int | None, done: int) -> None:
        """Count `done` more units in this stage; `total` is None when the size is unknown."""
        if stage not in self._tasks:
            self._finish()
            self._tasks[stage] = self._bar.add_task(stage, total=total)
        self._bar.advance(self._tasks[stage], done)
        if self.console.is_terminal or time.monotonic() < self._printed + EVERY:
            return
        self._printed = time.monotonic()
        task = next(task for task in self._bar.tasks if task.id == self._tasks[stage])
        of = "" if not total else f" of {self._amount(total)} ({100 * task.completed / total:.0f} %)"
        self.console.print(f"{stage}: {self._amount(int(task.completed))}{of}", soft_wrap=True)

    def _finish(self) -> None:
        """Fill the bars of earlier stages whose size was not known."""
        for task in self._bar.tasks:
            if task.total is None:
                self._bar.update(task.id, total=task.completed)

    def _amount(self, number: int) -> str:
        return f"{number / 1e6:,.1f} MB" if self.unit == "bytes" else f"{number:,} tokens"
