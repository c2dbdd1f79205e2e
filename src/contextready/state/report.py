"""The report on state tracking: tables and plots of all finished runs, from their records."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median_low, stdev
from typing import Any

import numpy as np

from contextready.plotting import pyplot, save_figure
from contextready.state.trials import PARTS, TABLE
from contextready.train.trials import aligned

Record = Mapping[str, Any]
TITLES = {
    **{"s5": "S5", "a5": "A5", "z60": "Z60", "parity": "parity", "assign": "variable assignment"},
    **{"count": "counting", "stack": "stack", "word": "word problem"},
}
LARGE = 1e4
"""A perplexity at which a model has forgotten the text."""
LEGEND = """\
Every row lists its seeds in ascending order.

- solved: the longest length at which, as at all shorter ones, at least 0.99 of the answers are right, on 1,000 fresh
  sequences (200 for pretrained models) that are up to eight times as long as in training
- accuracy: that of the last quarter of the symbols up to a length, the mean over the seeds
- before: the accuracy at the length of training before the model was trained on the task
- perplexity on text: before and after that training
- steps: the step at which training stopped, because every length was solved or because it was the last
- K=…: the accuracy at the length of training in so many parallel passes, instead of streaming; the last line has the
  best accuracy that is possible with the attention window"""


def rows_of(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Group records by row, in their order, with the seeds of a row in ascending order."""
    rows: dict[str, list[Record]] = {}
    for record in records:
        rows.setdefault(record["key"], []).append(record)
    return {key: sorted(row, key=lambda record: int(record["seed"])) for key, row in rows.items()}


def tables_of(records: Sequence[Record]) -> dict[str, str]:
    """Format one table for each part and task that has records; the names are PART-TASK."""
    tables = {}
    for part in PARTS[1:]:
        mine = [record for record in records if record["part"] == part]
        for task in dict.fromkeys(record["task"] for record in mine):
            rows = rows_of([record for record in mine if record["task"] == task])
            if part == "ways":
                # The way of the table is the one to compare with.
                rows = rows_of([r for r in records if r["key"] == f"{task}-d1"]) | rows
            tables[f"{part}-{task}"] = _table(list(rows.values()), part)
    return tables


def _table(rows: Sequence[Sequence[Record]], part: str) -> str:
    lengths = max((row[0]["lengths"] for row in rows), key=len)
    passes = sorted({int(k) for row in rows for k in row[0]["passes"]}) if part != "table" else []
    head = ["model", f"solved, of {lengths[-1]}", *(f"n={n}" for n in lengths), "steps"]
    head += [f"K={k}" for k in passes]
    if part == "convert":
        head[2:2] = ["before", "perplexity on text"]
    lines = []
    for row in rows:
        name = "BPTT, curriculum, window 4" if part == "ways" and row[0]["part"] == "table" else row[0]["name"]
        line = [name, ", ".join(str(r["solved"]) for r in row)]
        if part == "convert":
            line.append(f"{fmean(r['accuracy_before'] for r in row):.2f}")
            texts = [r["text"] for r in row if r["text"] is not None]
            line.append(f"{fmean(b for b, _ in texts):.2f} → {_perplexities([a for _, a in texts])}" if texts else "")
        for i in range(len(lengths)):
            found = [r["accuracy"][i] for r in row if i < len(r["accuracy"])]
            line.append(_with_spread(found))
        line.append(", ".join(f"{r['step']:,}" for r in row))
        for k in passes:
            found = [r["passes"][str(k)][0] for r in row if str(k) in r["passes"]]
            line.append(_with_spread(found))
        lines.append(line)
    best: Mapping[str, Sequence[float]] = next((b for row in rows if passes and (b := row[0]["best_passes"])), {})
    if best:
        # The bound depends on the window alone, which the rows with a bound share.
        blank = [""] * (len(head) - len(passes) - 1)
        lines.append(["at best in so many passes", *blank, *(f"{best[str(k)][0]:.2f}" for k in passes)])
    return aligned([head, *lines])


def _with_spread(found: Sequence[float]) -> str:
    if not found:
        return ""
    return f"{fmean(found):.2f}" + (f" ± {stdev(found):.2f}" if len(found) > 1 else "")


def _perplexities(found: Sequence[float]) -> str:
    """Format them with their spread, or one by one if any is so large that a mean would say nothing."""
    if max(found) < LARGE:
        return _with_spread(found)
    return ", ".join(f"{one:.2f}" if one < LARGE else f"{one:.0e}" for one in found)


