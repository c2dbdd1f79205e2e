"""Writes the tables of docs/training.md and draws its plot, from docs/results/training.json.

crt reproduce training --part all --seeds 0,1,2 --out runs/training-cpu
cp runs/training-cpu/report.json docs/results/training.json
python tools/results.py            # --check only compares the tables
"""

import json
import re
import sys
from pathlib import Path

from contextready.study.plots import draw_compute
from contextready.study.tables import tables_of

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "training.md"
SOURCE = ROOT / "docs" / "results" / "training.json"
PICTURE = ROOT / "docs" / "pictures" / "training-compute.png"


def main() -> int:
    """Write the tables and the plot, or compare the tables."""
    records = json.loads(SOURCE.read_text(encoding="utf-8"))["runs"]
    tables, before = tables_of(records), PAGE.read_text(encoding="utf-8")

    def replaced(match: re.Match[str]) -> str:
        return f"<!-- table: {match[1]} -->\n\n{tables[match[1]]}\n\n<!-- end -->"

    after = re.sub(r"<!-- table: (\w+) -->.*?<!-- end -->", replaced, before, flags=re.DOTALL)
    if "--check" in sys.argv[1:]:
        if after != before:
            print(
                "docs/training.md differs from docs/results/training.json; run python tools/results.py", file=sys.stderr
            )
        return int(after != before)
    PAGE.write_text(after, encoding="utf-8")
    draw_compute(records, PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
