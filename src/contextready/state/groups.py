"""Finite groups of permutations: the elements, their products, and symbols that generate the whole group."""

import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations

import numpy as np

from contextready.errors import ContextReadyError
from contextready.formats.limits import shown

LARGEST = {"S": 5, "A": 6, "Z": 1000}
"""The largest n of each family, whose table of products is still small."""
SMALLEST = {"S": 3, "A": 4, "Z": 2}
Permutation = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Group:
    """A finite group, whose elements are numbered. The first elements generate it, and the identity is not first."""

    names: tuple[str, ...]
    """How each element is written: a permutation of S_n or A_n as the images of 1 … n, one of Z_n as a number."""
    table: np.ndarray
    """The number of the product a · b, at [a, b]."""
    identity: int
    generators: int
    """How many of the first elements generate the group."""

    @property
    def order(self) -> int:
        """The number of elements."""
        return len(self.names)


@lru_cache(maxsize=8)
def find_group(name: str) -> Group:
    """Return the group of this name: S3 to S5 (all permutations), A4 to A6 (even ones), or Z2 to Z1000 (a cycle)."""
    match = re.fullmatch(r"([SAZ])([1-9][0-9]{0,3})", name)
    if match is None or not SMALLEST[match[1]] <= int(match[2]) <= LARGEST[match[1]]:
        families = ", ".join(f"{family}{SMALLEST[family]} to {family}{LARGEST[family]}" for family in LARGEST)
        raise ContextReadyError(f"There is no group '{shown(name)}' here; choose one of {families}, such as S5.")
    family, n = match[1], int(match[2])
    if family == "Z":
        # 1 generates the group; 0, the identity, comes second, so that two symbols are enough for a task.
        order = [1, 0, *range(2, n)]
        place = np.argsort(order)
        table = place[(np.array(order)[:, None] + np.array(order)[None, :]) % n]
        return Group(tuple(map(str, order)), table, 1, 1)
    elements = [p for p in permutations(range(n)) if family == "S" or not _odd(p)]
    first = _generators(family, n)
    elements = [*first, *(p for p in elements if p not in first)]
    numbers = {p: i for i, p in enumerate(elements)}
    # a · b applies a first, then b.
    table = np.array([[numbers[tuple(b[i] for i in a)] for b in elements] for a in elements])
    names = tuple("".join(str(i + 1) for i in p) for p in elements)
    return Group(names, table, numbers[tuple(range(n))], len(first))


def _odd(p: Permutation) -> bool:
    inversions = sum(p[i] > p[j] for i in range(len(p)) for j in range(i + 1, len(p)))
    return inversions % 2 == 1


def _generators(family: str, n: int) -> list[Permutation]:
    """Two permutations that generate S_n (a swap and a cycle) or A_n (a cycle of three, and the longest odd cycle)."""

    def cycle(places: range) -> Permutation:
        image = list(range(n))
        for i, place in enumerate(places):
            image[place] = places[(i + 1) % len(places)]
        return tuple(image)

    if family == "S":
        return [cycle(range(2)), cycle(range(n))]
    return [cycle(range(3)), cycle(range(n) if n % 2 else range(1, n))]
