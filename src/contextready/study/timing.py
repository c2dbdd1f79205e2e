"""Training times of the study on a quiet machine: learning curves get the times that a benchmark measured for steps."""

from collections.abc import Mapping, Sequence
from typing import Any

from contextready.runs.passes import parse_passes
from contextready.study.results import Record
from contextready.study.trials import CONTROLS


def with_times(records: Sequence[Record], rows: Sequence[Mapping[str, Any]]) -> list[Record]:
    """Replace the seconds of the recipe and of its transformers by measured step times, and mark these runs as timed.

    The runs shared a machine, so their own seconds cannot be compared. `rows` are those of benchmarks/recipe.py: for a
    shape, the seconds of a step for every K and every transformer.
    """
    measured, timed = {row["shape"]: row["seconds"] for row in rows}, []
    for record in records:
        kind, shape = record["key"][0], record["key"][1:]
        if shape in measured and kind in ("d", *CONTROLS):
            seconds = _seconds(record, kind, measured[shape])
            record = record | {"timed": True, "curve": record["curve"] | {"seconds": seconds}}
        timed.append(record)
    return timed


def _seconds(record: Record, kind: str, measured: Mapping[str, float]) -> list[float]:
    """Return the training time at every validation of a run."""
    steps, train = record["curve"]["step"], record["train"]
    if kind != "d":
        return [step * measured[kind] for step in steps]
    schedule, found = parse_passes(train["passes"]), [0.0]
    for step in range(steps[-1]):
        depths = schedule.stage(step, train["steps"]).depths
        found.append(found[-1] + sum(measured[str(k)] for k in depths) / len(depths))
    return [found[step] for step in steps]
