"""The state-tracking tasks by name, and how a command line becomes the settings of a run on one of them."""

from collections.abc import Mapping, Sequence

from contextready.errors import ContextReadyError, nearest
from contextready.formats.limits import shown
from contextready.runs.config import RunConfig
from contextready.runs.recipes import resolve
from contextready.settings import parse_assignments

RECIPE, RECIPE_CONVERT = "task-mini", "task-convert"
TASKS: Mapping[str, tuple[str, ...]] = {
    "s5": ("task=word", "group=S5", "alphabet=2"),
    "a5": ("task=word", "group=A5", "alphabet=2"),
    "z60": ("task=word", "group=Z60", "alphabet=4"),
    "parity": ("task=word", "group=Z2"),
    "count": ("task=word", "group=Z10", "alphabet=2"),
    "word": ("task=word",),
    "assign": ("task=assign", "length=10"),
    "stack": ("task=stack",),
}
"""The settings that each name stands for. Any of them can be changed."""
POINTER = "pointer"


def check_task(name: str) -> None:
    """Raise an error unless there is a task of this name."""
    if name not in (*TASKS, POINTER):
        raise ContextReadyError(f"There is no task '{shown(name)}'; {nearest(name, [*TASKS, POINTER])}")


def resolve_task(name: str, words: Sequence[str]) -> RunConfig:
    """Turn a name and `key=value` words into the settings of a run."""
    check_task(name)
    given = parse_assignments(words)
    if "task" in given:
        raise ContextReadyError(f"task={shown(given['task'])} is named twice; write crt task {shown(given['task'])}.")
    own = [word for word in TASKS[name] if word.partition("=")[0] not in given]
    recipe = RECIPE_CONVERT if given.get("pretrained", "none").lower() != "none" else RECIPE
    defaults = [] if "out" in given else [f"out=runs/{name}"]
    return resolve(recipe, [*own, *defaults, *words])
