"""What an engine is: a model that reads prompts and then steps, one token a row, with its state in its own buffers.

This file needs numpy only: an exported model is run without torch.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from contextready.errors import ContextReadyError
from contextready.solve.reading import ReadInfo

if TYPE_CHECKING:
    from contextready.model.state import State

Logits = npt.NDArray[np.float32]

ENGINES = ("eager", "compiled", "ggml")


class Engine(Protocol):
    """Rows of one model, each at a position of its own."""

    name: str
    rows: int
    vocab_size: int
    capacity: int | None
    """Tokens a row can hold; none where nothing limits it."""

    def position(self, row: int) -> int:
        """Tokens this row has read."""

    def read(self, row: int, tokens: Sequence[int]) -> tuple[Logits, ReadInfo]:
        """Read a prompt into a row, after what it has read already; logits (V,) after its last token."""

    def step(self, tokens: Sequence[int]) -> Logits:
        """Read one token in every row; logits (rows, V), which the next call may overwrite."""

    def state(self, row: int) -> "State":
        """The state of a row, as a value that shares no memory with the engine."""

    def load(self, row: int, state: "State | None") -> None:
        """Continue a row from a state of one row, of this model; none: from before the first token."""


def check_capacity(capacity: int | None, tokens: int) -> None:
    """Refuse a row of more tokens than it can hold."""
    if capacity is not None and tokens > capacity:
        raise ContextReadyError(
            f"{tokens} tokens were to be read and there is room for {capacity}; shorten the prompt, generate fewer "
            "tokens, or give a larger --context."
        )


def check_ids(tokens: Sequence[int], vocab_size: int) -> None:
    """Refuse an empty prompt and ids that the model does not know."""
    if len(tokens) == 0:
        raise ContextReadyError("The prompt is empty; give at least one token, for example the end-of-text token.")
    bad = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if bad is not None:
        raise ContextReadyError(
            f"Token id {bad} is out of range; this model knows the ids 0 to {vocab_size - 1}, so use its own tokenizer."
        )


def check_step(tokens: Sequence[int], rows: int, vocab_size: int) -> None:
    """Refuse a step that has not one known token for every row."""
    if len(tokens) != rows:
        raise ContextReadyError(f"{len(tokens)} tokens were given for {rows} rows; give one for each.")
    check_ids(tokens, vocab_size)
