"""Plots of pointer chasing: accuracy of each level over training (wave), levels solved by depth (staircase)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from contextready.errors import ContextReadyError
from contextready.plotting import pyplot, save_figure
from contextready.runs.metrics import FILE, Record, read_metrics

FORMATS = (".png", ".svg")
OF_LEVELS = ("seconds", "accuracy", "levels_solved", "solved")
"""The keys of a validation record on pointer chasing, besides its step."""


class Wave(NamedTuple):
    """Accuracy of every level over the steps of a run."""

    name: str
    steps_S: np.ndarray
    accuracy_SL: np.ndarray


class Staircase(NamedTuple):
    """Levels solved by number of layers, for one variant of the task; each depth has the values of all its seeds."""

    title: str
    transformers: Mapping[int, Sequence[int]]
    ready: Mapping[int, Sequence[int]]
    allowed: Mapping[int, int]
    """How many levels a transformer of each depth can solve with its receptive field; empty if there is no limit."""


def level_records(run: Path) -> list[Record]:
    """Read the validations of a run on pointer chasing; empty if there are none yet or the run learned text."""
    records = [record for record in read_metrics(run) if "accuracy" in record]
    for record in records:
        for key in OF_LEVELS:
            if key not in record:
                raise ContextReadyError(
                    f"{run / FILE} is damaged: the validation at step {record['step']} has no '{key}'."
                )
    return records


def read_wave(run: Path, name: str | None = None) -> Wave:
    """Read the accuracy of every level from a run's metrics."""
    records = level_records(run)
    if not records:
        raise ContextReadyError(f"The run {run} has no validation on pointer chasing yet.")
    steps_S = np.array([record["step"] for record in records])
    return Wave(name or run.name, steps_S, np.array([record["accuracy"] for record in records]))


def draw_waves(waves: Sequence[Wave], out: Path, chance: float) -> list[Path]:
    """Draw one heat map of levels over steps per wave, stacked on a shared axis, and save it as PNG and SVG."""
    levels = max(wave.accuracy_SL.shape[1] for wave in waves)
    height = 0.9 + len(waves) * (0.55 + 0.16 * levels)
    figure, grid = pyplot().subplots(
        len(waves), 1, figsize=(7.5, height), squeeze=False, sharex=True, layout="constrained"
    )
    image = None
    for axes, wave in zip(grid[:, 0], waves, strict=True):
        # Cells meet halfway between two validations. The first validation, at step 0, has nothing to its left.
        edges_S = np.concatenate((wave.steps_S[:1], (wave.steps_S[1:] + wave.steps_S[:-1]) / 2, wave.steps_S[-1:]))
        rows_L = np.arange(wave.accuracy_SL.shape[1] + 1) - 0.5
        image = axes.pcolormesh(edges_S, rows_L, wave.accuracy_SL.T, vmin=chance, vmax=1.0, cmap="viridis")
        axes.set_yticks(range(wave.accuracy_SL.shape[1]))
        axes.set_ylabel("level")
        axes.set_title(wave.name, fontsize=9, loc="left")
    grid[-1, 0].set_xlabel("steps")
    figure.colorbar(image, ax=list(grid[:, 0]), label="accuracy", fraction=0.05)
    return _save(figure, out)


def draw_staircases(stairs: Sequence[Staircase], levels: int, out: Path) -> list[Path]:
    """Draw staircases side by side (seeds as dots, a line through the medians, the limit) and save PNG and SVG."""
    figure, grid = pyplot().subplots(
        1, len(stairs), figsize=(1 + 4.2 * len(stairs), 3.9), squeeze=False, sharey=True, layout="constrained"
    )
    for axes, stair in zip(grid[0], stairs, strict=True):
        if stair.allowed:
            depths, allowed = list(stair.allowed), list(stair.allowed.values())
            axes.step(depths, allowed, where="mid", color="0.6", linestyle="--", label="limit of the receptive field")
        for by_depth, colour, style, name in (
            (stair.transformers, "C0", {"linewidth": 1.6}, "transformer"),
            (stair.ready, "C3", {"marker": "*", "markersize": 15, "linestyle": "none"}, "context-ready, BPTT"),
        ):
            if by_depth:
                axes.plot(
                    list(by_depth), [float(np.median(by_depth[d])) for d in by_depth], color=colour, label=name, **style
                )
            for depth, solved in by_depth.items():
                # Seeds with equal results would hide one another.
                beside = 0.07 * (np.arange(len(solved)) - (len(solved) - 1) / 2)
                axes.plot(depth + beside, solved, ".", color=colour, markersize=6, alpha=0.7)
        axes.axhline(levels, color="0.85", linewidth=0.8, zorder=0)
        axes.set_ylim(-0.2, levels + 0.4)
        axes.set_yticks(range(levels + 1))
        axes.set_xticks(sorted({*stair.transformers, *stair.ready}))
        axes.set_xlabel("layers")
        axes.set_title(stair.title, fontsize=10)
    grid[0, 0].set_ylabel(f"levels solved, of {levels}")
    grid[0, 0].legend(frameon=False, fontsize=8, loc="lower right")
    return _save(figure, out)


def _save(figure: Any, out: Path) -> list[Path]:
    written = [out.with_suffix(extension) for extension in FORMATS]
    save_figure(figure, *written)
    return written
