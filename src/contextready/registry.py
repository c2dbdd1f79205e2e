"""Models and tasks that higher-level packages provide to lower-level ones, imported when a run first needs them.

The package's `__init__` registers them, so that no lower-level package has to import a higher-level one.
"""

from importlib import import_module
from typing import Any

_MODULES: dict[str, dict[str, str]] = {}


def register(kind: str, name: str, module: str) -> None:
    """Register the module that provides something of this kind under this name."""
    _MODULES.setdefault(kind, {})[name] = module


def provider(kind: str, name: str) -> Any:
    """Import and return the module that provides it."""
    return import_module(_MODULES[kind][name])


def names(kind: str) -> list[str]:
    """Return all registered names of a kind."""
    return list(_MODULES.get(kind, {}))
