"""Runs on pointer chasing: which one is asked for, and where one on disk stands."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from contextready.errors import ContextReadyError
from contextready.pointer.plots import level_records
from contextready.runs.config import RunConfig
from contextready.runs.metrics import FILE
from contextready.runs.recipes import load_recipe, resolve
from contextready.settings import parse_assignments

RECIPE = "pointer-mini"


class Outcome(NamedTuple):
    """Where a run on pointer chasing stands."""

    step: int
    seconds: float
    """Spent on updates."""
    accuracy: list[float]
    levels_solved: int
    solved: bool
    """Whether all levels are."""


def outcome(run: Path) -> Outcome | None:
    """The newest validation of a run; none if it has none yet."""
    if not (run / FILE).is_file():
        return None
    records = level_records(run)
    return Outcome(*(records[-1][key] for key in Outcome._fields)) if records else None


def resolve_pointer(words: Sequence[str]) -> RunConfig:
    """`[RECIPE] [key=value …]` as a run on pointer chasing."""
    named = bool(words) and "=" not in words[0]
    recipe, changes = (words[0], words[1:]) if named else (RECIPE, words)
    given = parse_assignments(changes).get("task")
    if given == "text":
        raise ContextReadyError("task=text is not pointer chasing; leave task out, or learn text with crt train.")
    if given is None and load_recipe(recipe).get("task") != "pointer":
        raise ContextReadyError(f"{recipe} learns text, not pointer chasing; train it with crt train {recipe}.")
    return resolve(recipe, changes)
