"""Saved sessions: a state and the newest tokens in one file, so that generation can continue later."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from contextready.errors import ContextReadyError
from contextready.model.state import State


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
            newest = [int(token) for token in json.loads(note)["newest"]]
            if not newest:
                raise ValueError("no token")
        except (ValueError, KeyError, TypeError):
            raise ContextReadyError(
                f"{path} is a state but not a session; create one with crt generate --save-state."
            ) from None
        return cls(state, newest)
