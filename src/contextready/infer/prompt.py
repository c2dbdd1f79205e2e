"""Reading a prompt in pieces, so that the other rows of an engine can step in between. Needs numpy only."""

import time
from collections.abc import Sequence

from contextready.errors import ContextReadyError
from contextready.infer.engine import Engine, Logits, check_capacity, check_ids, check_row
from contextready.solve.reading import ReadInfo, joined

PIECE = 64
"""Tokens of a piece unless told otherwise."""


class PromptInPieces:
    """A prompt that is read into a row of an engine, a bounded number of tokens at a time.

    Pieces end at the positions that are multiples of `piece`, so how a prompt is divided depends on nothing that
    happens in between. Reading in pieces gives what `Engine.read` gives for the whole prompt: exactly, up to rounding,
    if the solver is exact (sequential, and every engine for exported files unless told otherwise), and otherwise within
    the tolerance. Every piece is solved to that tolerance, and pieces of fewer than 32 tokens are read one token at a
    time. To give up, free the row.
    """

    def __init__(self, engine: Engine, row: int, tokens: Sequence[int], piece: int = PIECE) -> None:
        if piece < 1:
            raise ContextReadyError(f"piece must be at least 1, but got {piece}.")
        check_row(row, engine.rows)
        check_ids(tokens, engine.vocab_size)
        check_capacity(engine.capacity, engine.position(row) + len(tokens))
        self.engine, self.row, self.tokens, self.piece = engine, row, list(tokens), piece
        self.start = engine.position(row)
        self.logits: Logits | None = None
        """Logits (V,) after the last token, once the whole prompt has been read."""
        self._infos: list[ReadInfo] = []
        self._seconds = 0.0

    @property
    def read(self) -> int:
        """Number of tokens of the prompt that have been read."""
        return sum(info.tokens for info in self._infos)

    @property
    def is_read(self) -> bool:
        """Whether the whole prompt has been read."""
        return self.read == len(self.tokens)

    @property
    def info(self) -> ReadInfo:
        """How the tokens so far were read. The seconds do not include the time in between."""
        if not self._infos:
            raise ContextReadyError("Nothing of this prompt has been read yet; call advance first.")
        return joined(self._infos, self._seconds)

    def advance(self) -> bool:
        """Read the next piece; returns whether the whole prompt has been read."""
        if self.is_read:
            return True
        begun, read = time.perf_counter(), self.read
        position = self.start + read
        if self.engine.position(self.row) != position:
            raise ContextReadyError(
                f"Row {self.row} was at position {position} after the last piece of its prompt and is now at "
                f"{self.engine.position(self.row)}; step, load or free a row only after its prompt."
            )
        piece = self.tokens[read : read + self.piece - position % self.piece]
        if read + len(piece) == len(self.tokens):
            logits_V, info = self.engine.read(self.row, piece)
            # Copied, because the engine may write other logits into the same buffer.
            self.logits = logits_V.copy()
        else:
            info = self.engine.append(self.row, piece)
        self._infos.append(info)
        self._seconds += time.perf_counter() - begun
        return self.is_read
