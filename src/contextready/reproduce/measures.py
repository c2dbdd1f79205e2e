"""What is measured on the runs of the miniature: one number for each seed, with the unit of the paper's tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp
from typing import Any, Protocol

import numpy as np

from contextready.model.config import ModelConfig
from contextready.model.cost import account

Record = dict[str, Any]
"""One run: its key, seed and settings, its learning curve, and its evaluation."""
Values = dict[int, float]
"""A number for each seed."""


class Records:
    """The records of all runs, by run and seed."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._of_run: dict[str, dict[int, Record]] = {}
        for record in records:
            self._of_run.setdefault(record["key"], {})[record["seed"]] = record

    def of(self, run: str) -> Mapping[int, Record]:
        """The records of a run by seed."""
        return self._of_run.get(run, {})

    def loss_at(self, run: str, seed: int, axis: str, x: float) -> float:
        """The validation loss at a position of the learning curve, interpolated."""
        curve = self.of(run)[seed]["curve"]
        return float(np.interp(x, curve[axis], curve["val_loss"]))

    def end(self, run: str, seed: int, axis: str) -> float:
        """The last position of the learning curve."""
        return float(self.of(run)[seed]["curve"][axis][-1])


class Measure(Protocol):
    """Something that can be measured on runs."""

    @property
    def runs(self) -> tuple[str, ...]:
        """The runs that it needs."""

    def of(self, records: Records) -> Values:
        """The value for each seed that all of these runs have."""


@dataclass(frozen=True)
class OfRun:
    """A measure of one run."""

    run: str

    @property
    def runs(self) -> tuple[str, ...]:
        """The runs that it needs."""
        return (self.run,)


@dataclass(frozen=True)
class OfPair:
    """A measure of two others."""

    first: Measure
    second: Measure

    @property
    def runs(self) -> tuple[str, ...]:
        """The runs that it needs."""
        return (*self.first.runs, *self.second.runs)


@dataclass(frozen=True)
class Perplexity(OfRun):
    """The validation perplexity after K parallel passes; without K, that of the training (its largest K)."""

    passes: int | None = None

    def of(self, records: Records) -> Values:
        """The value for each seed."""
        found = {}
        for seed, record in records.of(self.run).items():
            parallel = record["evaluation"]["parallel"]
            k = str(record["passes"] if self.passes is None else self.passes)
            if k in parallel:
                found[seed] = float(parallel[k]["perplexity"])
        return found


@dataclass(frozen=True)
class Cost(OfRun):
    """Thousands of multiply-accumulates per token, with the head, as the paper counts FLOPs."""

    def of(self, records: Records) -> Values:
        """The value for each seed, which is the same for all."""
        return {
            seed: account(ModelConfig(**record["model"])).macs / 1000 for seed, record in records.of(self.run).items()
        }


@dataclass(frozen=True)
class Streamed(OfRun):
    """The validation perplexity with one pass per token."""

    def of(self, records: Records) -> Values:
        """The value for each seed."""
        evaluations = {seed: record["evaluation"]["sequential"] for seed, record in records.of(self.run).items()}
        return {seed: float(one["perplexity"]) for seed, one in evaluations.items() if one is not None}


@dataclass(frozen=True)
class Rate(OfRun):
    """The contraction rate L̂: `channel` as the author computes it, `norm` for the largest change of a position."""

    kind: str = "channel"

    def of(self, records: Records) -> Values:
        """The value for each seed."""
        rates = {seed: record["evaluation"][f"{self.kind}_rate"] for seed, record in records.of(self.run).items()}
        return {seed: float(rate) for seed, rate in rates.items() if rate is not None}


@dataclass(frozen=True)
class During(OfRun):
    """The validation perplexity after a fraction of the training."""

    fraction: float

    def of(self, records: Records) -> Values:
        """The value for each seed."""
        return {
            seed: exp(records.loss_at(self.run, seed, "step", self.fraction * records.end(self.run, seed, "step")))
            for seed in records.of(self.run)
        }


