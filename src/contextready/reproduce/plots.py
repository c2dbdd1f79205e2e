"""A picture for every table: the paper's figures on the left, ours on the right, with the spread over seeds."""

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from contextready.paper.tables import table
from contextready.plotting import pyplot, save_figure
from contextready.reproduce.lines import FRACTIONS, MINIATURES, OF_OUR_OWN, Line, Miniature
from contextready.reproduce.measures import Measure, Record, Records
from contextready.reproduce.report import row_name, title

VALUE = {"d1": "best", "k_min": "random"}
"""The column that is drawn, where it is not the perplexity."""
PASSES = (1, 2, 3, 5, 10)
OURS, THEIRS, CONTROL = "C0", "0.35", "C1"
ROW = 0.32
"""Inches of height for a row."""
OUTLIER = 1.5
"""Values that are this many times as large as the median are not drawn to scale."""


def draw_tables(names: Sequence[str], records: Sequence[Record], out: Path) -> list[Path]:
    """Draw every one of these tables of which something has been run, as PNG and SVG; return the PNG files."""
    by_run, written = Records(records), []
    for name in names:
        figure = _draw(name, by_run)
        if figure is not None:
            path = out / f"table-{name}.png"
            save_figure(figure, path, path.with_suffix(".svg"))
            written.append(path)
    return written


def _draw(name: str, records: Records) -> Any | None:
    miniature = MINIATURES[name]
    lines = [line for line in miniature.lines if any(m.of(records) for m in line.measures.values())]
    if not lines:
        return None
    if "k1" in lines[0].measures:
        return _by_passes(name, lines, records)
    if "percent" in lines[0].measures:
        return _differences(name, miniature, lines, records)
    if name == "k_min":
        return _k_min(records)
    if name == "trend":
        return _trend(lines, records)
    return _values(name, miniature, lines, records)


def _values(name: str, miniature: Miniature, lines: Sequence[Line], records: Records) -> Any:
    """One dot for each row: the perplexity of the paper, and ours."""
    figure, (left, right) = _panels(len(lines))
    key = VALUE.get(name, "ppl")
    for y, line in enumerate(lines):
        printed = None if line.row is None else _number(name, line.row, key)
        if printed is not None:
            left.plot(printed, y, "D", color=THEIRS, markersize=5)
        _dot(right, line.measures.get(key), y, records, CONTROL if line.row is None else OURS)
    _label(left, [_paper_label(name, miniature, line) for line in lines], "validation perplexity in the paper")
    _label(right, [line.name for line in lines], "validation perplexity in miniature", on_right=True)
    means = [_mean(line.measures[key], records) if key in line.measures else None for line in lines]
    _without_outliers(right, means)
    return _titled(figure, name)


def _without_outliers(axes: Any, means: Sequence[float | None]) -> None:
    """Write a value that is far above the others at the edge, so that the others can be told apart."""
    present = [value for value in means if value is not None]
    most = OUTLIER * median(present)
    if max(present) <= most:
        return
    inside = [value for value in present if value <= most]
    margin = 0.1 * (max(inside) - min(inside)) or 1.0
    axes.set_xlim(min(inside) - margin, max(inside) + 3 * margin)
    for y, value in enumerate(means):
        if value is not None and value > most:
            axes.text(max(inside) + 2.8 * margin, y, f"{value:.0f} →", ha="right", va="center", fontsize=8)


def _differences(name: str, miniature: Miniature, lines: Sequence[Line], records: Records) -> Any:
    """One dot for each row: how much higher the perplexity of the context-ready model is, in percent."""
    figure, (left, right) = _panels(len(lines))
    for y, line in enumerate(lines):
        if line.row is not None:
            ready, plain = (_number(name, line.row, key) for key in _pair_keys(line))
            if ready is not None and plain is not None:
                left.plot(100.0 * (ready / plain - 1.0), y, "D", color=THEIRS, markersize=5)
        _dot(right, line.measures["percent"], y, records, CONTROL if line.row is None else OURS)
    for axes in (left, right):
        axes.axvline(0.0, color="black", linewidth=0.8)
    _label(left, [_paper_label(name, miniature, line) for line in lines], "difference in PPL in the paper, %")
    _label(right, [line.name for line in lines], "difference in PPL in miniature, %", on_right=True)
    return _titled(figure, name)


