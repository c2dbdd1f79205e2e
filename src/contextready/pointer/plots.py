"""The pictures of pointer chasing: the wave of levels being learned, and the staircase of levels against depth."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from contextready.errors import ContextReadyError
from contextready.plotting import pyplot, save_figure
from contextready.runs.metrics import FILE, Record, read_metrics

FORMATS = (".png", ".svg")
OF_LEVELS = ("seconds", "accuracy", "levels_solved", "solved")
"""What a validation on pointer chasing says, besides its step."""


class Wave(NamedTuple):
    """Accuracy of every level over a run."""

    name: str
    steps_S: np.ndarray
    accuracy_SL: np.ndarray


class Staircase(NamedTuple):
    """Levels solved against layers, in one reading of the task: the values of all seeds at each depth."""

    title: str
    transformers: Mapping[int, Sequence[int]]
    ready: Mapping[int, Sequence[int]]
    allowed: Mapping[int, int]
    """How many levels the receptive field lets a transformer of each depth solve; empty where that says nothing."""


def level_records(run: Path) -> list[Record]:
    """The validations of a run on pointer chasing; none if it has none yet, or learned text."""
    records = [record for record in read_metrics(run) if "accuracy" in record]
    for record in records:
        for key in OF_LEVELS:
            if key not in record:
                raise ContextReadyError(
                    f"{run / FILE}: the validation at step {record['step']} lacks {key}; the file is damaged."
                )
    return records


def read_wave(run: Path, name: str | None = None) -> Wave:
    """What a run's metrics say of its levels."""
    records = level_records(run)
    if not records:
        raise ContextReadyError(f"The run {run} has no accuracy of levels: it has learned no pointer chasing yet.")
    steps_S = np.array([record["step"] for record in records])
    return Wave(name or run.name, steps_S, np.array([record["accuracy"] for record in records]))


def draw_waves(waves: Sequence[Wave], out: Path, chance: float) -> list[Path]:
    """Levels against steps as heat maps on one scale of steps, one below the other; writes a PNG and an SVG."""
    levels = max(wave.accuracy_SL.shape[1] for wave in waves)
    height = 0.9 + len(waves) * (0.55 + 0.16 * levels)
    figure, grid = pyplot().subplots(
        len(waves), 1, figsize=(7.5, height), squeeze=False, sharex=True, layout="constrained"
    )
    image = None
    for axes, wave in zip(grid[:, 0], waves, strict=True):
        # A cell ends where the next validation was; the first, at step 0, has no width to its left.
        edges_S = np.concatenate((wave.steps_S[:1], (wave.steps_S[1:] + wave.steps_S[:-1]) / 2, wave.steps_S[-1:]))
        rows_L = np.arange(wave.accuracy_SL.shape[1] + 1) - 0.5
        image = axes.pcolormesh(edges_S, rows_L, wave.accuracy_SL.T, vmin=chance, vmax=1.0, cmap="viridis")
        axes.set_yticks(range(wave.accuracy_SL.shape[1]))
        axes.set_ylabel("level")
        axes.set_title(wave.name, fontsize=9, loc="left")
    grid[-1, 0].set_xlabel("steps")
    figure.colorbar(image, ax=list(grid[:, 0]), label="accuracy", fraction=0.05)
    return _saved(figure, out)


def draw_staircases(stairs: Sequence[Staircase], levels: int, out: Path) -> list[Path]:
    """Side by side: every seed as a dot, a line through the medians, and what the window allows; PNG and SVG."""
    figure, grid = pyplot().subplots(
        1, len(stairs), figsize=(1 + 4.2 * len(stairs), 3.9), squeeze=False, sharey=True, layout="constrained"
    )
    for axes, stair in zip(grid[0], stairs, strict=True):
        if stair.allowed:
            depths, allowed = list(stair.allowed), list(stair.allowed.values())
            axes.step(depths, allowed, where="mid", color="0.6", linestyle="--", label="the receptive field allows")
        for by_depth, colour, style, name in (
            (stair.transformers, "C0", {"linewidth": 1.6}, "transformer"),
            (stair.ready, "C3", {"marker": "*", "markersize": 15, "linestyle": "none"}, "context-ready, BPTT"),
        ):
            if by_depth:
                axes.plot(
                    list(by_depth), [float(np.median(by_depth[d])) for d in by_depth], color=colour, label=name, **style
                )
            for depth, solved in by_depth.items():
                # Equal results of several seeds would hide one another.
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
    return _saved(figure, out)


def _saved(figure: Any, out: Path) -> list[Path]:
    written = [out.with_suffix(ending) for ending in FORMATS]
    save_figure(figure, *written)
    return written
