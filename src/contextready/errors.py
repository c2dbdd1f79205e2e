"""The one exception users are meant to read, and the hint that many of its sentences end with."""

import difflib
from collections.abc import Sequence


class ContextReadyError(ValueError):
    """Bad input, said in one sentence: what is wrong and what to do. The command exits with code 2."""


def nearest(name: str, valid: Sequence[str]) -> str:
    """Say what the user may have meant: the nearest valid name, or all of them."""
    close = difflib.get_close_matches(name, valid, n=1)
    return f"did you mean '{close[0]}'?" if close else f"choose one of: {', '.join(valid)}."