def _by_passes(name: str, lines: Sequence[Line], records: Records) -> Any:
    """One curve for each row: how far the perplexity after K passes is above the streamed one."""
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(9.0, 3.8), layout="constrained")
    for i, line in enumerate(lines):
        if line.row is not None:
            streamed = _number(name, line.row, "streaming")
            figures = [_number(name, line.row, f"k{k}") for k in PASSES]
            assert streamed is not None
            above = [100.0 * (one / streamed - 1.0) for one in figures if one is not None]
            left.plot(PASSES, above, ".-", color=f"C{i}", label=row_name(name, MINIATURES[name], line.row))
        means = [_mean(line.measures[f"k{k}"], records) for k in PASSES]
        ours = _mean(line.measures["streaming"], records)
        if ours is not None:
            above = [100.0 * (mean / ours - 1.0) for mean in means if mean is not None]
            right.plot(PASSES, above, ".-", color=f"C{i}", label=line.name)
    for axes, what in ((left, "the paper"), (right, "miniature")):
        axes.set_yscale("symlog", linthresh=0.1)
        axes.set_xticks(PASSES)
        axes.set_xlabel("parallel passes K")
        axes.set_ylabel("PPL above streaming, %")
        axes.set_title(what, fontsize=9)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=7)
    return _titled(figure, name)


def _trend(lines: Sequence[Line], records: Records) -> Any:
    """One curve for each pair of runs: their difference during the training."""
    figure, axes = pyplot().subplots(figsize=(8.5, 3.6), layout="constrained")
    for i, line in enumerate(lines):
        points = [(at, _mean(measure, records)) for at, measure in zip(FRACTIONS, line.measures.values(), strict=True)]
        x, y = zip(*((100.0 * at, mean) for at, mean in points if mean is not None), strict=True)
        axes.plot(x, y, ".-", color=f"C{i}", label=line.name)
    axes.axhline(0.0, color="black", linewidth=0.8)
    axes.set_xlabel("training, %", fontsize=9)
    axes.set_ylabel("difference in PPL, %", fontsize=9)
    axes.grid(alpha=0.25)
    figure.legend(frameon=False, fontsize=7, loc="outside right center")
    return _titled(figure, "trend")


def _k_min(records: Records) -> Any:
    """The contraction rates of a random and of a fixed depth."""
    figure, axes = pyplot().subplots(figsize=(6.0, 2.4), layout="constrained")
    rates = next(line for line in MINIATURES["k_min"].lines if line.name == "L̂ (channel)")
    names = [column.heading for column in MINIATURES["k_min"].columns]
    for y, (key, measure) in enumerate(rates.measures.items()):
        printed = None if rates.row is None else _number("k_min", rates.row, key)
        if printed is not None:
            axes.plot(printed, y, "D", color=THEIRS, markersize=5, label="paper" if y == 0 else None)
        _dot(axes, measure, y, records, OURS, "miniature" if y == 0 else None)
    _label(axes, names, "contraction rate L̂ (channel)")
    axes.legend(frameon=False, fontsize=8)
    return _titled(figure, "k_min")


def _panels(rows: int) -> tuple[Any, Any]:
    size = (10.0, 1.2 + ROW * rows)
    figure, panels = pyplot().subplots(1, 2, figsize=size, layout="constrained")
    return figure, panels


def _dot(axes: Any, measure: Measure | None, y: int, records: Records, color: str, label: str | None = None) -> None:
    values = [] if measure is None else list(measure.of(records).values())
    if values:
        spread = stdev(values) if len(values) > 1 else 0.0
        axes.errorbar(fmean(values), y, xerr=spread, fmt="o", color=color, capsize=3, markersize=5, label=label)


def _label(axes: Any, names: Sequence[str], what: str, on_right: bool = False) -> None:
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.5, -0.5)
    if on_right:
        axes.yaxis.tick_right()
    axes.set_xlabel(what, fontsize=9)
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(alpha=0.25)


def _titled(figure: Any, name: str) -> Any:
    figure.suptitle(title(name), fontsize=9)
    return figure


def _paper_label(name: str, miniature: Miniature, line: Line) -> str:
    return "" if line.row is None else row_name(name, miniature, line.row)


def _pair_keys(line: Line) -> tuple[str, str]:
    return ("after", "control") if "after" in line.measures else ("ppl_d", "ppl_n")


def _number(name: str, row: int, key: str) -> float | None:
    """A printed figure as a number, without marks such as ~ and *."""
    if name in OF_OUR_OWN:
        return None
    printed = table(name)
    found = re.search(r"\d+(\.\d+)?", printed.cells(printed.rows[row]).get(key, ""))
    return None if found is None else float(found[0])


def _mean(measure: Measure, records: Records) -> float | None:
    values = list(measure.of(records).values())
    return fmean(values) if values else None
