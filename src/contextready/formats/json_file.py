"""Strict JSON: UTF-8, finite numbers, bounded size, depth and number of values."""

import json
import re
from math import isfinite
from pathlib import Path
from typing import Any

from contextready.errors import ContextReadyError
from contextready.formats.regular import read_text

LARGEST = 128 << 20
"""Bytes of the largest JSON file that is read; the largest real ones are tokenizers of some thirty MB."""
DEEPEST = 64
"""Levels of nesting; the files that this package writes have fewer than ten."""
MOST_VALUES = 8_000_000
"""Commas and brackets, which bound the number of values. A file of a few bytes per value takes 20 times its size in
memory. The largest real tokenizers have some two million."""
_HALF_OF_A_PAIR = re.compile(r"\\u[dD][89a-fA-F]")


def read_json(path: Path, largest: int = LARGEST) -> Any:
    """Read a JSON file."""
    return parse_json(read_text(path, largest), str(path))


def parse_json(text: str, where: str, *, unique: bool = False) -> Any:
    """Parse JSON text; `where` names its origin in error messages. With `unique`, no key may occur twice."""
    if sum(text.count(mark) for mark in ",[{") > MOST_VALUES:
        raise ContextReadyError(f"{where} has more than {MOST_VALUES:,} JSON values; it is damaged.")
    try:
        value = json.loads(
            text,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            object_pairs_hook=_without_repetition if unique else None,
        )
        if _HALF_OF_A_PAIR.search(text):
            _check_text(value)
    except RecursionError:
        raise ContextReadyError(f"{where} is nested too deeply to be read as JSON.") from None
    except ValueError as error:
        raise ContextReadyError(f"{where} cannot be read as JSON: {error}.") from None
    _check_depth(value, where)
    return value


def _finite(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise ValueError(f"the number {text[:20]} is too large")
    return number


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _check_text(value: Any) -> None:
    """Refuse halves of surrogate pairs. JSON can express them, but they can be neither printed nor saved."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            if any("\ud800" <= letter <= "\udfff" for letter in one):
                raise ValueError("it contains half of a surrogate pair, which is not a character")
        elif isinstance(one, dict):
            left += [*one, *one.values()]
        elif isinstance(one, list):
            left += one


def _check_depth(value: Any, where: str) -> None:
    level = [value]
    for _ in range(DEEPEST):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise ContextReadyError(f"{where} is nested more than {DEEPEST} levels deep; it is damaged.")
