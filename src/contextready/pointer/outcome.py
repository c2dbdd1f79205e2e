"""Runs on pointer chasing: resolve the settings of one, and read the progress of one on disk."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from contextready.errors import ContextReadyError
from contextready.pointer.plots import level_records
from contextready.pointer.score import SOLVED
from contextready.runs.config import RunConfig
from contextready.runs.metrics import FILE
from contextready.runs.recipes import load_recipe, resolve
from contextready.settings import parse_assignments

RECIPE = "pointer-mini"


class Outcome(NamedTuple):
    """The progress of a run on pointer chasing."""

    step: int
    seconds: float
    """Time spent on updates."""
    accuracy: list[float]
    levels_solved: int
    solved: bool
    """Whether all levels are solved."""


def outcome(run: Path) -> Outcome | None:
    """Read the newest validation of a run, or None if there is none yet."""
    if not (run / FILE).is_file():
        return None
    records = level_records(run)
    return Outcome(*(records[-1][key] for key in Outcome._fields)) if records else None


def solved_at(run: Path) -> list[int | None]:
    """Return the step of the first validation at which each level was solved; None if it never was."""
    records = level_records(run)
    return [
        next((record["step"] for record in records if record["accuracy"][level] >= SOLVED), None)
        for level in range(len(records[-1]["accuracy"]))
    ]


def resolve_pointer(words: Sequence[str]) -> RunConfig:
    """Turn `[RECIPE] [key=value …]` into the settings of a run on pointer chasing."""
    named = bool(words) and "=" not in words[0]
    recipe, changes = (words[0], words[1:]) if named else (RECIPE, words)
    given = parse_assignments(changes).get("task")
    if given == "text":
        raise ContextReadyError("crt pointer cannot train with task=text; remove it, or train on text with crt train.")
    if given is None and load_recipe(recipe).get("task") != "pointer":
        raise ContextReadyError(f"The recipe {recipe} is for text, not pointer chasing; use: crt train {recipe}")
    return resolve(recipe, changes)
