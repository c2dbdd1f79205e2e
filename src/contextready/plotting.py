"""Pictures with matplotlib: set up without a screen, checked by their ending, saved and closed."""

from pathlib import Path
from typing import Any

from contextready.errors import ContextReadyError
from contextready.extras import require

ENDINGS = (".png", ".svg", ".pdf")


def pyplot() -> Any:
    """The module matplotlib.pyplot, drawing into files; says how to install it where it is missing."""
    require("matplotlib", "plot").use("Agg")
    return require("matplotlib.pyplot", "plot")


def check_picture(path: Path) -> None:
    """Refuse a name whose ending does not say how to draw."""
    if path.suffix.lower() not in ENDINGS:
        raise ContextReadyError(
            f"{path} has no ending that says how to draw; give a name ending in .png, .svg or .pdf."
        )


def save_figure(figure: Any, *paths: Path) -> None:
    """Write a figure under each of these names, and free it."""
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    pyplot().close(figure)
