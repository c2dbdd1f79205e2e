"""`crt reproduce ledger`: the claims of the paper with our figures and verdicts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from contextready.cli.console import make_console

RESULTS = "results.json"
"""The result file, in the folder of the runs."""
LEDGER = "ledger.md"


def collect(out: Path, pointer: Path) -> Mapping[str, Any]:
    """Write and return the result file of a folder: its runs, and the results on pointer chasing and decoding."""
    from contextready.files import write_json
    from contextready.reproduce.measured import pointer_results, timing_results
    from contextready.reproduce.records import read_records

    console = make_console()
    runs = read_records(out, lambda name: console.print(f"Evaluating {name} …"))
    results: dict[str, Any] = {"runs": runs, "pointer": pointer_results(pointer / "report.json")}
    timing = timing_results(out)
    if timing is not None:
        results["timing"] = timing
    write_json(out / RESULTS, results)
    return results


def print_ledger(results: Mapping[str, Any], out: Path | None) -> None:
    """Print a line for every claim, and write the whole ledger to a folder."""
    from contextready.reproduce.ledger import as_markdown, as_text

    console = make_console(tables=True)
    console.print(as_text(results), soft_wrap=True)
    if out is not None:
        (out / LEDGER).write_text(as_markdown(results) + "\n", encoding="utf-8")
        console.print(f"{out / LEDGER} has the claims in words, every part and control, the commands, and the rule.")
