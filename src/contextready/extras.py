"""Packages that only some verbs need."""

import importlib
from types import ModuleType

from contextready.errors import ContextReadyError


def require(module: str, extra: str) -> ModuleType:
    """Import a package of an optional extra, or say how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
            raise
        package = module.partition(".")[0]
        raise ContextReadyError(
            f"This needs the package {package}; install it with: pip install 'contextready[{extra}]'."
        ) from None
