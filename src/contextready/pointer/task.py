"""Pointer chasing: tables whose entries point to entries of earlier tables, and queries that follow the pointers.

A base table maps M keys to values. Each of H more tables maps M new keys to the keys of the table before it.
Every table is followed by queries, `Q key answer`, and the target is at the key's position. An entry is written
"value = key", so that a key can attend to its value on the left:

    v3 = A v0 = B v8 = C | Q A v3 Q B v0 Q C v8 | A = D B = E C = F | Q D v3 …

With answers=absent, queries are pairs, `Q key`. The last table's keys are then queried like all others, and one of them
once more at the end. With queries=none there is only this final query, and the other targets are at the tables' keys.

A sequence depends only on the seed, the split, the step and the row. No sequence is in both splits.
This module imports torch only when it creates a batch, so that the settings can be described without torch.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from contextready.data.shards import IGNORED
from contextready.errors import ContextReadyError, nearest
from contextready.formats.limits import check_count, check_memory, shown

if TYPE_CHECKING:
    from torch import Tensor

ANSWERS = ("masked", "visible", "absent")
QUERIES = ("level", "all", "none")
SPLITS = ("train", "test")
"""The target at positions that are not queries."""
HELD_OUT = 8
"""One of this many sequences belongs to the test split."""
LETTERS = "ABCDEFGHIJKLMNOPRSTUVWXYZ"
"""Names of keys, if there are enough letters. Q is missing because it marks a query."""
LIMITS = {"hops": 10_000, "keys": 10_000, "values": 10**6}
"""The largest value of each size; the paper uses 20, 10 and 20."""
LONGEST = 2**18
"""Tokens of the longest sequence, which is written token by token."""
MOST_ROUNDS = 32
"""A split that is still empty after this many rounds of draws has no sequences; chance alone never causes that."""


class PointerBatch(NamedTuple):
    """A batch of sequences."""

    inputs_BT: "Tensor"
    targets_BT: "Tensor"
    """The answer at every key that is asked for, and IGNORED elsewhere."""
    levels_T: "Tensor"
    """The level that is asked for at each position, and -1 elsewhere."""


@dataclass(frozen=True)
class PointerTask:
    """The size and the variant of the task."""

    name: ClassVar[str] = "pointer"
    title: ClassVar[str] = "pointer chasing"
    command: ClassVar[str] = "crt pointer"
    in_words: ClassVar[bool] = False

    hops: int = 10
    """Number of tables after the base table (H). Queries at level n follow n pointers; n goes from 0 to H."""
    keys: int = 5
    """Number of keys per table (M)."""
    values: int = 10
    """Number of possible values in the base table (V)."""
    answers: str = "masked"
    """What follows a query: a placeholder (masked), the answer, as in the paper (visible), or nothing (absent)."""
    queries: str = "level"
    """What follows a table: queries for its keys (level) or for all so far (all), or none (its keys have targets)."""

    def __post_init__(self) -> None:
        for name, most in LIMITS.items():
            check_count(name, getattr(self, name), 1, most)
        if self.keys * self.values == 1:
            raise ContextReadyError("With keys=1 and values=1 there is nothing to ask; increase keys or values.")
        for name, valid in (("answers", ANSWERS), ("queries", QUERIES)):
            if getattr(self, name) not in valid:
                value = getattr(self, name)
                raise ContextReadyError(f"{name}={shown(value)} is unknown; {nearest(value, valid)}")
        if self.queries == "none" and self.answers != "absent":
            raise ContextReadyError(
                f"queries=none has no queries that answers={self.answers} could follow; set answers=absent."
            )
        if self.tokens > LONGEST:
            raise ContextReadyError(
                f"With hops={self.hops}, keys={self.keys} and queries={self.queries}, a sequence has {self.tokens:,} "
                f"tokens, but at most {LONGEST:,} are possible; lower hops or keys."
            )

    @property
    def window(self) -> int | None:
        """The attention window with which a query sees its own level and at most the previous one; 38 in the paper.

        There is none with queries=none, as in the author's runs of this variant.
        """
        return None if self.queries == "none" else 6 * self.keys + 8

    @property
    def vocab_size(self) -> int:
        """Number of distinct tokens: the values, the keys of every table, "=", "|", "Q" and the placeholder."""
        return self.values + (self.hops + 1) * self.keys + 4

    @property
    def repeats_last(self) -> bool:
        """Whether the final query asks for the last table once more, instead of being the only query for it."""
        return self.answers == "absent"

    @property
    def levels(self) -> int:
        """Number of levels that are scored: H + 1, and one more for a final query that repeats level H.

        The paper counts the repeated level like the others: its levels 0 to 10 are 10 tables.
        """
        return self.hops + 1 + self.repeats_last

    @property
    def tokens(self) -> int:
        """Tokens per sequence (T)."""
        H, again, tables = self.hops, self.repeats_last, (self.hops + 1) * (3 * self.keys + 1)
        if self.queries == "none":
            return tables + 2
        sections = (H if self.queries == "level" else H * (H + 3) // 2) + again
        per_query = 2 if self.answers == "absent" else 3
        return tables + per_query * self.keys * sections + H + again + 2

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
        """The token that replaces a masked answer."""
        return self.vocab_size - 1

    def key(self, level: int, number: int) -> int:
        """The token of a key."""
        return self.values + level * self.keys + number

    def batch(self, split: str, seed: int, step: int, rows: int) -> PointerBatch:
        """Draw the sequences of one step. The same arguments give the same sequences."""
        if split not in SPLITS:
            raise ContextReadyError(f"Unknown split '{split}'; choose train or test.")
        self._check_memory(split, rows)
        rng = np.random.default_rng((seed, SPLITS.index(split), step))
        base_BM, pointers_BHM, last_B = self._draw(rng, rows, test=split == "test")
        return self.written(base_BM, pointers_BHM, last_B)

    def _check_memory(self, split: str, rows: int) -> None:
        """Refuse a batch that does not fit into memory: the tables that are drawn, and the sequences."""
        drawn = _rows_to_draw(rows, split == "test") * (self.keys + 3 * self.hops * self.keys)
        check_memory(
            8 * (drawn + 4 * rows * self.tokens),
            f"A batch of {shown(rows)} sequences with {self.tokens:,} tokens each",
            "lower batch_size or eval_tokens.",
        )

    def written(self, base_BM: np.ndarray, pointers_BHM: np.ndarray, last_B: np.ndarray) -> PointerBatch:
        """Turn tables into sequences. `last_B` is the key of the last table that the final query asks for."""
        H = self.hops
        answers = [base_BM]
        for hop in range(H):
            answers.append(np.take_along_axis(answers[-1], pointers_BHM[:, hop], axis=1))
        writer = _Writer(self, len(base_BM))
        for level in range(H + 1):
            pointed_BM = base_BM if level == 0 else self.key(level - 1, 0) + pointers_BHM[:, level - 1]
            writer.table(level, pointed_BM, answers[level] if self.queries == "none" else None)
            if self.queries == "none":
                continue
            for about in range(level + 1) if self.queries == "all" else [level]:
                if about < H or self.repeats_last:
                    writer.queries(about, answers[about])
            if level < H or self.repeats_last:
                writer.add(self.bar)
        final_B1 = np.take_along_axis(answers[H], last_B[:, None], axis=1)
        writer.add(self.query)
        writer.add(self.key(H, 0) + last_B, target=final_B1[:, 0], level=self.levels - 1)
        return writer.batch()

    def _draw(self, rng: np.random.Generator, rows: int, test: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Draw tables of one split. All tables are drawn alike, and a checksum of their content decides the split."""
        parts: list[tuple[np.ndarray, np.ndarray]] = []
        kept = 0
        while kept < rows:
            count = _rows_to_draw(rows, test)
            base = rng.integers(self.values, size=(count, self.keys))
            pointers = rng.random((count, self.hops, self.keys)).argsort(axis=2)
            mine = (self._checksum(base, pointers) % HELD_OUT == 0) == test
            parts.append((base[mine], pointers[mine]))
            kept += int(mine.sum())
            if not kept and len(parts) == MOST_ROUNDS:
                raise ContextReadyError(
                    f"Pointer chasing with hops={self.hops}, keys={self.keys} and values={self.values} has too few "
                    "sequences to hold some out for testing; increase hops, keys or values."
                )
        base_BM = np.concatenate([base for base, _ in parts])[:rows]
        pointers_BHM = np.concatenate([pointers for _, pointers in parts])[:rows]
        return base_BM, pointers_BHM, rng.integers(self.keys, size=rows)

    def _checksum(self, base: np.ndarray, pointers: np.ndarray) -> np.ndarray:
        """A checksum that depends on every entry of the tables and is the same in every run."""
        content = np.concatenate((base, pointers.reshape(len(pointers), -1)), axis=1).astype(np.uint64)
        total = np.zeros(len(content), np.uint64)
        for column in content.T:
            # A step of a multiplicative hash, which relies on overflow.
            total = (total ^ (column + np.uint64(1))) * np.uint64(0x9E3779B97F4A7C15)
            total ^= total >> np.uint64(29)
        return total

    def spelled(self, token: int) -> str:
        """Spell a token as in the paper: v3, A, =, | or Q. The placeholder is an underscore."""
        if token < self.values:
            return f"v{token}"
        if token >= self.equals:
            return "=|Q_"[token - self.equals]
        name = token - self.values
        if (self.hops + 1) * self.keys <= len(LETTERS):
            return LETTERS[name]
        return f"k{name // self.keys}.{name % self.keys}"

    def shown(self, batch: PointerBatch, row: int = 0) -> str:
        """Format a sequence as in the paper: one line of inputs and one of targets per table and per query section."""
        tokens = batch.inputs_BT[row].tolist()
        inputs = [self.spelled(token) for token in tokens]
        targets = ["_" if target == IGNORED else self.spelled(int(target)) for target in batch.targets_BT[row]]
        lines, first, level, widest = [], 0, -1, self._widest
        rest = "" if self.queries == "none" else " and queries"
        for end in [*(i + 1 for i, token in enumerate(tokens) if token == self.bar), len(tokens)]:
            if tokens[first] != self.query:
                level += 1
                lines.append(f"Level {level} ({'index table' if level else 'base table'}{rest})")
            elif self.repeats_last and end == len(tokens):
                lines.append(f"Level {level + 1} (final query, level {level} again)")
            for name, words in (("Input: ", inputs), ("Target:", targets)):
                lines.append(f"  {name} " + " ".join(f"{word:>{widest}}" for word in words[first:end]))
            first = end
        return "\n".join(lines)

    @property
    def _widest(self) -> int:
        return max(len(self.spelled(token)) for token in range(self.vocab_size))


