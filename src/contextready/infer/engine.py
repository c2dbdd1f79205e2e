"""The engine protocol: a model that reads prompts and then steps one token per row, with state in its own buffers.

This file needs numpy only, because exported files run without torch.
"""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from contextready.errors import ContextReadyError
from contextready.formats.limits import check_count
from contextready.solve.reading import ReadInfo

if TYPE_CHECKING:
    from contextready.model.state import State

Logits = npt.NDArray[np.float32]

ENGINES = ("eager", "compiled", "ggml")
EXPORTED = ".gguf"
"""The extension of exported files, which only the engine ggml runs."""


class Engine(Protocol):
    """Several rows of one model, each at its own position."""

    name: str
    rows: int
    vocab_size: int
    capacity: int | None
    """Tokens that a row can hold; None if there is no limit."""

    def position(self, row: int) -> int:
        """Number of tokens that this row has read."""

    def read(self, row: int, tokens: Sequence[int]) -> tuple[Logits, ReadInfo]:
        """Append a prompt to a row; returns logits (V,) after its last token."""

    def append(self, row: int, tokens: Sequence[int]) -> ReadInfo:
        """Append tokens to a row as `read` does, without computing logits: for all pieces of a prompt but the last."""

    def step(self, tokens: Sequence[int], rows: Sequence[int] | None = None) -> Logits:
        """Read one token in each of these rows, by default in all of them; the others stay as they are.

        Returns logits (tokens, V) in the order of the tokens, which the next call may overwrite. Every row gets what it
        would get alone, up to rounding.
        """

    def state(self, row: int) -> "State":
        """The state of a row, as a value that shares no memory with the engine."""

    def load(self, row: int, state: "State | None") -> None:
        """Continue a row from a state with one row of this model; None starts before the first token."""

    def free(self, row: int) -> None:
        """Forget what a row has read, so that it starts before the first token again."""

    def copy_row(self, source: int, target: int) -> None:
        """Make one row continue from where another is."""


def check_capacity(capacity: int | None, tokens: int) -> None:
    """Refuse to read more tokens than a row can hold."""
    if capacity is not None and tokens > capacity:
        raise ContextReadyError(
            f"{tokens} tokens do not fit into a context of {capacity}; shorten the prompt, generate fewer tokens, or "
            "choose a larger --context."
        )


def check_ids(tokens: Sequence[int], vocab_size: int) -> None:
    """Refuse an empty prompt and ids outside the vocabulary."""
    if len(tokens) == 0:
        raise ContextReadyError("The prompt is empty; pass at least one token, for example the end-of-text token.")
    bad = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if bad is not None:
        raise ContextReadyError(
            f"Token id {bad} is out of range; this model has ids 0 to {vocab_size - 1}, so use its own tokenizer."
        )


def check_row(row: int, rows: int) -> None:
    """Refuse a row that the engine does not have."""
    if not 0 <= row < rows:
        raise ContextReadyError(f"There is no row {row}; this engine has rows 0 to {rows - 1}.")


def check_step(tokens: Sequence[int], rows: Sequence[int] | None, count: int, vocab_size: int) -> Sequence[int]:
    """Return the rows of a step, which are all `count` if none are named; refuse anything but one token per row."""
    stepping = range(count) if rows is None else rows
    if len(tokens) != len(stepping):
        raise ContextReadyError(f"{len(tokens)} tokens were passed for {len(stepping)} rows; pass one per row.")
    if len(set(stepping)) < len(stepping):
        raise ContextReadyError(f"A step reads one token per row, but rows are repeated in {list(stepping)}.")
    for row in stepping if rows is not None else ():
        check_row(row, count)
    check_ids(tokens, vocab_size)
    return stepping


def check_threads(name: str, threads: int | None) -> None:
    """Refuse a number of threads that a computer cannot start; `name` is what the user calls it."""
    if threads is not None:
        # More threads than cores only wait for each other. ggml can start at most 512.
        check_count(name, threads, 1, min(512, max(64, 4 * (os.cpu_count() or 1))))
