"""Optional packages: imported where they are used, with a hint that can be followed when one is missing."""

import importlib
import importlib.metadata
import re
import shlex
from types import ModuleType

from contextready.errors import ContextReadyError


def require(module: str, extra: str) -> ModuleType:
    """Import a package that belongs to an optional extra, or say how to install it if it is missing or too old."""
    # Checked before the import, because a package that is too old may fail in other ways.
    _check_version(module.partition(".")[0], extra)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
            raise
        package = module.partition(".")[0]
        raise ContextReadyError(
            f"The package {package} is not installed; install it with: {install_command(extra)}"
        ) from None


def install_command(extra: str) -> str:
    """The pip command that installs an extra's packages by name, so that it works wherever this package came from."""
    return f"pip install {' '.join(map(shlex.quote, _packages(extra)))}"


def _check_version(package: str, extra: str) -> None:
    """Raise if the installed version of a package is lower than the extra allows."""
    try:
        installed, requirements = importlib.metadata.version(package), _packages(extra)
    except importlib.metadata.PackageNotFoundError:
        return
    for requirement in requirements:
        name, _, lowest = requirement.partition(">=")
        if name.replace("-", "_") == package and [] < _release(installed) < _release(lowest):
            raise ContextReadyError(
                f"{package} {installed} is too old; version {lowest} or newer is needed. Install it with: "
                f"{install_command(extra)}"
            )


def _release(version: str) -> list[int]:
    """The numbers of a version, without pre-release and build: 5.21.0rc1 → [5, 21, 0]; empty if it has none."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return [int(number) for number in numbers[0].split(".")] if numbers is not None else []


def _packages(extra: str) -> list[str]:
    """Requirements of an extra, as the installed package's metadata lists them; extras may include others."""
    packages: list[str] = []
    for line in importlib.metadata.requires("contextready") or []:
        requirement, _, marker = line.partition(";")
        if not re.search(rf"""extra\s*==\s*['"]{extra}['"]""", marker):
            continue
        inner = re.fullmatch(r"contextready\[(.+)\]", requirement.strip())
        packages += [requirement.strip()] if inner is None else [p for e in inner[1].split(",") for p in _packages(e)]
    return list(dict.fromkeys(packages))
