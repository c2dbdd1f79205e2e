"""The task of a run that learns something else than text: its settings, and what follows from them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from contextready.data.pointer import PointerTask
from contextready.errors import ContextReadyError
from contextready.settings import build_settings, nearest

TASKS = ("text", "pointer")
POINTER_KEYS = [field.name for field in dataclasses.fields(PointerTask)]
TASK_KEYS = ["task", *POINTER_KEYS]
WATCHED_ON = 500
"""Fresh sequences of a validation, unless eval_tokens says otherwise."""


def split_task(settings: Mapping[str, Any]) -> tuple[PointerTask | None, dict[str, Any]]:
    """Take the task out of the settings of a run, and put in what it decides about model and training."""
    rest = {key: value for key, value in settings.items() if key not in TASK_KEYS}
    name = settings.get("task", "text")
    if name not in TASKS:
        raise ContextReadyError(f"task={name} is unknown; {nearest(str(name), TASKS)}")
    given = {key: settings[key] for key in POINTER_KEYS if key in settings}
    if name == "text":
        if given:
            key = next(iter(given))
            raise ContextReadyError(f"{key}={given[key]} is of pointer chasing (crt pointer); leave {key} out.")
        return None, rest
    for key in ("data", "vocab_size", "block_size", "pretrained"):
        if str(rest.get(key, "none")).lower() != "none":
            raise ContextReadyError(f"{key}={rest[key]} does not go with pointer chasing; leave {key} out.")
    task = build_settings(PointerTask, given)
    follows = {"data": "", "vocab_size": task.vocab_size, "block_size": task.length}
    return task, {"window": task.window, "eval_tokens": WATCHED_ON * task.length} | rest | follows
