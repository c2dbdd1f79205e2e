"""Claims on pointer chasing and on speed, from the results of those experiments."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any

from contextready.files import read_json
from contextready.formats.json_file import parse_json
from contextready.paper.tables import table
from contextready.reproduce.computed import Finding
from contextready.reproduce.verdicts import ENOUGH, IN_SIGN, NOT_SEEN, NOT_TESTABLE, REPRODUCED, Verdict, of_range
from contextready.train.trials import aligned

MORE_HOPS = "pointer-20-hops"
POINTER = ("pointer-all-levels", "pointer-staircase", "pointer-wave", MORE_HOPS)
HOPS = 4
"""The hops of the miniature's table."""
COMPILED = "two-passes-compiled"
TIMING = ("decoding-speed", "flat-latency")
TIMED = {"D=1 C=2048": ("owt-d1-c2048", "owt-n6-c1088", 2.6), "D=5 C=1120": ("owt-d5-c1120", "owt-n12-c768", 1.7)}
"""The pairs of models whose speed the paper compares, with the ratio that it prints."""
CONTEXTS = (128, 1024)
"""Tokens before the ones that are timed; the paper has 100 and 10,000."""
BENCH = (
    *("bench", *(name for ready, plain, _ in TIMED.values() for name in (ready, plain))),
    *("--engines", "eager", "--contexts", ",".join(map(str, CONTEXTS)), "--tokens", "16", "--rounds", "5", "--json"),
)
"""The arguments of the command that measures it."""
FOLDER, CONSOLE = "timing", "console.txt"


def pointer_results(report: Path) -> list[dict[str, Any]]:
    """Return the rows with masked answers of a report of `crt reproduce pointer`; none if there is no such file.

    These are the rows of the table, and those with more hops.
    """
    if not report.is_file():
        return []
    return [
        {
            "layers": row["config"]["model"]["layers"],
            "ready": row["config"]["model"]["correction"] is not None,
            "hops": row["config"]["task"]["hops"],
            "seed": int(seed),
            "levels": len(found["accuracy"]),
            "levels_solved": found["levels_solved"],
            "step": found["step"],
            "solved_at": found["solved_at"],
        }
        for row in read_json(report)
        if row["answers"] == "masked" and row["part"] in ("table", "growth")
        for seed, found in row["seeds"].items()
    ]


