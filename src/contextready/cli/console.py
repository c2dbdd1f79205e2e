"""The rich consoles that all verbs print with."""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def make_console(*, stderr: bool = False, tables: bool = False, file_width: int | None = None) -> "Console":
    """Create a console that prints text literally: brackets are not markup, and numbers are not coloured.

    By default it is meant for sentences and never breaks lines.

    stderr       for progress bars and remarks, laid out like tables
    tables       for tables and paragraphs, laid out to the width of the terminal
    file_width   number of columns if standard output is not a terminal (default: rich's 80)
    """
    from rich.console import Console

    return Console(
        stderr=stderr,
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=not (stderr or tables),
        width=None if sys.stdout.isatty() else file_width,
    )
