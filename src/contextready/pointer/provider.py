"""The interface of this task to runs: its settings and the source of its sequences."""

from typing import TYPE_CHECKING

from contextready.pointer.task import PointerTask

if TYPE_CHECKING:
    from contextready.pointer.source import PointerSource
    from contextready.runs.config import RunConfig

SETTINGS = PointerTask


def open_source(config: "RunConfig") -> "PointerSource":
    """Open the source of a run's sequences. Only this needs torch; the settings do not."""
    from contextready.pointer.source import PointerSource

    return PointerSource(config)
