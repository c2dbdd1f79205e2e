"""Sizes before allocation: what a machine can hold, and sane limits for numbers that users or files give."""

import os
from contextlib import suppress
from typing import Any

from contextready.errors import ContextReadyError

MOST_ROWS = 1 << 16
"""The most sequences that are generated at once."""
LONGEST = 60
"""Characters of a wrong value that a message shows."""


def check_range(name: str, value: float, low: float, high: float) -> None:
    """Refuse a number outside its sane range, in a sentence that states the range."""
    if not low <= value <= high:
        raise ContextReadyError(f"{name} must be between {_shown(low)} and {_shown(high)}, but got {shown(value)}.")


def check_count(name: str, value: int, low: int, high: int) -> None:
    """Refuse a count that is too small or absurdly large, in a sentence that states the limit."""
    if value < low:
        raise ContextReadyError(f"{name} must be at least {_shown(low)}, but got {shown(value)}.")
    if value > high:
        raise ContextReadyError(f"{name} must be at most {_shown(high)}, but got {shown(value)}.")


def check_memory(size: int, what: str, advice: str) -> None:
    """Refuse to allocate more than the machine's memory; `what` would take `size` bytes."""
    total = total_memory()
    if total is not None and size > total:
        raise ContextReadyError(
            f"{what} would take {gigabytes(size)}, but this machine has {gigabytes(total)} of memory; {advice}"
        )


def total_memory() -> int | None:
    """The machine's memory in bytes, or the limit of its container or process if that is lower; None if unknown."""
    sizes = []
    with suppress(ValueError, OSError, AttributeError):
        sizes.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError), open(path, encoding="ascii") as file:
            sizes.append(int(file.read()))
    with suppress(ImportError, OSError, ValueError):
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            sizes.append(limit)
    return min((size for size in sizes if size > 0), default=None)


def shown(value: Any) -> str:
    """A wrong value as a message shows it: on one line, and not much longer than a word."""
    if isinstance(value, int) and not isinstance(value, bool):
        # Python refuses to write very long numbers, and nobody wants to read them.
        return str(value) if abs(value) < 10**15 else "a number with more than 15 digits"
    try:
        text = value if isinstance(value, str) else repr(value)
    except ValueError:
        text = f"a {type(value).__name__} with a very long number"
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def gigabytes(size: int) -> str:
    """A size in bytes as text, in gigabytes."""
    # Integer division: a size from a hostile file may be too large for a float.
    tenths = size // 10**8
    return f"{tenths // 10:,}.{tenths % 10} GB" if size < 10**18 else "more than a billion GB"


def _shown(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"
