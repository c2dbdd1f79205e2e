"""Writes the tables of docs/state.md and draws its pictures, from docs/results/state.json.

crt reproduce state --part all --seeds 0,1,2
python tools/state.py runs/state-cpu/report.json    # adds these runs to docs/results/state.json
python tools/state.py                               # --check only compares the page
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from contextready.files import write_json
from contextready.state.report import as_markdown, draw_depths, draw_lengths
from contextready.state.trials import PARTS, trials_of

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "state.md"
SOURCE = ROOT / "docs" / "results" / "state.json"
PICTURES = ROOT / "docs" / "pictures"


def read() -> list[dict[str, Any]]:
    """Read the committed runs."""
    return list(json.loads(SOURCE.read_text(encoding="utf-8"))["runs"]) if SOURCE.is_file() else []


def add_runs(report: Path) -> None:
    """Add the runs of a report to the committed ones; a run that is there already is replaced."""
    new = json.loads(report.read_text(encoding="utf-8"))["runs"]
    runs = {(run["key"], run["seed"]): run for run in (*read(), *new)}
    order = [trial.key for trial in trials_of(PARTS)]
    write_json(SOURCE, {"runs": sorted(runs.values(), key=lambda run: (order.index(run["key"]), run["seed"]))})


def main() -> int:
    """Write the page and draw the pictures, or compare the page."""
    check = "--check" in sys.argv[1:]
    for report in (word for word in sys.argv[1:] if word != "--check"):
        add_runs(Path(report))
    records, before = read(), PAGE.read_text(encoding="utf-8")
    made = f"<!-- made: tables -->\n\n{as_markdown(records)}\n\n<!-- end -->"
    after = re.sub(r"<!-- made: tables -->.*?<!-- end -->", lambda _: made, before, flags=re.DOTALL)
    if check:
        if after != before:
            print("docs/state.md differs from docs/results; run python tools/state.py", file=sys.stderr)
        return int(after != before)
    PAGE.write_text(after, encoding="utf-8")
    draw_lengths(records, PICTURES / "state-lengths.png")
    draw_depths(records, PICTURES / "state-depths.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
