"""What all verbs of `crt` have in common."""

import argparse
from typing import TypeAlias

from contextready.errors import ContextReadyError

Verbs: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def verb(verbs: Verbs, name: str, help: str, description: str, epilog: str = "") -> argparse.ArgumentParser:
    """Add a verb whose help keeps its line breaks."""
    return verbs.add_parser(
        name,
        help=help,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def parse_numbers(option: str, text: str, example: str, *, may_be_empty: bool = False) -> list[int]:
    """`1,2,5` as numbers; with `may_be_empty`, parts with nothing in them are left out."""
    try:
        return [int(part) for part in text.split(",") if part or not may_be_empty]
    except ValueError:
        raise ContextReadyError(f"{option} {text} is not a list of numbers; write it as {example}.") from None
