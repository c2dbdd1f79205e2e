"""Writes the tables of docs/training.md and draws its plot, from the result files in docs/results.

crt reproduce training --part all --seeds 0,1,2 --out runs/training-cpu
python tools/results.py runs/training-cpu/report.json    # adds these runs to docs/results/training.json
python benchmarks/recipe.py --out docs/results/steps.json
python tools/results.py            # --check only compares the tables
"""

import json
import re
import sys
from pathlib import Path

from contextready.files import write_json
from contextready.study.plots import draw_compute
from contextready.study.results import Record
from contextready.study.tables import tables_of
from contextready.study.timing import with_times

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "training.md"
SOURCE = ROOT / "docs" / "results" / "training.json"
STEPS = ROOT / "docs" / "results" / "steps.json"
PICTURE = ROOT / "docs" / "pictures" / "training-compute.png"


def key_of(record: Record) -> tuple[str, int, str]:
    """Return what tells a run from every other one: its row, its seed, and the pretrained model."""
    return record["key"], record["seed"], record["model"].get("pretrained", "")


def add_runs(report: Path) -> None:
    """Add the runs of a report to the committed ones; a run that is there already is replaced."""
    new = json.loads(report.read_text(encoding="utf-8"))["runs"]
    old = json.loads(SOURCE.read_text(encoding="utf-8"))["runs"]
    runs = {key_of(record): record for record in (*old, *new)}
    write_json(SOURCE, {"runs": [runs[key] for key in sorted(runs)]})


def main() -> int:
    """Write the tables and the plot, or compare the tables."""
    check = "--check" in sys.argv[1:]
    for report in (word for word in sys.argv[1:] if word != "--check"):
        add_runs(Path(report))
    records = json.loads(SOURCE.read_text(encoding="utf-8"))["runs"]
    if STEPS.is_file():
        records = with_times(records, json.loads(STEPS.read_text(encoding="utf-8"))["rows"])
    tables, before = tables_of(records), PAGE.read_text(encoding="utf-8")

    def replaced(match: re.Match[str]) -> str:
        return f"<!-- table: {match[1]} -->\n\n{tables[match[1]]}\n\n<!-- end -->"

    after = re.sub(r"<!-- table: (\w+) -->.*?<!-- end -->", replaced, before, flags=re.DOTALL)
    if check:
        if after != before:
            print("docs/training.md differs from docs/results; run python tools/results.py", file=sys.stderr)
        return int(after != before)
    PAGE.write_text(after, encoding="utf-8")
    draw_compute(records, PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
