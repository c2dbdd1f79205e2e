"""Word problems: multiply the elements of a group one by one, and name the product after each.

S5 and A5 are not solvable, so their word problem needs depth that grows with the length. Z60 is solvable.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from contextready.state.groups import Group, find_group
from contextready.state.task import StateTask, Written, counts

if TYPE_CHECKING:
    from contextready.runs.config import RunConfig
    from contextready.state.source import StateSource


@dataclass(frozen=True)
class WordTask(StateTask):
    """The word problem of a group."""

    name: ClassVar[str] = "word"
    title: ClassVar[str] = "the word problem of a group"
    command: ClassVar[str] = "crt task word"

    group: str = "S5"
    """The group: S3, S4, S5 (permutations), A4, A5, A6 (even ones) or Z2 … Z1000 (addition modulo n)."""
    alphabet: int | None = None
    """How many elements occur as symbols; the first two generate the group. none: all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        order = self.elements.order
        if self.alphabet is not None:
            counts(alphabet=(self.alphabet, 2, order))

    @property
    def elements(self) -> Group:
        """The group."""
        return find_group(self.group)

    @property
    def words(self) -> Sequence[str]:
        """The elements."""
        return self.elements.names

    def draw(self, rng: np.random.Generator, rows: int, length: int) -> np.ndarray:
        """Draw independent elements."""
        return rng.integers(self.alphabet or self.elements.order, size=(rows, length))

    def write(self, symbols: np.ndarray) -> Written:
        """Multiply from left to right."""
        products_BN, table = np.empty_like(symbols), self.elements.table
        product_B = np.full(len(symbols), self.elements.identity)
        for i, symbol_B in enumerate(symbols.T):
            product_B = products_BN[:, i] = table[product_B, symbol_B]
        return Written(symbols[:, :, None], products_BN, np.zeros_like(symbols))

    def solve(self, words: Sequence[str]) -> list[str | None]:
        """Apply the permutations, or add the numbers, one by one."""
        if self.group.startswith("Z"):
            total, modulus, sums = 0, int(self.group[1:]), list[str | None]()
            for word in words:
                total = (total + int(word)) % modulus
                sums.append(str(total))
            return sums
        images = [str(i + 1) for i in range(int(self.group[1:]))]
        answers: list[str | None] = []
        for word in words:
            images = [word[int(image) - 1] for image in images]
            answers.append("".join(images))
        return answers

    def guess(self, unseen: int) -> float:
        """The chance of the most likely product of the first `unseen` symbols."""
        guesses = self._guesses
        return guesses[min(unseen, len(guesses) - 1)]

    @cached_property
    def _guesses(self) -> list[float]:
        group, symbols = self.elements, self.alphabet or self.elements.order
        chances = np.zeros(group.order)
        chances[group.identity] = 1.0
        found = [1.0]
        # With all elements the product is uniform at once. With few symbols it takes some steps.
        for _ in range(1 if symbols == group.order else 200):
            after = np.zeros(group.order)
            for symbol in range(symbols):
                after[group.table[:, symbol]] += chances / symbols
            chances = after
            found.append(float(chances.max()))
        return found


SETTINGS = WordTask


def open_source(config: "RunConfig") -> "StateSource":
    """Open the source of a run's sequences."""
    from contextready.state.source import StateSource

    return StateSource(config)
