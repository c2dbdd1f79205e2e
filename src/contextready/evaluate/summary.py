"""Evaluations of runs that differ only in their seed: mean and spread, and differences paired by seed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from contextready.evaluate.evaluate import Evaluation
from contextready.evaluate.seeds import group_runs


@dataclass(frozen=True)
class Summary:
    """The perplexities of one configuration over its seeds."""

    name: str
    by_seed: dict[int | None, Evaluation]

    def perplexities(self, passes: int | None) -> list[float]:
        """The perplexity of every seed after K passes; None means streaming. Empty if a seed was not evaluated so."""
        scores = [one.sequential if passes is None else one.parallel.get(passes) for one in self.by_seed.values()]
        return [score.perplexity for score in scores if score is not None] if all(scores) else []


@dataclass(frozen=True)
class Difference:
    """Perplexity of one configuration minus that of another one, for every seed that both have."""

    first: str
    second: str
    by_seed: dict[int | None, float]


def summarize(runs: Sequence[Path], evaluations: Sequence[Evaluation]) -> list[Summary]:
    """Group the evaluations of runs whose settings are the same except for the seed; empty if no two are."""
    of_run = dict(zip(runs, evaluations, strict=True))
    groups = group_runs(list(of_run))
    if all(len(group.runs) == 1 for group in groups):
        return []
    return [Summary(group.name, {seed: of_run[run] for seed, run in group.runs.items()}) for group in groups]


def differences(summaries: Sequence[Summary]) -> list[Difference]:
    """Compare the first configuration with every other one that shares a seed with it, as they generate text."""
    found = []
    for other in summaries[1:]:
        first = summaries[0]
        by_seed = {
            seed: _generating(one) - _generating(other.by_seed[seed])
            for seed, one in first.by_seed.items()
            if seed in other.by_seed
        }
        if by_seed:
            found.append(Difference(first.name, other.name, by_seed))
    return found


def _generating(one: Evaluation) -> float:
    """The perplexity in streaming mode, or at the largest K if that was not evaluated or there is no correction."""
    return (one.sequential or one.parallel[max(one.parallel)]).perplexity


def spread(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean, and the standard deviation of several values."""
    return fmean(values), stdev(values) if len(values) > 1 else None


def as_record(summaries: Sequence[Summary]) -> dict[str, Any]:
    """The summaries and paired differences as plain JSON values."""
    configurations = []
    for summary in summaries:
        passes = sorted({k for one in summary.by_seed.values() for k in one.parallel})
        columns = {str(k): summary.perplexities(k) for k in passes} | {"streaming": summary.perplexities(None)}
        configurations.append(
            {
                "name": summary.name,
                "seeds": list(summary.by_seed),
                "perplexity": {
                    key: dict(zip(("mean", "deviation"), spread(values), strict=True)) | {"values": values}
                    for key, values in columns.items()
                    if values
                },
            }
        )
    paired = [
        {"first": one.first, "second": one.second, "seeds": list(one.by_seed), "values": list(one.by_seed.values())}
        for one in differences(summaries)
    ]
    return {"configurations": configurations, "differences": paired}
