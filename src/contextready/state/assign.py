"""Variable assignment: variables get values, or the values of other variables, and are asked for in between.

    x = 3 ; x ? y = x ; y ? x = 5 ; y ?

A copy takes the value that the other variable has at that moment, so later assignments to that one do not matter.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from contextready.errors import ContextReadyError
from contextready.state.task import StateTask, Written, counts

if TYPE_CHECKING:
    from contextready.runs.config import RunConfig
    from contextready.state.source import StateSource

NAMES = "abcdefghijklmnopqrstuvwxyz"
MOST_VALUES = 1000


@dataclass(frozen=True)
class AssignTask(StateTask):
    """Assignments, each followed by a question about a variable. A symbol is an assignment and its question."""

    name: ClassVar[str] = "assign"
    title: ClassVar[str] = "variable assignment"
    command: ClassVar[str] = "crt task assign"
    words_per_symbol: ClassVar[int] = 6

    variables: int = 5
    """Number of variables, at most 26."""
    values: int = 10
    """Number of different values."""
    copies: float = 0.7
    """Fraction of the assignments that copy another variable."""

    def __post_init__(self) -> None:
        super().__post_init__()
        counts(variables=(self.variables, 1, len(NAMES)), values=(self.values, 2, MOST_VALUES))
        if not 0.0 <= self.copies < 1.0:
            raise ContextReadyError(f"copies must be at least 0 and less than 1, a fraction, but got {self.copies}.")

    @property
    def words(self) -> Sequence[str]:
        """The values, the variables, and three signs."""
        return (*map(str, range(self.values)), *NAMES[: self.variables], "=", ";", "?")

    def draw(self, rng: np.random.Generator, rows: int, length: int) -> np.ndarray:
        """Draw assignments as (variable, token of its new value, variable asked for); only assigned ones are used."""
        assigned_BV = np.zeros((rows, self.variables), dtype=bool)
        symbols_BN3, each = np.empty((rows, length, 3), dtype=np.int64), np.arange(rows)

        def any_assigned() -> np.ndarray:
            picked: np.ndarray = np.where(assigned_BV, rng.random(assigned_BV.shape), -1.0).argmax(axis=1)
            return picked

        for i in range(length):
            variable_B = rng.integers(self.variables, size=rows)
            copies_B = (rng.random(rows) < self.copies) & (i > 0)
            source_B = np.where(copies_B, self.values + any_assigned(), rng.integers(self.values, size=rows))
            assigned_BV[each, variable_B] = True
            symbols_BN3[:, i] = np.stack((variable_B, source_B, any_assigned()), axis=1)
        return symbols_BN3

    def write(self, symbols: np.ndarray) -> Written:
        """Write every assignment and question, and keep the value of every variable and where it came from."""
        B, N, _ = symbols.shape
        equals, semicolon, question = range(len(self.words) - 3, len(self.words))
        tokens_BNP = np.empty((B, N, self.words_per_symbol), dtype=np.int64)
        tokens_BNP[:, :, 0] = self.values + symbols[:, :, 0]
        tokens_BNP[:, :, 1] = equals
        tokens_BNP[:, :, 2] = symbols[:, :, 1]
        tokens_BNP[:, :, 3] = semicolon
        tokens_BNP[:, :, 4] = self.values + symbols[:, :, 2]
        tokens_BNP[:, :, 5] = question
        value_BV, since_BV = np.zeros((2, B, self.variables), dtype=np.int64)
        answers_BN, oldest_BN = np.empty((2, B, N), dtype=np.int64)
        each = np.arange(B)
        for i in range(N):
            variable_B, source_B, asked_B = symbols[:, i].T
            is_copy_B, other_B = source_B >= self.values, np.maximum(source_B - self.values, 0)
            value_BV[each, variable_B] = np.where(is_copy_B, value_BV[each, other_B], source_B)
            since_BV[each, variable_B] = np.where(is_copy_B, since_BV[each, other_B], i)
            answers_BN[:, i], oldest_BN[:, i] = value_BV[each, asked_B], since_BV[each, asked_B]
        return Written(tokens_BNP, answers_BN, oldest_BN)

    def solve(self, words: Sequence[str]) -> list[str | None]:
        """Execute the assignments one by one."""
        values: dict[str, str] = {}
        answers: list[str | None] = []
        for i, word in enumerate(words):
            if word == "=":
                right = words[i + 1]
                values[words[i - 1]] = values.get(right, right)
            answers.append(values[words[i - 1]] if word == "?" else None)
        return answers

    def guess(self, unseen: int) -> float:
        """Values are drawn independently, so one of them is as good as any other."""
        return 1.0 / self.values


SETTINGS = AssignTask


def open_source(config: "RunConfig") -> "StateSource":
    """Open the source of a run's sequences."""
    from contextready.state.source import StateSource

    return StateSource(config)
