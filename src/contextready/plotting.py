"""Plots with matplotlib: setup without a display, checks of file names, and saving."""

from pathlib import Path
from typing import Any

from contextready.errors import ContextReadyError
from contextready.extras import require

ENDINGS = (".png", ".svg", ".pdf")


def pyplot() -> Any:
    """Import matplotlib.pyplot for drawing into files, or raise an error that says how to install it."""
    require("matplotlib", "plot").use("Agg")
    return require("matplotlib.pyplot", "plot")


def check_picture(path: Path) -> None:
    """Raise an error if the file extension is not one that plots can be saved as."""
    if path.suffix.lower() not in ENDINGS:
        raise ContextReadyError(
            f"A plot cannot be saved as {path}; choose a file name that ends in .png, .svg or .pdf."
        )


def save_figure(figure: Any, *paths: Path) -> None:
    """Save a figure to each of these paths, then close it."""
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    pyplot().close(figure)
