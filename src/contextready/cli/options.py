"""What all verbs of `crt` have in common: the layout of their help, and how lists of numbers are read."""

import argparse
import shutil
from collections.abc import Callable
from typing import Any, TypeAlias

from contextready.errors import ContextReadyError

Verbs: TypeAlias = "argparse._SubParsersAction[VerbParser]"


DEFAULT = "(default: %(default)s)"


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps line breaks, shortens the usage line, and adds the default to the help of every option that has one."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=min(100, shutil.get_terminal_size().columns - 2))

    def _format_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any) -> str:
        # A verb may have twenty options, which the help lists below anyway.
        words = [action for action in actions if not action.option_strings]
        text = super()._format_usage(usage, words, groups, prefix)
        return text if usage else text.replace(self._prog, f"{self._prog} [options]", 1)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, default = action.help, action.default
        hidden = default is None or default is False or default in ("", [], argparse.SUPPRESS)
        return text if not text or hidden or "(default:" in text or not action.option_strings else f"{text} {DEFAULT}"


class VerbParser(argparse.ArgumentParser):
    """A parser whose notes are written when its help is printed, because describing settings imports torch."""

    notes: str | Callable[[], str] = ""

    def add_subparsers(self, **settings: Any) -> Any:
        """Subverbs are named after this parser; argparse would take its whole usage line."""
        return super().add_subparsers(**{"prog": self.prog, **settings})

    def format_help(self) -> str:
        """The help text."""
        self.epilog = self.notes if isinstance(self.notes, str) else self.notes()
        return super().format_help()


def verb(
    verbs: Verbs,
    name: str,
    summary: str,
    description: str,
    examples: str = "",
    notes: str | Callable[[], str] = "",
) -> argparse.ArgumentParser:
    """Add a verb. Its help shows the description and the examples first, then the options, then the notes.

    `summary` is its line in `crt --help`. `examples` holds one command per line.
    """
    if examples:
        lines = "\n".join(f"  {line}" for line in examples.strip().splitlines())
        description = f"{description}\n\nexamples:\n{lines}"
    parser: VerbParser = verbs.add_parser(name, help=summary, description=description, formatter_class=HelpFormatter)
    parser.notes = notes
    return parser


def parse_numbers(option: str, text: str, example: str, *, may_be_empty: bool = False) -> list[int]:
    """Read `1,2,5` as a list of numbers; `may_be_empty` skips empty parts."""
    try:
        return [int(part) for part in text.split(",") if part or not may_be_empty]
    except ValueError:
        raise ContextReadyError(f"{option} {text} is not a list of numbers; write it as {example}.") from None
