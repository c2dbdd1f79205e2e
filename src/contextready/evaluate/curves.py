"""Learning curves of runs: read, compared, drawn."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from contextready.errors import ContextReadyError
from contextready.plotting import check_picture, pyplot, save_figure
from contextready.runs.metrics import read_metrics

AXES = {
    "tokens": "training tokens",
    "steps": "steps",
    "macs": "multiply-accumulates spent on training",
    "seconds": "seconds of training",
}


@dataclass(frozen=True)
class Curve:
    """Validation loss of one run against something that grows."""

    name: str
    x: np.ndarray
    loss: np.ndarray

    def at(self, x: float) -> float:
        """Loss at a point between two validations, interpolated."""
        return float(np.interp(x, self.x, self.loss))


@dataclass(frozen=True)
class Crossover:
    """Where one curve passes below another for good."""

    below: str
    above: str
    x: float
    loss: float


def read_curve(run: Path, axis: str = "tokens", name: str | None = None) -> Curve:
    """The validation curve of a run, named as its folder unless told otherwise."""
    if axis not in AXES:
        raise ContextReadyError(f"There is no axis '{axis}'; choose one of: {', '.join(AXES)}.")
    key = "step" if axis == "steps" else axis
    records = [r for r in read_metrics(run) if r.get("val_loss") is not None]
    if len(records) < 2:
        raise ContextReadyError(f"The run {run} has been validated less than twice, so there is no curve yet.")
    x = np.array([r[key] for r in records], float)
    return Curve(name or run.name, x, np.array([r["val_loss"] for r in records]))


def crossover(one: Curve, other: Curve) -> Crossover | None:
    """The last point where the curves change places, on the stretch both cover; none if they never do."""
    # Untrained models are all at log V, and which is a hair lower says nothing: x = 0 is left out.
    begin, end = max(curve.x[curve.x > 0][0] for curve in (one, other)), min(one.x[-1], other.x[-1])
    grid = np.unique(np.concatenate((one.x, other.x)))
    grid = grid[(grid >= begin) & (grid <= end)]
    difference = np.interp(grid, one.x, one.loss) - np.interp(grid, other.x, other.loss)
    grid, difference = grid[difference != 0], difference[difference != 0]
    signs = np.sign(difference)
    changes = [i for i in range(1, len(grid)) if signs[i] != signs[i - 1]]
    if not changes:
        return None
    i = changes[-1]
    part = difference[i - 1] / (difference[i - 1] - difference[i])
    x = float(grid[i - 1] + part * (grid[i] - grid[i - 1]))
    below, above = (one, other) if signs[i] < 0 else (other, one)
    return Crossover(below.name, above.name, x, below.at(x))


MOST_LABELS = 4
"""More crossovers than this are marked without words, which would lie on top of each other."""


def crossovers(curves: Sequence[Curve]) -> list[Crossover]:
    """Of every pair."""
    pairs = ((one, other) for i, one in enumerate(curves) for other in curves[i + 1 :])
    return [cross for pair in pairs if (cross := crossover(*pair)) is not None]


def draw(curves: Sequence[Curve], out: Path, axis: str = "tokens", title: str | None = None) -> list[Crossover]:
    """Draw perplexity against the axis into a PNG or SVG, crossovers marked; returns them."""
    check_picture(out)
    figure, axes = pyplot().subplots(figsize=(7.5, 4.8), layout="constrained")
    for curve in curves:
        axes.plot(curve.x, np.exp(curve.loss), marker=".", markersize=4, linewidth=1.6, label=curve.name)
    crossings = crossovers(curves)
    for cross in crossings:
        axes.plot(cross.x, np.exp(cross.loss), "o", markersize=9, fillstyle="none", color="black")
        if len(crossings) <= MOST_LABELS:
            axes.annotate(
                f"{cross.below} passes\n{cross.above}\nat {short(cross.x)}",
                (cross.x, np.exp(cross.loss)),
                xytext=(10, 22),
                textcoords="offset points",
                fontsize=7.5,
                arrowprops={"arrowstyle": "-", "linewidth": 0.5},
            )
    # The first validations are near the size of the vocabulary and would flatten everything else.
    shown = np.exp(np.concatenate([curve.loss for curve in curves]))
    later = np.exp(np.concatenate([curve.loss[curve.x >= 0.1 * curve.x[-1]] for curve in curves]))
    axes.set_yscale("log")
    axes.set_ylim(shown.min() * 0.95, later.max() * 1.1)
    ticks = _ticks(shown.min(), later.max())
    axes.set_yticks(ticks, [f"{t:g}" for t in ticks])
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(lambda x, _: f"{short(x)}".replace(".00", ""))
    axes.set_xlabel(AXES[axis])
    axes.set_ylabel("validation perplexity")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    if title:
        axes.set_title(title, fontsize=10)
    save_figure(figure, out)
    return crossings


def _ticks(low: float, high: float) -> list[float]:
    steps = [m * 10.0**e for e in range(-1, 7) for m in (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)]
    inside = [t for t in steps if low * 0.95 <= t <= high * 1.1]
    return inside[:: max(1, len(inside) // 8)]


def short(x: float) -> str:
    """2130000 as 2.13M."""
    for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if x >= size:
            return f"{x / size:.2f}{unit}"
    return f"{x:.0f}"
