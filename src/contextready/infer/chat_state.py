"""Where a conversation was, so that it can return there exactly and without reading anything again.

The keys and values of earlier tokens never change, so one vector is enough to return to an earlier position: the one
that its last token passes on. Models with an attention window forget keys and values, so there the whole state is kept.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from contextready.infer.template import Message

if TYPE_CHECKING:
    from torch import Tensor

    from contextready.infer.engine import Engine
    from contextready.model.state import State


@dataclass(frozen=True, eq=False)
class Place:
    """A position of the engine, with what is needed to return to it; nothing if torch is not installed."""

    position: int
    carried_11C: "Tensor | None" = None
    """What the last token passes on. With the keys and values of the engine up to here, this is the state."""
    whole: "State | None" = None
    """The whole state, if the keys and values may change or be forgotten."""


@dataclass(frozen=True, eq=False)
class Point:
    """The conversation before a question."""

    messages: tuple[Message, ...]
    tokens: list[int]
    places: tuple[Place, ...]
    place: Place


@dataclass(frozen=True, eq=False)
class Moment:
    """A whole conversation, which shares no memory with the engine."""

    system: str | None
    messages: tuple[Message, ...]
    tokens: tuple[int, ...]
    places: tuple[Place, ...]
    """Where the answers began."""
    points: tuple[Point, ...]
    """Before each question."""
    state: "State | None"
    """None at the start, or if torch is not installed."""


def state_of(engine: "Engine") -> "State | None":
    """Copy the state of the engine's only row; None at the start, or if torch is not installed."""
    try:
        import torch  # noqa: F401  (states are made of its tensors)
    except ImportError:
        return None
    return engine.state(0) if engine.position(0) else None


def place_of(engine: "Engine", *, whole: bool = False) -> Place:
    """Return where the engine is; `whole` keeps the state even if its keys and values will change."""
    position, state = engine.position(0), state_of(engine)
    if state is None:
        return Place(position)
    if whole or getattr(state.cache, "window", None) is not None:
        return Place(position, whole=state)
    return Place(position, carried_11C=state.carried_BRC[:, -1:].clone())


def restored(engine: "Engine", place: Place) -> "State | None":
    """Return the state at a place; None is the start, also if the state at the place is not known."""
    if place.whole is not None:
        return place.whole
    if place.carried_11C is None or place.position > engine.position(0):
        return None
    state = engine.state(0)
    return replace(state, cache=state.cache.rollback(place.position), carried_BRC=place.carried_11C)
