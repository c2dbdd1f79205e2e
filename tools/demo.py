"""Writes the tables of the demo in docs/benchmarks.md and draws its plot, from docs/results/demo.json.

python tools/demo.py            # --check only compares the tables
"""

import json
import re
import sys
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from contextready.evaluate.curves import Curve, draw_side_by_side
from contextready.evaluate.seeds import band
from contextready.study.tables import percent, spread
from contextready.train.trials import aligned

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
SOURCE = ROOT / "docs" / "results" / "demo.json"
PICTURE = ROOT / "docs" / "pictures" / "demo.png"
READY, TRANSFORMERS = "context-ready", ("one more FFN", "wider", "nothing added")

Rows = dict[str, list[dict[str, Any]]]


def at(run: dict[str, Any], axis: str, x: float) -> float:
    """Return the validation perplexity of a run at a position of its curve, interpolated."""
    curve = run["learning_curve"]
    assert x <= curve[-1][axis], "the run is too short for this comparison"
    return exp(float(np.interp(x, [p[axis] for p in curve], [log(p["val_perplexity"]) for p in curve])))


def evaluation_table(rows: Rows) -> str:
    """The whole validation split after training: perplexity by K and streamed."""
    ready, plain = ([run["evaluation"] for run in rows[key]] for key in (READY, TRANSFORMERS[0]))
    lines = [["", "transformer", READY]]
    for k in ready[0]["parallel"]:
        theirs = spread([e["parallel"][k] for e in plain], 2) if k in plain[0]["parallel"] else ""
        lines.append([f"parallel K={k}", theirs, spread([e["parallel"][k] for e in ready], 2)])
    lines.append(["streaming, one pass per token", "", f"**{spread([e['streaming'] for e in ready], 2)}**"])
    return aligned(lines)


def compute_table(rows: Rows) -> str:
    """The validation set of the learning curves: every transformer at equal tokens and at equal compute."""
    ready = {run["seed"]: run for run in rows[READY]}
    lines = [["transformer: one layer and", "seeds", "cost of a step", "equal tokens", "equal compute", "difference"]]
    for name in TRANSFORMERS:
        cells: dict[str, list[float]] = {"tokens": [], "macs": []}
        differences, costs = [], []
        for plain in rows[name]:
            end = ready[plain["seed"]]["learning_curve"][-1]
            for axis, found in cells.items():
                found.append(at(plain, axis, end[axis]))
            differences.append(100 * (end["val_perplexity"] / cells["macs"][-1] - 1))
            last = plain["learning_curve"][-1]
            costs.append(end["macs"] / end["step"] / (last["macs"] / last["step"]))
        shown = [spread(found, 2) for found in cells.values()]
        lines.append([name, str(len(differences)), f"{fmean(costs):.2f} ×", *shown, percent(differences)])
    return aligned(lines)


def mean_curve(name: str, runs: list[dict[str, Any]], axis: str) -> Curve:
    """Return the mean of the learning curves over seeds, with a band of a standard deviation."""
    curves = [run["learning_curve"] for run in runs]
    end = min(curve[-1][axis] for curve in curves)
    x = np.array(sorted({*(float(point[axis]) for point in curves[0] if point[axis] <= end), float(end)}))
    loss_SX = np.array([[log(at(run, axis, value)) for value in x] for run in runs])
    low, high = band(loss_SX)
    return Curve(name, x, loss_SX.mean(axis=0), low, high)


def main() -> int:
    """Write the tables and the plot, or compare the tables."""
    rows = {name: row["runs"] for name, row in json.loads(SOURCE.read_text(encoding="utf-8"))["rows"].items()}
    tables = {"demo": evaluation_table(rows), "demo-compute": compute_table(rows)}
    before = PAGE.read_text(encoding="utf-8")
    after = before
    for name, table in tables.items():
        block = f"<!-- table: {name} -->\n\n{table}\n\n<!-- end -->"
        after = re.sub(rf"<!-- table: {name} -->.*?<!-- end -->", lambda _, b=block: b, after, flags=re.DOTALL)
    if "--check" in sys.argv[1:]:
        if after != before:
            print("docs/benchmarks.md differs from docs/results/demo.json; run python tools/demo.py", file=sys.stderr)
        return int(after != before)
    PAGE.write_text(after, encoding="utf-8")
    names = {TRANSFORMERS[0]: "transformer", READY: "context-ready"}
    panels = {
        title: (axis, [mean_curve(label, rows[key], axis) for key, label in names.items()])
        for title, axis in (("Equal training tokens", "tokens"), ("Equal training compute", "macs"))
    }
    draw_side_by_side(panels, PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
