"""Tasks: what a run learns that is not text. Rooms above bring them; here are their settings among a run's."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from contextready import registry
from contextready.errors import ContextReadyError, nearest
from contextready.settings import build_settings

TEXT = "text"
FIRST_TASK = "pointer"
"""The task of checkpoints that do not name theirs: there was no other when they were written."""
SEQUENCES_OF_A_VALIDATION = 500
"""Fresh sequences of a validation, unless eval_tokens says otherwise."""


class Task(Protocol):
    """A task's settings, a dataclass, and what follows from them for model and training."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    name: ClassVar[str]
    title: ClassVar[str]
    """What it is called in sentences."""
    command: ClassVar[str]
    """The command that trains on it."""

    @property
    def vocab_size(self) -> int:
        """Kinds of tokens."""

    @property
    def length(self) -> int:
        """T, tokens of a sequence."""

    @property
    def window(self) -> int | None:
        """The attention window it is made for, or none."""


def task_class(name: str) -> type[Task]:
    """The settings of a task by its name; the module that provides it has `SETTINGS` and `open_source`."""
    settings_class: type[Task] = registry.provider("task", name).SETTINGS
    return settings_class


def task_keys() -> list[str]:
    """Every setting of any task, and `task` itself."""
    keys = [field.name for name in registry.names("task") for field in dataclasses.fields(task_class(name))]
    return ["task", *keys]


def split_task(settings: Mapping[str, Any]) -> tuple[Task | None, dict[str, Any]]:
    """Take the task out of the settings of a run, and put in what it decides about model and training."""
    keys = task_keys()
    rest = {key: value for key, value in settings.items() if key not in keys}
    given = {key: value for key, value in settings.items() if key in keys and key != "task"}
    name = settings.get("task", TEXT)
    known = [TEXT, *registry.names("task")]
    if name not in known:
        raise ContextReadyError(f"task={name} is unknown; {nearest(str(name), known)}")
    if name == TEXT:
        if given:
            key = next(iter(given))
            owner = next(c for c in map(task_class, registry.names("task")) if key in c.__dataclass_fields__)
            raise ContextReadyError(f"{key}={given[key]} is of {owner.title} ({owner.command}); leave {key} out.")
        return None, rest
    cls = task_class(name)
    for key in ("data", "vocab_size", "block_size", "pretrained"):
        if str(rest.get(key, "none")).lower() != "none":
            raise ContextReadyError(f"{key}={rest[key]} does not go with {cls.title}; leave {key} out.")
    task = build_settings(cls, given)
    follows = {"data": "", "vocab_size": task.vocab_size, "block_size": task.length}
    watched = {"window": task.window, "eval_tokens": SEQUENCES_OF_A_VALIDATION * task.length}
    return task, watched | rest | follows


def task_as_dict(task: Task) -> dict[str, Any]:
    """Plain values, for JSON."""
    return {"name": task.name} | dataclasses.asdict(task)


def task_from_dict(saved: Mapping[str, Any]) -> Task:
    """From such plain values."""
    rest = {key: value for key, value in saved.items() if key != "name"}
    return build_settings(task_class(saved.get("name", FIRST_TASK)), rest)
