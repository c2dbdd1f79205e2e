"""The consoles of rich that all verbs print with."""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def make_console(*, stderr: bool = False, tables: bool = False, file_width: int | None = None) -> "Console":
    """A console that prints text as it is: brackets are no markup, numbers get no colours.

    By default for sentences, which are never broken into lines.

    stderr       for what passes by: progress bars and remarks, laid out like tables
    tables       for tables and paragraphs, laid out in the width of the terminal
    file_width   columns where standard output is no terminal (default: rich's 80)
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