@dataclass(frozen=True)
class At:
    """The validation perplexity of a run where another one ends, in training tokens or multiply-accumulates.

    `after` is a run that the other one was converted from; its training counts too.
    """

    run: str
    other: str
    axis: str = "tokens"
    after: str | None = None

    @property
    def runs(self) -> tuple[str, ...]:
        """The runs that it needs."""
        return (self.run, self.other, *(() if self.after is None else (self.after,)))

    def of(self, records: Records) -> Values:
        """The value for each seed; none if the run ends earlier."""
        found = {}
        for seed in _shared(records, self.runs):
            x = records.end(self.other, seed, self.axis)
            if self.after is not None:
                x += records.end(self.after, seed, self.axis)
            # A whole number of steps may end a little earlier than the fraction that was asked for.
            if x <= 1.01 * records.end(self.run, seed, self.axis):
                found[seed] = exp(records.loss_at(self.run, seed, self.axis, x))
        return found


@dataclass(frozen=True)
class Minus(OfPair):
    """The difference of two measures, paired by seed."""

    def of(self, records: Records) -> Values:
        """The value for each seed that both have."""
        one, other = self.first.of(records), self.second.of(records)
        return {seed: one[seed] - other[seed] for seed in one if seed in other}


@dataclass(frozen=True)
class Percent(OfPair):
    """How much higher the first measure is than the second, in percent, paired by seed."""

    def of(self, records: Records) -> Values:
        """The value for each seed that both have."""
        one, other = self.first.of(records), self.second.of(records)
        return {seed: 100.0 * (one[seed] / other[seed] - 1.0) for seed in one if seed in other}


@dataclass(frozen=True)
class Rise(OfRun):
    """How far the validation perplexity rises above that of the first step during a conversion, in percent."""

    def of(self, records: Records) -> Values:
        """The value for each seed."""
        losses = {seed: record["curve"]["val_loss"] for seed, record in records.of(self.run).items()}
        return {seed: 100.0 * (exp(max(curve) - curve[0]) - 1.0) for seed, curve in losses.items()}


@dataclass(frozen=True)
class Closed(OfRun):
    """How much of the gap between one pass and five the first K passes close, in percent."""

    passes: int

    def of(self, records: Records) -> Values:
        """The value for each seed."""
        one, k, five = (Perplexity(self.run, passes).of(records) for passes in (1, self.passes, 5))
        return {seed: 100.0 * (one[seed] - k[seed]) / (one[seed] - five[seed]) for seed in k if one[seed] != five[seed]}


@dataclass(frozen=True)
class Crossover:
    """The training tokens from which on the first run is ahead of the second, if it is in the end.

    `after` is the run that the first one was converted from; its tokens count too.
    """

    first: str
    second: str
    after: str | None = None

    @property
    def runs(self) -> tuple[str, ...]:
        """The runs that it needs."""
        return (self.first, self.second, *(() if self.after is None else (self.after,)))

    def of(self, records: Records) -> Values:
        """The value for each seed in which there is one."""
        found = {}
        for seed in _shared(records, self.runs):
            before = 0.0 if self.after is None else records.end(self.after, seed, "tokens")
            curve = records.of(self.first)[seed]["curve"]
            positions = [before + tokens for tokens in curve["tokens"]]
            # Untrained models all have a loss near log V, and their order means nothing.
            points = [(x, loss) for x, loss in zip(positions, curve["val_loss"], strict=True) if x > 0]
            ahead = [loss < records.loss_at(self.second, seed, "tokens", x) for x, loss in points]
            if ahead and ahead[-1]:
                last_behind = max((i for i, is_ahead in enumerate(ahead) if not is_ahead), default=-1)
                found[seed] = points[last_behind + 1][0]
        return found


def _shared(records: Records, runs: Sequence[str]) -> list[int]:
    """The seeds that all of these runs have."""
    first, *others = (records.of(run) for run in runs)
    return sorted(seed for seed in first if all(seed in other for other in others))
