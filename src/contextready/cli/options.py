"""What all verbs of `crt` have in common: the layout of their help, and how numbers and words are read."""

import argparse
import shutil
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias

from contextready.errors import ContextReadyError
from contextready.formats.limits import check_count, shown

Verbs: TypeAlias = "argparse._SubParsersAction[VerbParser]"


DEFAULT = "(default: %(default)s)"
LONGEST_MESSAGE = 2000
"""Characters of a message, which may quote words from the command line or from a file."""
MOST_NUMBERS = 1000
"""Numbers in a list on the command line."""
LARGEST_SEED = 2**63 - 1


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

    def error(self, message: str) -> NoReturn:
        """Print the usage and what is wrong, in one line each."""
        super().error(one_line(message))


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


def whole_number(text: str) -> int:
    """Read a whole number for argparse, whose own message would repeat all digits of a long one."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid whole number: {shown(text)}") from None


def parse_numbers(
    option: str, text: str, example: str, most: int, *, least: int = 1, may_be_empty: bool = False
) -> list[int]:
    """Read `1,2,5` as a list of numbers from `least` to `most`; `may_be_empty` skips empty parts."""
    parts = [part for part in text.split(",") if part or not may_be_empty]
    if len(parts) > MOST_NUMBERS:
        raise ContextReadyError(f"{option} is a list of {len(parts):,} numbers; give at most {MOST_NUMBERS:,}.")
    try:
        numbers = [int(part) for part in parts]
    except ValueError:
        raise ContextReadyError(f"{option} {shown(text)} is not a list of numbers; write it as {example}.") from None
    for number in numbers:
        check_count(option, number, least, most)
    return numbers


def check_most(option: str, value: int | None, most: int) -> None:
    """Refuse a number that is absurdly large; the verb itself refuses one that is too small."""
    if value is not None and value > most:
        check_count(option, value, 0, most)


def check_words(words: Sequence[str]) -> None:
    """Refuse words that are not UTF-8 or contain a null character: no file with such a name could be saved or found."""
    for word in words:
        if "\0" in word or any("\ud800" <= letter <= "\udfff" for letter in word):
            raise ContextReadyError(
                f"The word {shown(ascii(word))} is not UTF-8 text; rename the file, or write the word in UTF-8."
            )


def one_line(message: str) -> str:
    """A message on one line, of bounded length and without control characters, which could confuse a terminal."""
    line = "".join(letter if letter.isprintable() else " " for letter in message)
    return line if len(line) <= LONGEST_MESSAGE else f"{line[:LONGEST_MESSAGE]}…"