def pointer_findings(claim: str, rows: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """What the rows of pointer chasing say about a claim."""
    ready = [row for row in rows if row["ready"] and row["hops"] == HOPS]
    find = {
        "pointer-all-levels": lambda: _all_levels(ready, "11 / 11 at ~16K"),
        "pointer-staircase": lambda: _staircase([row for row in rows if not row["ready"]]),
        "pointer-wave": lambda: _wave([row for row in ready if row["solved_at"] is not None]),
        MORE_HOPS: lambda: _more_hops([row for row in rows if row["hops"] > HOPS]),
    }
    return find[claim]()


def _all_levels(
    ready: Sequence[Mapping[str, Any]], theirs: str, what: str = "D=1", reached: str = REPRODUCED
) -> list[Finding]:
    """Whether one layer solves all levels, and the verdict if it does."""
    if not ready:
        return []
    solved = [row["levels_solved"] == row["levels"] for row in ready]
    ours = ", ".join(f"{row['levels_solved']} / {row['levels']} at step {row['step']:,}" for row in ready)
    verdict = Verdict(reached if all(solved) else NOT_SEEN, len(ready) < ENOUGH)
    return [Finding(f"levels solved by {what}, seed by seed", theirs, ours, verdict, len(ready))]


def _staircase(plain: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Whether deeper transformers solve more levels."""
    by_depth: dict[int, list[Mapping[str, Any]]] = {}
    for row in plain:
        by_depth.setdefault(row["layers"], []).append(row)
    depths = sorted(by_depth)
    if len(depths) < 2:
        return []
    means = [fmean(row["levels_solved"] for row in by_depth[n]) for n in depths]
    rises = all(a <= b for a, b in pairwise(means)) and means[0] < means[-1]
    seeds = min(len(by_depth[n]) for n in depths)
    ours = ", ".join(f"N={n}: {value:g}" for n, value in zip(depths, means, strict=True))
    levels = by_depth[depths[0]][0]["levels"]
    verdict = Verdict(IN_SIGN if rises else NOT_SEEN, seeds < ENOUGH)
    theirs = "N=1: 1, N=3: 3, N=5: 6, N=10: 7, N=11: 8, N=12: 11 of 11"
    return [Finding(f"levels solved of {levels}, mean over seeds", theirs, ours, verdict, seeds)]


def _wave(ready: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Whether no level is solved before a lower one."""
    if not ready:
        return []
    waves = [[inf if step is None else step for step in row["solved_at"]] for row in ready]
    in_order = all(a <= b for wave in waves for a, b in pairwise(wave))
    ours = "; ".join(", ".join("never" if step == inf else f"{step:,}" for step in wave) for wave in waves)
    verdict = Verdict(IN_SIGN if in_order else NOT_SEEN, len(ready) < ENOUGH)
    return [Finding("steps at which levels 0 to 4 are solved, seed by seed", "in order", ours, verdict, len(ready))]


def _more_hops(rows: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Whether one layer solves all levels with the largest number of hops."""
    most = max((row["hops"] for row in rows), default=0)
    longest = [row for row in rows if row["hops"] == most]
    # Fewer hops and a narrower layer than in the paper.
    return _all_levels(longest, "21 / 21 at 4K", f"D=1 with {most} hops", IN_SIGN)


def timing_results(out: Path) -> dict[str, Any] | None:
    """Return what the benchmark printed, or None if it has not been run."""
    path = out / FOLDER / CONSOLE
    if not path.is_file():
        return None
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("{")]
    found = parse_json(lines[-1], str(path)) if lines else None
    return found if isinstance(found, dict) and "decode" in found else None


def timing_findings(claim: str, timing: Mapping[str, Any] | None) -> list[Finding]:
    """What the benchmark says about a claim."""
    if timing is None:
        return []
    seconds = {(one["label"], one["context"]): one["seconds"] for one in timing["decode"]}
    found = []
    for name, (ready, plain, theirs) in TIMED.items():
        if claim == "decoding-speed":
            ratio = seconds[plain, CONTEXTS[0]] / seconds[ready, CONTEXTS[0]]
            verdict = of_range([ratio], theirs / 1.25, theirs * 1.25, below=None, above=1.1)
            # A CPU is another regime, so that a ratio near 1 says nothing about a GPU.
            word = verdict.word if verdict.word in (REPRODUCED, IN_SIGN) else NOT_TESTABLE
            what = f"{name} against {plain}, eager, tokens/s"
            found.append(Finding(what, f"{theirs:g}×", f"{ratio:.2f}×", Verdict(word)))
        else:
            growth = 100.0 * (seconds[ready, CONTEXTS[1]] / seconds[ready, CONTEXTS[0]] - 1.0)
            what = f"{name}, time per token after {CONTEXTS[1]:,} tokens against {CONTEXTS[0]}"
            verdict = of_range([growth], -100.0, 4.0, below=20.0, above=None)
            found.append(Finding(what, "below +4 %", f"{growth:+.1f} %", Verdict(verdict.word)))
    return found


def passes_findings(passes: Mapping[str, Any] | None) -> list[Finding]:
    """What `benchmarks/passes.py` says about training with two compiled passes."""
    found = []
    for shape, seconds in ({} if passes is None else passes["seconds"]).items():
        for what, fast, slow, theirs in (
            ("K=2 compiled against K=5 not compiled", "K=2 compiled", "K=5", "1.7×"),
            ("K=2 against K=5, both compiled", "K=2 compiled", "K=5 compiled", "not in the paper"),
        ):
            ratio = seconds[slow] / seconds[fast]
            verdict = of_range([ratio], 1.7 / 1.25, 1.7 * 1.25, below=None, above=1.1)
            is_control = slow != "K=5"
            name = f"speed of a step, {what}, {shape} (CPU)"
            found.append(Finding(name, theirs, f"{ratio:.2f}×", Verdict(verdict.word), None, is_control))
    return found


def timing_table(timing: Mapping[str, Any]) -> str:
    """The table of the paper beside what the benchmark measured."""
    printed = {row.model: table("timing").cells(row) for row in table("timing").rows}
    seconds = {(one["label"], one["context"]): one["seconds"] for one in timing["decode"]}
    lines = [["model", "paper: tokens/s", "paper: speedup", *(f"tokens/s after {c:,}" for c in CONTEXTS), "speedup"]]
    for ready, plain, _ in TIMED.values():
        for name in (ready, plain):
            cells = printed[name]
            ratio = f"{seconds[plain, CONTEXTS[0]] / seconds[name, CONTEXTS[0]]:.2f}×" if name == ready else ""
            speeds = [f"{1.0 / seconds[name, context]:.1f}" for context in CONTEXTS]
            lines.append([name, cells["speed"], cells.get("speedup", ""), *speeds, ratio])
    return aligned(lines)
