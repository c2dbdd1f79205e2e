"""Saved sessions: a state and the newest tokens in one file, so that generation can continue later."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from contextready.errors import ContextReadyError
from contextready.formats.json_file import parse_json
from contextready.formats.record import read_record
from contextready.model.state import State


@dataclass(frozen=True)
class SessionNote:
    """The note of a state that makes it a session."""

    newest: list[Annotated[int, range(1 << 31)]]


@dataclass(frozen=True, eq=False)
class Session:
    """A state and the newest tokens; the state has read all of them except the last."""

    state: State
    newest: Sequence[int]

    @property
    def unread(self) -> int:
        """The last token, which the state has not read yet."""
        return self.newest[-1]

    def rollback(self, tokens: int) -> "Session":
        """The session exactly as it was this many tokens ago."""
        if not 0 <= tokens < len(self.newest):
            raise ContextReadyError(
                f"This session can be rolled back by at most {len(self.newest) - 1} tokens, but got {tokens}; "
                "generate it with a larger --history."
            )
        if tokens == 0:
            return self
        return Session(self.state.rollback(self.state.position - tokens), self.newest[:-tokens])

    def save(self, path: Path) -> None:
        """Write the session to a file, completely or not at all."""
        self.state.save(path, note=json.dumps({"newest": list(self.newest)}))

    @classmethod
    def load(cls, path: Path) -> "Session":
        """Read a session that `save` wrote."""
        state, note = State.load_with_note(path)
        try:
            newest = read_record(SessionNote, parse_json(note, "the note"), "the note").newest
            # The state has read all of them except the last.
            if not 1 <= len(newest) <= state.position + 1:
                raise ContextReadyError("the note does not match the state")
        except ContextReadyError:
            raise ContextReadyError(
                f"{path} is a state but not a session; create one with crt generate --save-state."
            ) from None
        return cls(state, newest)
