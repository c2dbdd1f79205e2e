"""The settings of the author's own runs, which `authors=true` applies to a recipe of the paper.

They come from his public notebooks; the paper does not state them. What differs from one experiment to another is in
the recipes themselves, under `authors`. `docs/paper-notes.md` lists all of it.
"""

from collections.abc import Mapping
from typing import Any

from contextready.errors import ContextReadyError
from contextready.formats.limits import shown

SWITCH = "authors"
"""The word on the command line, and the name of the section in a recipe."""
FOLDER = "runs/authors/"
"""Where such runs are, so that they do not mix with runs that have our defaults."""
AUTHORS = {
    **{"init": "torch", "bias": True, "head_bias": True, "rope": "integer", "dropout_at": "embedding"},
    **{"weight_decay": 0.01, "decay": "all", "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "clip": 1.0},
    **{"warmup": 0, "schedule": "constant", "convergence_weight": 0.1},
}
"""What all his runs on text have in common. Their dropout also applies to the attention weights."""


def authors_settings(shape: Mapping[str, Any], is_text: bool) -> dict[str, Any]:
    """Return what all his runs have in common, for a model of this shape; other tasks have their own sections only."""
    return AUTHORS | {"attention_dropout": shape["dropout"]} if is_text else {}


def is_on(value: str) -> bool:
    """Return the value of the switch."""
    if value.lower() not in ("true", "false"):
        raise ContextReadyError(f"{SWITCH} must be true or false, but got {shown(value)}.")
    return value.lower() == "true"


def in_folder(path: str) -> str:
    """Return where a run of the recipes is if it has the author's settings."""
    return FOLDER + path.removeprefix("runs/")


def train_command(origin: str, names: list[str]) -> str | None:
    """Return the command that trains the run in this folder, if it is one of the recipes."""
    name = origin.removeprefix(FOLDER).removeprefix("runs/")
    if name not in names:
        return None
    return f"crt train {name} {SWITCH}=true" if origin.startswith(FOLDER) else f"crt train {name}"
