"""What higher rooms add to lower ones: kinds of models and of tasks, each imported when a run first needs it.

The package's `__init__` says what there is, so that no lower room has to know a higher one.
"""

from importlib import import_module
from typing import Any

_MODULES: dict[str, dict[str, str]] = {}


def register(kind: str, name: str, module: str) -> None:
    """Say which module provides something of this kind under this name."""
    _MODULES.setdefault(kind, {})[name] = module


def provider(kind: str, name: str) -> Any:
    """The module that provides it."""
    return import_module(_MODULES[kind][name])


def names(kind: str) -> list[str]:
    """All names of a kind."""
    return list(_MODULES.get(kind, {}))
