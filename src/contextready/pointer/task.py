"""Pointer chasing: tables of pointers to pointers, and queries that must follow them down to a value.

A base table maps M keys to values; each of H further tables maps M keys of its own to the keys of the table before.
After every table come queries, `Q key answer`; the target stands at the key. Written "value = key", so that a key sees
its value to the left:

    v3 = A v0 = B v8 = C | Q A v3 Q B v0 Q C v8 | A = D B = E C = F | Q D v3 …

A sequence is a function of seed, split, step and row. No sequence is in both splits.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from contextready.errors import ContextReadyError, nearest

ANSWERS = ("masked", "visible")
QUERIES = ("level", "all")
SPLITS = ("train", "test")
IGNORED = -100
"""The target where nothing is asked."""
HELD_OUT = 8
"""One sequence in so many belongs to the test split."""
LETTERS = "ABCDEFGHIJKLMNOPRSTUVWXYZ"
"""Names of keys, where there are enough: Q is the query."""
MOST_ROUNDS = 32
"""Rounds of draws after which a split that has had none is empty; with many sequences that never happens by chance."""


class PointerBatch(NamedTuple):
    """Sequences of the task."""

    inputs_BT: Tensor
    targets_BT: Tensor
    """The value at the key of every query, else IGNORED."""
    levels_T: Tensor
    """The level that is asked at each position, else -1."""


@dataclass(frozen=True)
class PointerTask:
    """The task's size and reading."""

    name: ClassVar[str] = "pointer"
    title: ClassVar[str] = "pointer chasing"
    command: ClassVar[str] = "crt pointer"

    hops: int = 10
    """H, tables after the base table: levels 0 to H are asked."""
    keys: int = 5
    """M, keys of a table."""
    values: int = 10
    """V, values that the base table maps to."""
    answers: str = "masked"
    """masked: a placeholder stands where the answer would; visible: the answer, as in the paper's example."""
    queries: str = "level"
    """level: after a table its own keys are asked, as in the paper's example; all: those of all levels so far."""

    def __post_init__(self) -> None:
        for name in ("hops", "keys", "values"):
            if getattr(self, name) < 1:
                raise ContextReadyError(f"{name}={getattr(self, name)} is too small; it must be at least 1.")
        if self.keys * self.values == 1:
            raise ContextReadyError("keys=1 and values=1 leave nothing to ask; give more of one.")
        for name, valid in (("answers", ANSWERS), ("queries", QUERIES)):
            if getattr(self, name) not in valid:
                raise ContextReadyError(
                    f"{name}={getattr(self, name)} is unknown; {nearest(getattr(self, name), valid)}"
                )

    @property
    def window(self) -> int:
        """The attention window at which a query sees its own level and nothing before the last: 38 in the paper."""
        return 6 * self.keys + 8

    @property
    def vocab_size(self) -> int:
        """Values, keys of every level, and = | Q and the placeholder."""
        return self.values + (self.hops + 1) * self.keys + 4

    @property
    def levels(self) -> int:
        """H + 1, the levels that are asked."""
        return self.hops + 1

    @property
    def length(self) -> int:
        """T, tokens of a sequence: 338 in the paper's setting."""
        H = self.hops
        sections = H if self.queries == "level" else H * (H + 3) // 2
        return (H + 1) * (3 * self.keys + 1) + 3 * self.keys * sections + H + 2

    @property
    def equals(self) -> int:
        """The token "="."""
        return self.vocab_size - 4

    @property
    def bar(self) -> int:
        """The token "|"."""
        return self.vocab_size - 3

    @property
    def query(self) -> int:
        """The token "Q"."""
        return self.vocab_size - 2

    @property
    def placeholder(self) -> int:
        """What stands where an answer is masked."""
        return self.vocab_size - 1

    def key(self, level: int, number: int) -> int:
        """The token of a key."""
        return self.values + level * self.keys + number

    def batch(self, split: str, seed: int, step: int, rows: int) -> PointerBatch:
        """The sequences of one step: the same for the same arguments."""
        if split not in SPLITS:
            raise ContextReadyError(f"There is no split '{split}'; choose train or test.")
        rng = np.random.default_rng((seed, SPLITS.index(split), step))
        base_BM, pointers_BHM, last_B = self._draw(rng, rows, test=split == "test")
        return self.written(base_BM, pointers_BHM, last_B)

    def written(self, base_BM: np.ndarray, pointers_BHM: np.ndarray, last_B: np.ndarray) -> PointerBatch:
        """Tables as sequences; `last_B` is the key of the last table that the final query asks for."""
        H = self.hops
        answers = [base_BM]
        for hop in range(H):
            answers.append(np.take_along_axis(answers[-1], pointers_BHM[:, hop], axis=1))
        writer = _Writer(self, len(base_BM))
        for level in range(H + 1):
            pointed_BM = base_BM if level == 0 else self.key(level - 1, 0) + pointers_BHM[:, level - 1]
            writer.table(level, pointed_BM)
            asked = range(level + 1) if self.queries == "all" else [level]
            for about in asked:
                if about < H:
                    writer.queries(about, answers[about])
            if level < H:
                writer.add(self.bar)
        final_B1 = np.take_along_axis(answers[H], last_B[:, None], axis=1)
        writer.add(self.query)
        writer.add(self.key(H, 0) + last_B, target=final_B1[:, 0], level=H)
        return writer.batch()

    def _draw(self, rng: np.random.Generator, rows: int, test: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tables of the wanted split: all are drawn alike, and a checksum of a table's content says whose it is."""
        parts: list[tuple[np.ndarray, np.ndarray]] = []
        kept = 0
        while kept < rows:
            count = 2 * rows * (HELD_OUT if test else 1) + 8
            base = rng.integers(self.values, size=(count, self.keys))
            pointers = rng.random((count, self.hops, self.keys)).argsort(axis=2)
            mine = (self._checksum(base, pointers) % HELD_OUT == 0) == test
            parts.append((base[mine], pointers[mine]))
            kept += int(mine.sum())
            if not kept and len(parts) == MOST_ROUNDS:
                raise ContextReadyError(
                    f"Pointer chasing with hops={self.hops}, keys={self.keys} and values={self.values} has too few "
                    "sequences to keep some apart for the test; give more of them."
                )
        base_BM = np.concatenate([base for base, _ in parts])[:rows]
        pointers_BHM = np.concatenate([pointers for _, pointers in parts])[:rows]
        return base_BM, pointers_BHM, rng.integers(self.keys, size=rows)

    def _checksum(self, base: np.ndarray, pointers: np.ndarray) -> np.ndarray:
        """A number that depends on every entry of the tables, the same in every run."""
        content = np.concatenate((base, pointers.reshape(len(pointers), -1)), axis=1).astype(np.uint64)
        total = np.zeros(len(content), np.uint64)
        for column in content.T:
            # A step of a multiplicative hash; overflow is wanted.
            total = (total ^ (column + np.uint64(1))) * np.uint64(0x9E3779B97F4A7C15)
            total ^= total >> np.uint64(29)
        return total

    def spelled(self, token: int) -> str:
        """A token as the paper writes it: v3, A, =, |, Q; the placeholder is an underscore."""
        if token < self.values:
            return f"v{token}"
        if token >= self.equals:
            return "=|Q_"[token - self.equals]
        name = token - self.values
        if self.levels * self.keys <= len(LETTERS):
            return LETTERS[name]
        return f"k{name // self.keys}.{name % self.keys}"

    def shown(self, batch: PointerBatch, row: int = 0) -> str:
        """A sequence as the paper prints it: a line of inputs and one of targets for every table and query section."""
        tokens = batch.inputs_BT[row].tolist()
        inputs = [self.spelled(token) for token in tokens]
        targets = ["_" if target == IGNORED else self.spelled(int(target)) for target in batch.targets_BT[row]]
        lines, first, level = [], 0, -1
        for end in [*(i + 1 for i, token in enumerate(tokens) if token == self.bar), len(tokens)]:
            if tokens[first] != self.query:
                level += 1
                lines.append(f"Level {level} ({'index table' if level else 'base table'} and queries)")
            for name, words in (("Input: ", inputs), ("Target:", targets)):
                lines.append(f"  {name} " + " ".join(f"{word:>{self._widest}}" for word in words[first:end]))
            first = end
        return "\n".join(lines)

    @property
    def _widest(self) -> int:
        return max(len(self.spelled(token)) for token in range(self.vocab_size))


class _Writer:
    """Sequences in the making, column by column."""

    def __init__(self, task: PointerTask, rows: int) -> None:
        self.task, self.rows = task, rows
        self.columns: list[np.ndarray] = []
        self.targets: list[np.ndarray] = []
        self.levels: list[int] = []

    def add(self, token: int | np.ndarray, target: np.ndarray | int = IGNORED, level: int = -1) -> None:
        """One more token in every row."""
        self.columns.append(np.broadcast_to(np.asarray(token), (self.rows,)))
        self.targets.append(np.broadcast_to(np.asarray(target), (self.rows,)))
        self.levels.append(level)

    def table(self, level: int, pointed_BM: np.ndarray) -> None:
        """What each key of a level points to, then the key."""
        for number in range(self.task.keys):
            self.add(pointed_BM[:, number])
            self.add(self.task.equals)
            self.add(self.task.key(level, number))
        self.add(self.task.bar)

    def queries(self, level: int, answers_BM: np.ndarray) -> None:
        """A query for every key of a level."""
        for number in range(self.task.keys):
            self.add(self.task.query)
            self.add(self.task.key(level, number), target=answers_BM[:, number], level=level)
            self.add(answers_BM[:, number] if self.task.answers == "visible" else self.task.placeholder)

    def batch(self) -> PointerBatch:
        """All of it as tensors."""
        inputs, targets = (
            torch.from_numpy(np.stack(part, axis=1).astype(np.int64)) for part in (self.columns, self.targets)
        )
        return PointerBatch(inputs, targets, torch.tensor(self.levels))
