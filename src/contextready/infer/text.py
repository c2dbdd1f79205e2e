"""Text as its tokens come: never half a character, never the beginning of a stop string, nothing taken back."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from contextready.errors import ContextReadyError

if TYPE_CHECKING:
    from contextready.data.tokenizer import Tokenizer

UNKNOWN = "\ufffd"
"""What decoders put where bytes are no character, or not one yet."""
PATIENCE = 16
"""More tokens than this without one whole character at their end are wrong bytes."""


class IncrementalText:
    """The text of tokens as they come, up to the stop string that is complete first."""

    def __init__(self, tokenizer: "Tokenizer", stops: Sequence[str] = (), after: Sequence[int] = ()) -> None:
        """`after` are the tokens that came before and are not shown; some tokenizers strip a text's first space."""
        if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
            raise ContextReadyError("Stop strings must be a list of texts of at least one character each.")
        self.stopped = False
        self._decoder = _Decoder(tokenizer, after)
        self._stops = tuple(stops)
        self._held = ""

    def push(self, token: int) -> str:
        """The text that can be shown now that this token has come; nothing once a stop string is complete."""
        return "" if self.stopped else self._take(self._decoder.push(token), last=False)

    def flush(self) -> str:
        """The rest: what was held back because it might have become something else."""
        return "" if self.stopped else self._take(self._decoder.flush(), last=True)

    def _take(self, text: str, last: bool) -> str:
        self._held += text
        matches = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if matches:
            self.stopped = True
            shown, self._held = self._held[: min(matches)[1]], ""
            return shown
        keep = 0 if last else max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown


class _Decoder:
    """Ids to text, each character when its last byte has come.

    The new tokens are decoded behind the few before them (`context`), because a tokenizer may treat the first token
    of a text otherwise, and the text of those is taken off. `tokenizers.DecodeStream` does likewise, but it is missing
    from 0.20, and it holds bytes that are no character back for ever.

    The pieces together are what decoding all ids at once gives, except for wrong bytes with byte fallback: such a
    decoder turns the whole run of bytes around a wrong one into UNKNOWN, and the characters shown by then stay.
    """

    def __init__(self, tokenizer: "Tokenizer", after: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._new: list[int] = []
        self._given = 0  # characters of the new tokens' text that are out
        self._set_context(list(after))

    def push(self, token: int) -> str:
        """The characters that are certain now."""
        self._new.append(token)
        text = self._text()
        # All of them are held, not one: with byte fallback every byte of an unfinished character is one.
        certain = text.rstrip(UNKNOWN)
        piece = certain[self._given :]
        self._given += len(piece)
        if text and certain == text:
            self._set_context(self._new)
            self._new, self._given = [], 0
        elif len(self._new) > PATIENCE:
            piece += self._cut(text)
        return piece

    def flush(self) -> str:
        """The rest, UNKNOWN where it is no whole character."""
        rest = self._text()[self._given :]
        self._given += len(rest)
        return rest

    def _text(self) -> str:
        """The text of the new tokens."""
        text = self._decode(self._context + self._new)
        # A wrong byte spoils the whole run with byte fallback, the context's bytes too; the new ones stand alone then.
        return text[len(self._before) :] if text.startswith(self._before) else self._decode(self._new)

    def _cut(self, text: str) -> str:
        """Let wrong bytes go, if the last token begins anew: a long run of them would be decoded ever again."""
        head, tail = self._new[:-1], self._new[-1:]
        certain = self._decode(head)
        if certain + self._decode(tail) != text:
            return ""
        piece = certain[self._given :]
        self._new, self._given = tail, max(0, self._given - len(certain))
        return piece

    def _set_context(self, tokens: list[int]) -> None:
        self._context, self._before = tokens, self._decode(tokens)

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens) if tokens else ""


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that a stop string begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
