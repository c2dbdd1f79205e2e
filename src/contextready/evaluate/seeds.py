"""Runs that differ only in their seed: their mean curve, and paired differences between two configurations."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from contextready.errors import ContextReadyError
from contextready.evaluate.curves import Curve, finish, on_common_grid, read_curve
from contextready.evaluate.names import common_name, short_names
from contextready.plotting import check_picture, pyplot
from contextready.runs.config import RunConfig
from contextready.runs.records import read_settings

LONGEST_CHAIN = 100
"""How many runs, each of which started from the next, are followed."""


@dataclass(frozen=True)
class Group:
    """Runs of one configuration, by seed. The seed is None if a run's configuration cannot be read."""

    name: str
    runs: dict[int | None, Path]


@dataclass(frozen=True)
class Difference:
    """Loss of one configuration minus the loss of another, for every seed that both were trained with."""

    first: str
    second: str
    x: np.ndarray
    seeds: list[int | None]
    loss_SX: np.ndarray
    """One row per seed, one column per training position."""
    unpaired: list[Path]
    """Runs that were left out because the other configuration has no run with their seed."""


def group_runs(runs: Sequence[Path]) -> list[Group]:
    """Group the runs whose configurations are the same except for the seed, in the order in which they are given.

    Runs that share the seed too are repetitions, not seeds of one experiment, so each of them is a group by itself.
    """
    short = dict(zip(runs, short_names(runs), strict=True))
    members: dict[str, list[tuple[int | None, Path]]] = {}
    for run in runs:
        identity, seed = _identity(run)
        members.setdefault(identity, []).append((seed, run))
    groups: list[dict[int | None, Path]] = []
    for same in members.values():
        by_seed = dict(same)
        groups += [by_seed] if len(by_seed) == len(same) else [{seed: run} for seed, run in same]
    all_names = [[short[run] for run in group.values()] for group in groups]
    common = [common_name(names) for names in all_names]
    return [
        Group(name if common.count(name) == 1 else ", ".join(names), group)
        for group, names, name in zip(groups, all_names, common, strict=True)
    ]


def mean_curve(group: Group, axis: str = "tokens") -> Curve:
    """The mean curve of a group with a band over its seeds, or the curve of its only run."""
    curves = [read_curve(run, axis, group.name) for run in group.runs.values()]
    if len(curves) == 1:
        return curves[0]
    x, loss_SX = _losses(curves)
    low, high = band(loss_SX)
    return Curve(group.name, x, loss_SX.mean(axis=0), low, high, seeds=len(curves))


def band(values_SX: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The band over seeds: minimum and maximum of two, mean ± standard deviation of three or more."""
    if len(values_SX) == 2:
        return values_SX.min(axis=0), values_SX.max(axis=0)
    mean, deviation = values_SX.mean(axis=0), values_SX.std(axis=0, ddof=1)
    return mean - deviation, mean + deviation


def difference(first: Group, second: Group, axis: str = "tokens") -> Difference:
    """Loss of `first` minus loss of `second`, paired by seed, at every training position that all runs cover."""
    seeds = [seed for seed in first.runs if seed in second.runs]
    if not seeds:
        raise ContextReadyError(
            f"{first.name} and {second.name} have no seed in common, so their runs cannot be paired; train both with "
            "the same seed=."
        )
    pairs = [read_curve(group.runs[seed], axis) for group in (first, second) for seed in seeds]
    x, losses = _losses(pairs)
    unpaired = [run for group in (first, second) for seed, run in group.runs.items() if seed not in seeds]
    return Difference(first.name, second.name, x, seeds, losses[: len(seeds)] - losses[len(seeds) :], unpaired)


def draw_difference(found: Difference, out: Path, axis: str = "tokens", title: str | None = None) -> None:
    """Plot the mean difference with a band over seeds, every seed as a thin line, and a line at zero."""
    check_picture(out)
    figure, axes = pyplot().subplots(figsize=(7.5, 4.8), layout="constrained")
    axes.axhline(0, color="black", linewidth=1)
    count, x, mean = len(found.seeds), found.x, found.loss_SX.mean(axis=0)
    axes.plot(x, mean, linewidth=2.4, color="C0", label="mean" if count > 1 else "difference of two runs")
    if count > 1:
        what = "minimum to maximum" if count == 2 else "± standard deviation"
        axes.fill_between(
            x, *band(found.loss_SX), color="C0", alpha=0.18, linewidth=0, label=f"{what} of {count} seeds"
        )
        for i, seed in enumerate(found.seeds):
            axes.plot(x, found.loss_SX[i], linewidth=0.9, color=f"C{i + 1}", label=f"seed {seed}")
    # Differences of barely trained models can be so large that the rest would look flat.
    later_SX, limits = found.loss_SX[:, x >= 0.1 * x[-1]], found.loss_SX
    if np.abs(limits).max() > 3 * np.abs(later_SX).max() > 0:
        limits = later_SX
    low, high = min(0.0, limits.min()), max(0.0, limits.max())
    margin = 0.25 * (high - low) or 1.0
    axes.set_ylim(low - margin, high + margin)
    axes.ticklabel_format(axis="y", style="plain", useOffset=False)
    axes.set_ylabel("difference in validation loss (nats per token)")
    for height, alignment, text in (
        (0.97, "top", f"above zero: {found.second} has the lower loss"),
        (0.03, "bottom", f"below zero: {found.first} has the lower loss"),
    ):
        axes.text(0.02, height, text, transform=axes.transAxes, verticalalignment=alignment, fontsize=9, color="0.35")
    # Differences change sign again and again, so no corner is free for the legend.
    figure.legend(frameon=False, loc="outside lower center", ncols=min(5, count + 2), fontsize=9)
    finish(figure, axes, axis, title or f"Validation loss of {found.first} minus {found.second}", out)


def _losses(curves: Sequence[Curve]) -> tuple[np.ndarray, np.ndarray]:
    grid, losses = on_common_grid(curves)
    if not len(grid):
        raise ContextReadyError("The runs have no training position in common, so they cannot be averaged or compared.")
    return grid, losses


def _identity(run: Path, chain: int = LONGEST_CHAIN) -> tuple[str, int | None]:
    """The configuration of a run without its seed and output folder, as comparable text; and the seed."""
    try:
        settings = RunConfig.from_dict(read_settings(run / "config.json")).as_dict()
    except ContextReadyError:
        return str(run), None
    train = settings["train"]
    seed = train.pop("seed")
    del train["out"]
    if train["init_from"] is not None:
        # Seeds may start from runs of their own: what counts is how those were trained, not where they are stored.
        start = Path(train["init_from"])
        is_run = chain > 0 and (start / "config.json").is_file()
        identity = _identity(start, chain - 1)[0] if is_run else "a folder"
        # Text inside of text would grow exponentially, because its quotes are escaped again and again.
        train["init_from"] = hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()
    return json.dumps(settings, sort_keys=True), seed