def as_markdown(records: Sequence[Record]) -> str:
    """Format all tables with an explanation of their columns."""
    parts = []
    for name, table in tables_of(records).items():
        part, _, task = name.partition("-")
        title = {"table": "", "ways": ": ways to train one layer", "convert": ": a pretrained model"}[part]
        first = next(r for r in records if r["task"] == task and r["part"] == part)
        about = f"trained at lengths up to {first['length']}; guessing: {first['chance']:.3f}"
        parts.append(f"{TITLES.get(task, task)}{title} ({about}):\n\n{table}")
    return "\n\n".join([*parts, LEGEND])


def draw_lengths(records: Sequence[Record], *out: Path) -> None:
    """Draw the accuracy against the length, one panel for each task, the median seed of every model."""
    tasks = [task for task in TABLE if any(r["task"] == task and r["part"] == "table" for r in records)]
    figure, grid = pyplot().subplots(
        1, len(tasks), figsize=(1 + 3.0 * len(tasks), 3.4), squeeze=False, sharey=True, layout="constrained"
    )
    labels: dict[str, Any] = {}
    for axes, task in zip(grid[0], tasks, strict=True):
        rows = rows_of([r for r in records if r["task"] == task and r["part"] == "table"])
        for row in rows.values():
            record = _median(row)
            curve = {int(n): accuracy for n, accuracy in record["curve"].items()}
            (line,) = axes.plot(list(curve), list(curve.values()), **_style(record))
            labels.setdefault(record["name"], line)
        axes.axvline(record["length"], color="0.7", linewidth=0.8, linestyle=":")
        axes.axhline(record["chance"], color="0.7", linewidth=0.8, linestyle="--")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set_ylim(0.0, 1.03)
        axes.set_xlabel("symbols")
        axes.set_title(TITLES[task], fontsize=10)
    grid[0, 0].set_ylabel("accuracy")
    figure.legend(
        labels.values(), labels.keys(), loc="outside lower center", ncols=len(labels), frameon=False, fontsize=8
    )
    save_figure(figure, *out)


def draw_depths(records: Sequence[Record], *out: Path) -> None:
    """Draw the longest length solved against the number of layers, one panel for each task, seeds as dots."""
    tasks = [task for task in TABLE if any(r["task"] == task and r["part"] == "table" for r in records)]
    figure, grid = pyplot().subplots(
        1, len(tasks), figsize=(1 + 3.0 * len(tasks), 3.4), squeeze=False, sharey=True, layout="constrained"
    )
    for axes, task in zip(grid[0], tasks, strict=True):
        mine = [r for r in records if r["task"] == task and r["part"] == "table"]
        for ready, gru, colour, marker, name in (
            (False, False, "C0", "o", "transformer"),
            (True, False, "C3", "*", "context-ready"),
            (False, True, "C2", "s", "GRU"),
        ):
            rows = [row for row in rows_of(mine).values() if (row[0]["ready"], row[0]["gru"]) == (ready, gru)]
            if not rows:
                continue
            layers = [row[0]["layers"] for row in rows]
            axes.plot(layers, [median_low([r["solved"] for r in row]) for row in rows], color=colour, linewidth=1.2)
            for row in rows:
                beside = 0.08 * (np.arange(len(row)) - (len(row) - 1) / 2)
                axes.plot(
                    row[0]["layers"] + beside,
                    [r["solved"] for r in row],
                    marker,
                    color=colour,
                    markersize=8 if ready else 4,
                    label=name if row is rows[0] else None,
                )
        axes.axhline(mine[0]["length"], color="0.7", linewidth=0.8, linestyle=":")
        axes.set_yscale("symlog", base=2, linthresh=1)
        axes.yaxis.set_major_formatter("{x:.0f}")
        axes.set_xticks(range(1, 1 + max(r["layers"] for r in mine)))
        axes.set_xlabel("layers")
        axes.set_title(TITLES[task], fontsize=10)
    # One limit for all panels, because they share the axis.
    grid[0, 0].set_ylim(-0.2, 1.4 * max(r["lengths"][-1] for r in records if r["part"] == "table"))
    grid[0, 0].set_ylabel("longest length solved")
    grid[0, 0].legend(frameon=False, fontsize=8, loc="lower right")
    save_figure(figure, *out)


def _median(row: Sequence[Record]) -> Record:
    """The median seed by the length solved and then by the accuracy; the lower one if their number is even."""
    return sorted(row, key=lambda r: (r["solved"], sum(r["accuracy"])))[(len(row) - 1) // 2]


def _style(record: Record) -> dict[str, Any]:
    if record["gru"]:
        return {"color": "C2", "linestyle": "-.", "linewidth": 1.2}
    if record["ready"]:
        return {"color": "C3", "linewidth": 2.2 if record["layers"] == 1 else 1.2}
    shade = pyplot().get_cmap("Blues")(0.3 + 0.11 * record["layers"])
    return {"color": shade, "linewidth": 1.2}
