"""Learning curves of runs: read them, find where they cross, and plot them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from contextready.errors import ContextReadyError
from contextready.plotting import check_picture, pyplot, save_figure
from contextready.runs.metrics import FILE, read_metrics

AXES = {
    "tokens": "training tokens",
    "steps": "training steps",
    "macs": "multiply-accumulates spent on training",
    "seconds": "seconds of training",
}
LARGEST_LOSS = 700.0
MAX_LABELS = 4
"""If there are more crossovers than this, they are marked without text, because the labels would overlap."""


@dataclass(frozen=True)
class Curve:
    """Validation loss of one run, or the mean over several seeds, at increasing training positions."""

    name: str
    x: np.ndarray
    loss: np.ndarray
    low: np.ndarray | None = None
    """Lower edge of the band over seeds; None for a single run."""
    high: np.ndarray | None = None
    """Upper edge of the band over seeds."""
    seeds: int = 1

    def at(self, x: float) -> float:
        """Loss at x, interpolated between the two nearest validations."""
        return float(np.interp(x, self.x, self.loss))


@dataclass(frozen=True)
class Crossover:
    """The point after which one curve stays below another."""

    below: str
    above: str
    x: float
    loss: float


def read_curve(run: Path, axis: str = "tokens", name: str | None = None) -> Curve:
    """Read the validation curve of a run; its name defaults to the name of its folder."""
    if axis not in AXES:
        raise ContextReadyError(f"Unknown axis '{axis}'; choose one of: {', '.join(AXES)}.")
    key = "step" if axis == "steps" else axis
    records = [r for r in read_metrics(run) if r.get("val_loss") is not None]
    if len(records) < 2:
        raise ContextReadyError(f"The run {run} has fewer than two validations, so it has no curve yet.")
    if not all(key in r for r in records):
        raise ContextReadyError(f"The validations in {run / FILE} do not all have '{key}'; choose another axis.")
    x = np.array([float(r[key]) for r in records])
    # The perplexity of a larger loss is not a finite number.
    loss = np.clip(np.array([float(r["val_loss"]) for r in records]), -LARGEST_LOSS, LARGEST_LOSS)
    return Curve(name or run.name, x, loss)


def on_common_grid(curves: Sequence[Curve], begin: float = -np.inf) -> tuple[np.ndarray, np.ndarray]:
    """Every training position in the range that all curves cover, and the losses there: (X,) and (curves, X).

    A curve that was not validated at a position is interpolated.
    """
    begin = max(begin, *(curve.x[0] for curve in curves))
    end = min(curve.x[-1] for curve in curves)
    grid = np.unique(np.concatenate([curve.x for curve in curves]))
    grid = grid[(grid >= begin) & (grid <= end)]
    return grid, np.stack([np.interp(grid, curve.x, curve.loss) for curve in curves])


def crossover(one: Curve, other: Curve) -> Crossover | None:
    """The last point where two curves change places, within the range that both cover; None if they never do."""
    # Untrained models all have a loss near log V, and their order means nothing, so x = 0 is ignored.
    if not all((curve.x > 0).any() for curve in (one, other)):
        return None
    begin = max(curve.x[curve.x > 0][0] for curve in (one, other))
    grid, losses = on_common_grid([one, other], begin)
    difference = losses[0] - losses[1]
    grid, difference = grid[difference != 0], difference[difference != 0]
    signs = np.sign(difference)
    changes = [i for i in range(1, len(grid)) if signs[i] != signs[i - 1]]
    if not changes:
        return None
    i = changes[-1]
    fraction = difference[i - 1] / (difference[i - 1] - difference[i])
    x = float(grid[i - 1] + fraction * (grid[i] - grid[i - 1]))
    below, above = (one, other) if signs[i] < 0 else (other, one)
    return Crossover(below.name, above.name, x, below.at(x))


def crossovers(curves: Sequence[Curve]) -> list[Crossover]:
    """The crossover of every pair of curves that has one."""
    pairs = ((one, other) for i, one in enumerate(curves) for other in curves[i + 1 :])
    return [cross for pair in pairs if (cross := crossover(*pair)) is not None]


def draw(curves: Sequence[Curve], out: Path, axis: str = "tokens", title: str | None = None) -> list[Crossover]:
    """Plot perplexity against the axis, save the figure, and return the crossovers that it marks."""
    check_picture(out)
    figure, axes = pyplot().subplots(figsize=(7.5, 4.8), layout="constrained")
    crossings = _plot(axes, curves)
    finish(figure, axes, axis, title, out)
    return crossings


def draw_side_by_side(panels: Mapping[str, tuple[str, Sequence[Curve]]], out: Path) -> None:
    """Plot perplexity in several panels and save the figure; a panel has a title, an axis and curves."""
    check_picture(out)
    figure, row = pyplot().subplots(
        1, len(panels), figsize=(5.5 * len(panels), 4.4), layout="constrained", squeeze=False
    )
    for axes, (title, (axis, curves)) in zip(row[0], panels.items(), strict=True):
        _plot(axes, curves)
        label(axes, axis, title)
    save_figure(figure, out)


def _plot(axes: Any, curves: Sequence[Curve]) -> list[Crossover]:
    """Plot the curves, and mark and return their crossovers."""
    for curve in curves:
        (line,) = axes.plot(
            curve.x, np.exp(curve.loss), marker=".", markersize=4, linewidth=1.6, label=_legend_entry(curve)
        )
        if curve.low is not None and curve.high is not None:
            axes.fill_between(
                curve.x, np.exp(curve.low), np.exp(curve.high), color=line.get_color(), alpha=0.2, linewidth=0
            )
    crossings = crossovers(curves)
    middle = 0.5 * max(curve.x[-1] for curve in curves)
    for cross in crossings:
        axes.plot(cross.x, np.exp(cross.loss), "o", markersize=9, fillstyle="none", color="black")
        if len(crossings) <= MAX_LABELS:
            axes.annotate(
                f"{cross.below} overtakes\n{cross.above}\nat {short(cross.x)}",
                (cross.x, np.exp(cross.loss)),
                xytext=(10, 22) if cross.x < middle else (-10, 22),
                horizontalalignment="left" if cross.x < middle else "right",
                textcoords="offset points",
                fontsize=7.5,
                arrowprops={"arrowstyle": "-", "linewidth": 0.5},
            )
    # The first validations are close to the vocabulary size and would flatten everything else.
    edges = [edge for curve in curves for edge in (curve.loss, curve.low) if edge is not None]
    lowest = np.exp(min(edge.min() for edge in edges))
    highest = np.exp(max(curve.loss[curve.x >= 0.1 * curve.x[-1]].max() for curve in curves))
    axes.set_yscale("log")
    axes.set_ylim(lowest * (lowest / highest) ** 0.05, highest * (highest / lowest) ** 0.1)
    ticks = _ticks(*axes.get_ylim())
    axes.set_yticks(ticks, [f"{t:g}" for t in ticks])
    axes.minorticks_off()
    axes.set_ylabel("validation perplexity")
    axes.legend(frameon=False)
    return crossings


def finish(figure: Any, axes: Any, axis: str, title: str | None, out: Path) -> None:
    """Add what all plots of runs share, then save the figure."""
    label(axes, axis, title)
    save_figure(figure, out)


def label(axes: Any, axis: str, title: str | None) -> None:
    """Add the horizontal axis, a grid and the title."""
    axes.xaxis.set_major_formatter(lambda x, _: f"{short(x)}".replace(".00", ""))
    axes.set_xlabel(AXES[axis])
    axes.grid(alpha=0.25)
    if title:
        axes.set_title(title, fontsize=10)


def band_name(seeds: int) -> str:
    """What the band around the mean of this many seeds shows."""
    return "min–max" if seeds == 2 else "± standard deviation"


def _legend_entry(curve: Curve) -> str:
    return curve.name if curve.seeds == 1 else f"{curve.name} (mean of {curve.seeds} seeds, {band_name(curve.seeds)})"


def _ticks(low: float, high: float) -> list[float]:
    """About eight round numbers between the two for a logarithmic axis."""
    steps = [m * 10.0**e for e in range(-1, 7) for m in (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)]
    inside = [t for t in steps if low <= t <= high]
    if len(inside) >= 3:
        return inside[:: max(1, len(inside) // 8)]
    step = 10.0 ** np.floor(np.log10(high - low))
    step *= next(m for m in (0.1, 0.2, 0.5, 1.0, 2.0) if (high - low) / (m * step) <= 8)
    return [round(float(t), 10) for t in np.arange(np.ceil(low / step), np.floor(high / step) + 1) * step]


def short(x: float) -> str:
    """Write 2130000 as 2.13M."""
    for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if x >= size:
            return f"{x / size:.2f}{unit}"
    return f"{x:.0f}"
