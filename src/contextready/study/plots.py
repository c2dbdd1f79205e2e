"""The plots of the study: learning curves against training compute and against tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from contextready.evaluate.curves import AXES, short
from contextready.evaluate.seeds import band
from contextready.plotting import pyplot, save_figure
from contextready.study.results import Record
from contextready.study.tables import Runs, shapes_with_pairs

FROM = 0.15
"""The first part of the training is not shown, because it would flatten the rest."""


def draw_compute(records: Sequence[Record], *paths: Path) -> None:
    """Draw one column per shape: the loss of both models against tokens, compute and time, with bands over seeds.

    Time is left out if it was not measured.
    """
    shapes = shapes_with_pairs(records)
    timed = all(Runs(records, f"{kind}{shape.key}").timed for shape in shapes for kind in "dn")
    rows = ("macs", "tokens", "seconds") if timed else ("macs", "tokens")
    figure, grid = pyplot().subplots(
        len(rows),
        len(shapes),
        figsize=(1 + 3.1 * len(shapes), 3 * len(rows)),
        squeeze=False,
        layout="constrained",
        sharey="col",
    )
    for column, shape in enumerate(shapes):
        pair = {
            f"N={shape.layers} + FFN": Runs(records, f"n{shape.key}"),
            f"D={shape.layers} context-ready": Runs(records, f"d{shape.key}"),
        }
        for row, axis in enumerate(rows):
            axes = grid[row][column]
            for name, runs in pair.items():
                _curve(axes, name, runs, axis)
            end = min(runs.end(seed, axis) for runs in pair.values() for seed in runs.by_seed)
            axes.set_xlim(FROM * end, end)
            low, high = _limits(pair.values(), axis, FROM * end, end)
            axes.set_ylim(low, high)
            axes.xaxis.set_major_formatter(lambda x, _: short(x).replace(".00", ""))
            axes.set_xlabel(AXES[axis], fontsize=8)
            axes.tick_params(labelsize=8)
            axes.grid(alpha=0.25)
        grid[0][column].set_title(f"D={shape.layers}, C={shape.width}", fontsize=10)
        grid[0][column].legend(frameon=False, fontsize=8)
    for row in grid:
        row[0].set_ylabel("validation perplexity", fontsize=9)
    save_figure(figure, *paths)


def _curve(axes: Any, name: str, runs: Runs, axis: str) -> None:
    curves = [record["curve"] for record in runs.by_seed.values()]
    end = min(curve[axis][-1] for curve in curves)
    x = np.array(sorted({*(value for value in curves[0][axis] if value <= end), end}))
    loss_SX = np.stack([np.interp(x, curve[axis], curve["val_loss"]) for curve in curves])
    (line,) = axes.plot(x, np.exp(loss_SX.mean(axis=0)), linewidth=1.6, label=name)
    if len(curves) > 1:
        low, high = band(loss_SX)
        axes.fill_between(x, np.exp(low), np.exp(high), color=line.get_color(), alpha=0.25, linewidth=0)


def _limits(pair: Any, axis: str, begin: float, end: float) -> tuple[float, float]:
    losses = [
        runs.loss_at(seed, axis, x) for runs in pair for seed in runs.by_seed for x in np.linspace(begin, end, 20)
    ]
    return float(np.exp(min(losses))) * 0.97, float(np.exp(max(losses))) * 1.03
