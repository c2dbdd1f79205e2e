"""Incremental text: pieces that never end inside a character or a stop string and are never taken back."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from contextready.errors import ContextReadyError

if TYPE_CHECKING:
    from contextready.data.tokenizer import Tokenizer

UNKNOWN = "\ufffd"
"""What decoders write for bytes that are not a valid character, or not a complete one yet."""
PATIENCE = 16
"""After this many tokens without a complete character at the end, the bytes are invalid."""


class IncrementalText:
    """Turns tokens into text one by one, up to the first complete stop string."""

    def __init__(self, tokenizer: "Tokenizer", stops: Sequence[str] = (), after: Sequence[int] = ()) -> None:
        """`after` holds the preceding tokens, which are not shown; some tokenizers strip the first space of a text."""
        if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
            raise ContextReadyError("Stop strings must be a list of non-empty strings.")
        self.stopped = False
        self._decoder = _Decoder(tokenizer, after)
        self._stops = tuple(stops)
        self._held = ""

    def push(self, token: int) -> str:
        """The text that can be shown after this token; empty once a stop string is complete."""
        return "" if self.stopped else self._take(self._decoder.push(token), last=False)

    def flush(self) -> str:
        """The rest of the text, which was held back because it could have become part of something else."""
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
    """Decodes ids to text and returns each character when its last byte has arrived.

    New tokens are decoded together with the few before them (`context`), because a tokenizer may treat the first token
    of a text differently; the text of the context is then removed. `tokenizers.DecodeStream` does the same, but
    version 0.20 does not have it, and it holds back invalid bytes forever.

    The pieces together equal the decoding of all ids at once, except for invalid bytes with byte fallback. Such a
    decoder replaces the whole run of bytes around an invalid one with UNKNOWN, but characters already shown stay.
    """

    def __init__(self, tokenizer: "Tokenizer", after: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._new: list[int] = []
        self._given = 0  # characters of the new tokens' text that were already returned
        # After a begin token alone, the text begins: its first space is stripped if the tokenizer does that.
        self._set_context([] if tokenizer.special_ids.issuperset(after) else list(after))

    def push(self, token: int) -> str:
        """The characters that are certain after this token."""
        self._new.append(token)
        text = self._text()
        # Hold back all UNKNOWNs at the end: with byte fallback every byte of an incomplete character is one.
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
        """The rest, with UNKNOWN for an incomplete character."""
        rest = self._text()[self._given :]
        self._given += len(rest)
        return rest

    def _text(self) -> str:
        """The text of the new tokens."""
        text = self._decode(self._context + self._new)
        # With byte fallback an invalid byte changes the whole run, even the context; then decode the new ones alone.
        return text[len(self._before) :] if text.startswith(self._before) else self._decode(self._new)

    def _cut(self, text: str) -> str:
        """Return invalid bytes if the last token starts afresh, so that a long run is not decoded again and again."""
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
    """Length of the longest suffix of the text that is a prefix of the stop string."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