def _rows_to_draw(rows: int, test: bool) -> int:
    """The number of sequences to draw at once, of which about twice as many as needed belong to the split."""
    return 2 * rows * (HELD_OUT if test else 1) + 8


class _Writer:
    """Writes sequences column by column."""

    def __init__(self, task: PointerTask, rows: int) -> None:
        self.task, self.rows = task, rows
        self.columns: list[np.ndarray] = []
        self.targets: list[np.ndarray] = []
        self.levels: list[int] = []

    def add(self, token: int | np.ndarray, target: np.ndarray | int = IGNORED, level: int = -1) -> None:
        """Append one token to every row."""
        self.columns.append(np.broadcast_to(np.asarray(token), (self.rows,)))
        self.targets.append(np.broadcast_to(np.asarray(target), (self.rows,)))
        self.levels.append(level)

    def table(self, level: int, pointed_BM: np.ndarray, answers_BM: np.ndarray | None = None) -> None:
        """Append a table: what each key of a level points to, then the key, which has a target if there are answers."""
        for number in range(self.task.keys):
            self.add(pointed_BM[:, number])
            self.add(self.task.equals)
            target, asked = (IGNORED, -1) if answers_BM is None else (answers_BM[:, number], level)
            self.add(self.task.key(level, number), target, asked)
        self.add(self.task.bar)

    def queries(self, level: int, answers_BM: np.ndarray) -> None:
        """Append a query for every key of a level."""
        for number in range(self.task.keys):
            self.add(self.task.query)
            self.add(self.task.key(level, number), target=answers_BM[:, number], level=level)
            if self.task.answers != "absent":
                self.add(answers_BM[:, number] if self.task.answers == "visible" else self.task.placeholder)

    def batch(self) -> PointerBatch:
        """The sequences as tensors."""
        import torch

        inputs, targets = (
            torch.from_numpy(np.stack(part, axis=1).astype(np.int64)) for part in (self.columns, self.targets)
        )
        return PointerBatch(inputs, targets, torch.tensor(self.levels))
