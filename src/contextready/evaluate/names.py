"""Short names of runs for tables and legends."""

import re
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path


def short_names(paths: Sequence[str | Path]) -> list[str]:
    """The last part of each path, or as many of its last parts as it takes to tell it from the others."""
    all_parts = [Path(path).parts or (str(path),) for path in paths]

    def shorten(parts: tuple[str, ...]) -> str:
        others = [other for other in all_parts if other != parts]
        ends = (parts[-n:] for n in range(1, len(parts)))
        return str(Path(*next((end for end in ends if all(o[-len(end) :] != end for o in others)), parts)))

    return [shorten(parts) for parts in all_parts]


def common_name(names: Sequence[str]) -> str:
    """What the names of runs with different seeds have in common: d1-seed0 and d1-seed1 give d1."""
    columns = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    prefix = "".join(letters[0] for letters in columns)
    if prefix in names:
        return prefix
    if all(name[len(prefix)].isdigit() for name in names):
        # run10 and run11 also share the first digit of the number.
        prefix = prefix.rstrip("0123456789")
    return re.sub(r"(^|[-_./]+)(seed|s)?[-_.=]*$", "", prefix) or ", ".join(names)
