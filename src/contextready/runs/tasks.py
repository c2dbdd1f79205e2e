"""Tasks other than language modelling. Higher-level packages provide them; this module handles their settings."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from contextready import registry
from contextready.errors import ContextReadyError, nearest
from contextready.formats.limits import shown
from contextready.settings import build_settings

TEXT = "text"
FIRST_TASK = "pointer"
"""The task of old checkpoints that do not name one, because it was the only task at the time."""
SEQUENCES_OF_A_VALIDATION = 500
"""Fresh sequences per validation, unless eval_tokens is set."""


class Task(Protocol):
    """The settings of a task (a dataclass), and what they imply for the model and the training."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    name: ClassVar[str]
    title: ClassVar[str]
    """The name of the task in messages."""
    command: ClassVar[str]
    """The command that trains on it."""
    in_words: ClassVar[bool]
    """Whether its sequences can be written in the tokens of a pretrained model."""

    @property
    def vocab_size(self) -> int:
        """Vocabulary size."""

    @property
    def tokens(self) -> int:
        """T, the number of tokens per training sequence."""

    @property
    def window(self) -> int | None:
        """The attention window that the task is designed for, if any."""


def task_class(name: str) -> type[Task]:
    """Return the settings class of a task. The module that provides the task has `SETTINGS` and `open_source`."""
    settings_class: type[Task] = registry.provider("task", name).SETTINGS
    return settings_class


def task_keys() -> list[str]:
    """Return the names of all settings of all tasks, and `task` itself."""
    keys = [field.name for name in registry.names("task") for field in dataclasses.fields(task_class(name))]
    return ["task", *keys]


def split_task(settings: Mapping[str, Any]) -> tuple[Task | None, dict[str, Any]]:
    """Split the task from the settings of a run, and add the settings that it implies for model and training."""
    keys = task_keys()
    rest = {key: value for key, value in settings.items() if key not in keys}
    given = {key: value for key, value in settings.items() if key in keys and key != "task"}
    name = settings.get("task", TEXT)
    known = [TEXT, *registry.names("task")]
    if name not in known:
        raise ContextReadyError(f"task={shown(name)} is unknown; {nearest(str(name), known)}")
    if name == TEXT:
        if given:
            key = next(iter(given))
            owner = next(c for c in map(task_class, registry.names("task")) if key in c.__dataclass_fields__)
            raise ContextReadyError(
                f"{key}={given[key]} is a setting of {owner.title} ({owner.command}); leave {key} out."
            )
        return None, rest
    cls = task_class(name)
    is_pretrained = str(rest.get("pretrained", "none")).lower() != "none"
    for key in ("data", "vocab_size", "block_size", *(() if cls.in_words else ("pretrained",))):
        if str(rest.get(key, "none")).lower() != "none":
            raise ContextReadyError(f"{key}={rest[key]} cannot be used with {cls.title}; leave {key} out.")
    task = build_settings(cls, given)
    of_training = {"eval_tokens": SEQUENCES_OF_A_VALIDATION * task.tokens} | rest
    of_training |= {"data": "", "block_size": task.tokens}
    if is_pretrained:
        # A pretrained model has its own vocabulary and window.
        return task, of_training
    return task, {"window": task.window} | of_training | {"vocab_size": task.vocab_size}


def task_as_dict(task: Task) -> dict[str, Any]:
    """Return the task as plain values, for JSON."""
    return {"name": task.name} | dataclasses.asdict(task)


def task_from_dict(saved: Mapping[str, Any]) -> Task:
    """Create a task from the values that `task_as_dict` returns."""
    rest = {key: value for key, value in saved.items() if key != "name"}
    name = saved.get("name", FIRST_TASK)
    if name not in registry.names("task"):
        raise ContextReadyError(f"The task '{shown(name)}' is unknown; {nearest(str(name), registry.names('task'))}")
    return build_settings(task_class(name), rest)
