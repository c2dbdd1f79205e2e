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

    def step(self, tokens: Sequence[int]) -> Logits:
        """Read one token in every row; returns logits (rows, V), which the next call may overwrite."""

    def state(self, row: int) -> "State":
        """The state of a row, as a value that shares no memory with the engine."""

    def load(self, row: int, state: "State | None") -> None:
        """Continue a row from a state with one row of this model; None starts before the first token."""

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


def check_step(tokens: Sequence[int], rows: int, vocab_size: int) -> None:
    """Refuse a step without exactly one valid token per row."""
    if len(tokens) != rows:
        raise ContextReadyError(f"{len(tokens)} tokens were passed for {rows} rows; pass one per row.")
    check_ids(tokens, vocab_size)


def check_threads(name: str, threads: int | None) -> None:
    """Refuse a number of threads that a computer cannot start; `name` is what the user calls it."""
    if threads is not None:
        # More threads than cores only wait for each other. ggml can start at most 512.
        check_count(name, threads, 1, min(512, max(64, 4 * (os.cpu_count() or 1))))
