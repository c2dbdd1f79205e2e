"""What all state-tracking tasks have in common: symbols that change a state, and questions about it.

A task describes how symbols are drawn and what they do. This module turns that into sequences: it separates training
from testing, writes tokens and targets, and says what a model with a limited view could know.

    sequence  ^ s_1 s_2 … s_n      a begin token, then symbols of one or more tokens each
    state     h_t = step(h_{t-1}, s_t)
    target    an answer about h_t, at the last token of every symbol

The begin token tells a transformer, whose positions are relative, where the sequence starts.
Sequences depend only on the seed, the split, the step and the row. This module imports torch only when it creates a
batch, so that the settings can be described without torch.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from contextready.data.shards import IGNORED
from contextready.errors import ContextReadyError
from contextready.formats.limits import check_count, check_memory, shown

if TYPE_CHECKING:
    from torch import Tensor

SPLITS = ("train", "test")
HELD_OUT = 8
"""One of this many sequences belongs to the test split."""
LONGEST = 2**16
"""Symbols of the longest sequence."""
MOST_ROUNDS = 32
"""A split that is still empty after this many rounds of draws has no sequences; chance alone never causes that."""
BEGIN = "^"
"""The first word of every sequence."""
STAGES = 8
"""The number of lengths that a curriculum goes through."""


class StateBatch(NamedTuple):
    """A batch of sequences."""

    inputs_BT: "Tensor"
    targets_BT: "Tensor"
    """The answer where the state is asked for, and IGNORED elsewhere."""
    since_BT: "Tensor"
    """The last position of the oldest symbol that the answer depends on; meaningless where nothing is asked."""


class Written(NamedTuple):
    """The tokens of a sequence for each symbol, and what is asked at its last token."""

    tokens_BNP: np.ndarray
    answers_BN: np.ndarray
    """The answer after each symbol, or IGNORED."""
    since_BN: np.ndarray
    """The number of the first symbol that the answer depends on."""


@dataclass(frozen=True)
class StateTask(ABC):
    """The settings that all state-tracking tasks share."""

    name: ClassVar[str]
    title: ClassVar[str]
    command: ClassVar[str]
    in_words: ClassVar[bool] = True
    words_per_symbol: ClassVar[int] = 1

    length: int = 32
    """n, the number of symbols in a training sequence."""
    curriculum: float = 0.5
    """Fraction of the steps over which training sequences grow from length / 8 to length."""
    until: float = 0.999
    """Training stops early when the accuracy at every length is at least this."""

    def __post_init__(self) -> None:
        check_count("length", self.length, 1, LONGEST)
        if not 0.0 <= self.curriculum <= 1.0:
            raise ContextReadyError(
                f"curriculum must be from 0 to 1, a fraction of the steps, but got {self.curriculum}."
            )
        if not self.until > 0.0:
            raise ContextReadyError(f"until must be greater than 0, an accuracy, but got {self.until}.")

    @property
    def tokens(self) -> int:
        """Tokens per training sequence (T)."""
        return 1 + self.length * self.words_per_symbol

    @property
    def window(self) -> int | None:
        """The attention window that the task is designed for: none."""
        return None

    @property
    @abstractmethod
    def words(self) -> Sequence[str]:
        """The words of symbols and answers; a token is the number of its word."""

    @property
    def vocabulary(self) -> Sequence[str]:
        """Every token as a word; the last one begins a sequence."""
        return (*self.words, BEGIN)

    @property
    def vocab_size(self) -> int:
        """Number of distinct tokens."""
        return len(self.vocabulary)

    @abstractmethod
    def draw(self, rng: np.random.Generator, rows: int, length: int) -> np.ndarray:
        """Draw symbols (B, N, …) as whole numbers."""

    @abstractmethod
    def write(self, symbols: np.ndarray) -> Written:
        """Write symbols as tokens, and answer the questions about them."""

    @abstractmethod
    def solve(self, words: Sequence[str]) -> list[str | None]:
        """Answer a sequence of words one by one, the slow and obvious way; None where nothing is asked.

        This shares no code with `write`, which the tests compare with it.
        """

    @abstractmethod
    def guess(self, unseen: int) -> float:
        """The best accuracy of an answer without the symbols that it depends on, the first `unseen` of the sequence."""

    def batch(self, split: str, seed: int, step: int, rows: int, length: int | None = None) -> StateBatch:
        """Draw the sequences of one step, with `length` symbols if it is given. The same arguments give the same ones.

        Whether a sequence is for training or for testing depends on its first symbols, as many as a training sequence
        has. So no test sequence, however long, begins with a training sequence.
        """
        if split not in SPLITS:
            raise ContextReadyError(f"Unknown split '{split}'; choose train or test.")
        longest = max(self.length, length or 0)
        check_count("length", longest, 1, LONGEST)
        size = 64 * rows * longest * self.words_per_symbol * (HELD_OUT if split == "test" else 1)
        check_memory(
            size,
            f"A batch of {shown(rows)} sequences with {1 + longest * self.words_per_symbol:,} tokens each",
            "lower batch_size, eval_tokens or length.",
        )
        rng = np.random.default_rng((seed, SPLITS.index(split), step))
        symbols = self._of_split(rng, rows, longest, test=split == "test")
        return self._as_batch(self.write(symbols[:, : length or self.length]))

    def _of_split(self, rng: np.random.Generator, rows: int, length: int, test: bool) -> np.ndarray:
        """Draw symbols of one split. All are drawn alike, and a checksum decides the split."""
        parts, kept = [], 0
        while kept < rows:
            drawn = self.draw(rng, 2 * rows * (HELD_OUT if test else 1) + 8, length)
            mine = (checksum(drawn[:, : self.length]) % HELD_OUT == 0) == test
            parts.append(drawn[mine])
            kept += int(mine.sum())
            if not kept and len(parts) == MOST_ROUNDS:
                raise ContextReadyError(
                    f"{self.title} with length={self.length} has too few sequences to hold some out for testing; "
                    "increase length."
                )
        return np.concatenate(parts)[:rows]

    def _as_batch(self, written: Written) -> StateBatch:
        import torch

        P = self.words_per_symbol
        B, N, _ = written.tokens_BNP.shape
        targets_BNP = np.full((B, N, P), IGNORED)
        targets_BNP[:, :, -1] = written.answers_BN
        since_BNP = np.repeat((1 + written.since_BN[:, :, None]) * P, P, axis=2)
        inputs_BT, targets_BT, since_BT = (
            np.concatenate((np.full((B, 1), first), part_BNP.reshape(B, N * P)), axis=1).astype(np.int64)
            for first, part_BNP in (
                (len(self.words), written.tokens_BNP),
                (IGNORED, targets_BNP),
                (0, since_BNP),
            )
        )
        return StateBatch(*map(torch.from_numpy, (inputs_BT, targets_BT, since_BT)))

    def length_at(self, done: float) -> int:
        """The number of symbols in training sequences after this fraction of the steps."""
        if done >= self.curriculum:
            return self.length
        stage = 1 + int(STAGES * done / self.curriculum)
        return max(1, self.length * stage // STAGES)

    def shown(self, batch: StateBatch, row: int = 0) -> str:
        """Format a sequence as lines of inputs and of targets."""
        inputs = [self.vocabulary[token] for token in batch.inputs_BT[row].tolist()]
        targets = ["_" if t == IGNORED else self.vocabulary[t] for t in batch.targets_BT[row].tolist()]
        width = max(map(len, (*inputs, *targets)))
        per_line = max(1, 96 // (width + 1) // self.words_per_symbol) * self.words_per_symbol
        lines = []
        # The begin token is on the first line, before as many symbols as on the others.
        ends = range(1 + per_line, len(inputs) + per_line, per_line)
        for first, end in pairwise((0, *ends)):
            for name, words in (("Input: ", inputs), ("Target:", targets)):
                lines.append(f"  {name} " + " ".join(f"{word:>{width}}" for word in words[first:end]))
        return "\n".join(lines)


def checksum(symbols: np.ndarray) -> np.ndarray:
    """A checksum of each row that depends on every entry and is the same in every run."""
    content = symbols.reshape(len(symbols), -1).astype(np.uint64)
    total = np.zeros(len(content), np.uint64)
    for column in content.T:
        # A step of a multiplicative hash, which relies on overflow.
        total = (total ^ (column + np.uint64(1))) * np.uint64(0x9E3779B97F4A7C15)
        total ^= total >> np.uint64(29)
    return total


def counts(**sizes: tuple[int, int, int]) -> None:
    """Check settings that are whole numbers: the value, the least and the most of each."""
    for name, (value, least, most) in sizes.items():
        check_count(name, value, least, most)
