"""The exception that users read, and the hint that many of its messages end with."""

import difflib
from collections.abc import Sequence

LISTED = 12
"""How many valid names a message lists at most."""


class ContextReadyError(ValueError):
    """Bad input. The message says in a sentence what is wrong and what to do; the command exits with code 2."""


def nearest(name: str, valid: Sequence[str]) -> str:
    """Suggest the valid name that is closest to `name`, or list the valid names (the first few of many)."""
    close = difflib.get_close_matches(name, valid, n=1)
    if close:
        return f"did you mean '{close[0]}'?"
    rest = f", … ({len(valid)} in all)" if len(valid) > LISTED else ""
    return f"choose one of: {', '.join(valid[:LISTED])}{rest}."
