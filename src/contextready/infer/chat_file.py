"""Saved conversations: the messages, and the state of the model that has read them, in one file."""

import base64
import binascii
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from contextready.errors import ContextReadyError
from contextready.formats.json_file import parse_json
from contextready.formats.record import Count, Sha256, read_record
from contextready.infer.chat_state import Moment, Place, Point

if TYPE_CHECKING:
    from torch import Tensor

    from contextready.data.tokenizer import Tokenizer
    from contextready.model.state import State

KIND = "conversation"


@dataclass(frozen=True)
class MessageNote:
    """A message."""

    role: Literal["user", "assistant"]
    content: str


@dataclass(frozen=True)
class PlaceNote:
    """A place; without what is carried there, returning to it means reading again."""

    position: Count
    carried: str | None = None
    """The bytes of its numbers in base64."""


@dataclass(frozen=True)
class PointNote:
    """The conversation before a question; its number says how many messages that were."""

    place: PlaceNote
    unread: Annotated[int, range(1 << 31)] | None = None
    """The last token, if the state has not read it."""


@dataclass(frozen=True)
class ChatNote:
    """The note of a state that makes it a conversation."""

    kind: Literal["conversation"]
    tokenizer: Sha256
    system: str | None
    messages: list[MessageNote]
    tokens: list[Annotated[int, range(1 << 31)]]
    places: list[PlaceNote]
    points: list[PointNote]


def save_chat(path: Path, moment: Moment, tokenizer: "Tokenizer") -> None:
    """Write a conversation to a file, completely or not at all. Only another conversation is replaced."""
    if moment.state is None:
        raise ContextReadyError(
            "There is nothing to save; ask something first."
            if not moment.messages
            else "The state of the model cannot be saved; install torch with: pip install torch"
        )
    if path.exists() and not _is_chat(path):
        raise ContextReadyError(f"{path} exists and is not a saved conversation; choose another name.")
    points: list[PointNote] = []
    known = True
    for point in reversed(moment.points):
        # Where the question changed what had been read before, older places belong to other keys and values.
        known = known and point.place.whole is None
        unread = point.tokens[point.place.position :]
        points.insert(0, PointNote(_note(point.place), *unread) if known else PointNote(PlaceNote(0)))
    note = ChatNote(
        kind="conversation",
        tokenizer=tokenizer.sha256,
        system=moment.system,
        messages=[MessageNote(**message) for message in moment.messages],  # type: ignore[arg-type]
        tokens=list(moment.tokens),
        places=[_note(place) for place in moment.places],
        points=points,
    )
    moment.state.save(path, note=json.dumps(asdict(note)))


def load_chat(path: Path, tokenizer: "Tokenizer") -> Moment:
    """Read a conversation that `save_chat` wrote; whether its state is one of the model is left to the engine."""
    from contextready.model.state import State

    state, text = State.load_with_note(path)
    try:
        note = read_record(ChatNote, parse_json(text, "its note"), "its note")
        if note.tokenizer != tokenizer.sha256:
            raise ContextReadyError("it was held with a model that has another tokenizer")
        return _moment(note, state, tokenizer.vocab_size)
    except ContextReadyError as error:
        raise ContextReadyError(f"{path} is not a conversation to continue ({str(error).rstrip('.')}).") from None


def _moment(note: ChatNote, state: "State", vocab_size: int) -> Moment:
    """Put a conversation together, if its parts match."""
    ids = [*note.tokens, *(point.unread for point in note.points if point.unread is not None)]
    if any(id >= vocab_size for id in ids) or not 0 <= len(note.tokens) - state.position <= 1:
        raise ContextReadyError("its tokens do not match its state")
    roles = [message.role for message in note.messages]
    if roles != ["user", "assistant"] * len(note.points) or not note.points or state.batch_size != 1:
        raise ContextReadyError("its messages do not match its state")
    positions = [place.position for place in note.places]
    starts = [point.place.position for point in note.points]
    if positions != sorted(positions) or max(positions + starts) > state.position:
        raise ContextReadyError("its places do not match its state")
    messages = tuple(asdict(message) for message in note.messages)
    places = tuple(_place(place, state) for place in note.places)
    points = tuple(
        Point(
            messages=messages[: 2 * number],
            tokens=note.tokens[: point.place.position] + ([] if point.unread is None else [point.unread]),
            places=tuple(place for place in places if place.position <= point.place.position),
            place=_place(point.place, state),
        )
        for number, point in enumerate(note.points)
    )
    return Moment(note.system, messages, tuple(note.tokens), places, points, state)


def _note(place: Place) -> PlaceNote:
    if place.carried_11C is None:
        return PlaceNote(place.position)
    return PlaceNote(place.position, base64.b64encode(_bytes(place.carried_11C)).decode())


def _place(note: PlaceNote, state: "State") -> Place:
    import torch

    if note.carried is None:
        return Place(note.position)
    like = state.carried_BRC[:, -1:]
    try:
        content = base64.b64decode(note.carried, validate=True)
    except (binascii.Error, ValueError):
        content = b""
    if len(content) != like.nbytes:
        raise ContextReadyError("its places do not match its state")
    carried = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(like.dtype).reshape(like.shape)
    return Place(note.position, carried)


def _bytes(tensor: "Tensor") -> bytes:
    import torch

    content: bytes = tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return content


def _is_chat(path: Path) -> bool:
    from contextready.formats.safetensors_file import read_header

    try:
        note = parse_json(read_header(path).metadata["note"], "the note")
    except (ContextReadyError, KeyError):
        return False
    return isinstance(note, dict) and note.get("kind") == KIND
