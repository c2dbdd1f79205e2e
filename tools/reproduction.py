"""Writes the ledger and the tables of docs/reproduction.md and draws their pictures, from docs/results.

crt reproduce all --seeds 0,1,2
python benchmarks/passes.py --out docs/results/passes.json
python tools/reproduction.py runs/reproduce-cpu/results.json   # adds these runs to docs/results/reproduction.json
python tools/reproduction.py                                   # --check only compares the page
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from contextready.files import write_json
from contextready.reproduce.ledger import as_markdown
from contextready.reproduce.lines import MINIATURES
from contextready.reproduce.measured import timing_table
from contextready.reproduce.plots import draw_tables
from contextready.reproduce.report import LEGEND, tables_markdown, title

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reproduction.md"
SOURCE = ROOT / "docs" / "results" / "reproduction.json"
PASSES = ROOT / "docs" / "results" / "passes.json"
POINTER = ROOT / "docs" / "results" / "pointer.json"
PICTURES = ROOT / "docs" / "pictures"
COLORS = "In the pictures, blue dots are our miniatures of the paper's rows, and orange ones are the controls."


def read(path: Path) -> dict[str, Any]:
    """Read a result file, or nothing if there is none yet."""
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def add_results(path: Path) -> None:
    """Add the runs of a result file to the committed ones; a run that is there already is replaced."""
    new, old = read(path), read(SOURCE)
    runs = {(run["key"], run["seed"]): run for run in (*old.get("runs", []), *new["runs"])}
    timing = new.get("timing", old.get("timing"))
    kept = {} if timing is None else {"timing": timing}
    write_json(SOURCE, {"runs": [runs[key] for key in sorted(runs)]} | kept)


def blocks(results: dict[str, Any]) -> dict[str, str]:
    """Return the generated parts of the page."""
    parts = []
    for name, text in tables_markdown(list(MINIATURES), results["runs"]).items():
        parts += [f"### {title(name)}", text, *MINIATURES[name].notes, f"![{name}](pictures/table-{name}.png)"]
    tables = "\n\n".join([LEGEND, COLORS, *parts])
    timing = results.get("timing")
    speeds = "" if timing is None else timing_table(timing)
    return {"ledger": as_markdown(results), "tables": tables, "timing": speeds}


def main() -> int:
    """Write the page and draw the pictures, or compare the page."""
    check = "--check" in sys.argv[1:]
    for path in (word for word in sys.argv[1:] if word != "--check"):
        add_results(Path(path))
    results = read(SOURCE) | read(POINTER)
    if PASSES.is_file():
        results["passes"] = read(PASSES)
    made, before = blocks(results), PAGE.read_text(encoding="utf-8")

    def replaced(match: re.Match[str]) -> str:
        return f"<!-- made: {match[1]} -->\n\n{made[match[1]]}\n\n<!-- end -->"

    after = re.sub(r"<!-- made: (\w+) -->.*?<!-- end -->", replaced, before, flags=re.DOTALL)
    if check:
        if after != before:
            print("docs/reproduction.md differs from docs/results; run python tools/reproduction.py", file=sys.stderr)
        return int(after != before)
    PAGE.write_text(after, encoding="utf-8")
    for picture in draw_tables(list(MINIATURES), results["runs"], PICTURES):
        # The page shows the PNG.
        picture.with_suffix(".svg").unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
