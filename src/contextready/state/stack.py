"""A stack: symbols are pushed and popped, and the symbol on top is asked for after each step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from contextready.data.shards import IGNORED
from contextready.state.task import StateTask, Written, counts

if TYPE_CHECKING:
    from contextready.runs.config import RunConfig
    from contextready.state.source import StateSource

NAMES = "abcdefghijklmnopqrstuvwxyz"
POP = "-"
DEEPEST = 1000


@dataclass(frozen=True)
class StackTask(StateTask):
    """Pushes and pops. Nothing is asked while the stack is empty."""

    name: ClassVar[str] = "stack"
    title: ClassVar[str] = "a stack"
    command: ClassVar[str] = "crt task stack"

    alphabet: int = 4
    """Number of different symbols, at most 26."""
    depth: int = 8
    """The largest height of the stack."""

    def __post_init__(self) -> None:
        super().__post_init__()
        counts(alphabet=(self.alphabet, 2, len(NAMES)), depth=(self.depth, 1, DEEPEST))

    @property
    def words(self) -> Sequence[str]:
        """A letter pushes itself, and a sign pops."""
        return (*NAMES[: self.alphabet], POP)

    def draw(self, rng: np.random.Generator, rows: int, length: int) -> np.ndarray:
        """Push or pop with equal chances, except at an empty and at a full stack."""
        height_B = np.zeros(rows, dtype=np.int64)
        symbols_BN = rng.integers(self.alphabet, size=(rows, length))
        for i in range(length):
            pops_B = (rng.random(rows) < 0.5) & (height_B > 0) | (height_B == self.depth)
            symbols_BN[pops_B, i] = self.alphabet
            height_B += np.where(pops_B, -1, 1)
        return symbols_BN

    def write(self, symbols: np.ndarray) -> Written:
        """Keep every stack, and when each of its symbols was pushed."""
        B, N = symbols.shape
        stack_BD, since_BD = np.zeros((2, B, self.depth + 1), dtype=np.int64)
        stack_BD[:, 0] = IGNORED
        answers_BN, oldest_BN = np.empty((2, B, N), dtype=np.int64)
        height_B, each = np.zeros(B, dtype=np.int64), np.arange(B)
        for i, symbol_B in enumerate(symbols.T):
            pushes_B = symbol_B < self.alphabet
            height_B = height_B + np.where(pushes_B, 1, -1)
            pushed = each[pushes_B], height_B[pushes_B]
            stack_BD[pushed], since_BD[pushed] = symbol_B[pushes_B], i
            answers_BN[:, i], oldest_BN[:, i] = stack_BD[each, height_B], since_BD[each, height_B]
        return Written(symbols[:, :, None], answers_BN, oldest_BN)

    def solve(self, words: Sequence[str]) -> list[str | None]:
        """Push and pop one by one."""
        stack: list[str] = []
        answers: list[str | None] = []
        for word in words:
            if word == POP:
                stack.pop()
            else:
                stack.append(word)
            answers.append(stack[-1] if stack else None)
        return answers

    def guess(self, unseen: int) -> float:
        """Symbols are drawn independently, so one of them is as good as any other."""
        return 1.0 / self.alphabet


SETTINGS = StackTask


def open_source(config: "RunConfig") -> "StateSource":
    """Open the source of a run's sequences."""
    from contextready.state.source import StateSource

    return StateSource(config)
