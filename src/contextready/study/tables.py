"""The tables of the study, made from the records of its runs."""

from collections.abc import Sequence
from math import exp
from statistics import fmean, stdev

import numpy as np

from contextready.study.results import TOLERANCES, Record
from contextready.study.trials import PARTS, PROBED, SHAPES, WAYS, Shape, trials_of
from contextready.train.trials import aligned

TITLES = {
    "compute": "Equal training compute",
    "ways": "Other ways to train",
    "scale": "The size of the correction",
    "convergence": "The convergence term",
    "conversion": "Conversion of a pretrained model",
}
LEGEND = """\
Perplexities are on the validation tokens of the learning curve (eval_tokens), those of context-ready models at their
largest K. ± is the standard deviation over seeds; a single seed has none. "Equal tokens" and "equal compute" compare
with the transformer of the same cost per generated token after the same training tokens, and after the same
multiply-accumulates. "Streamed" compares the perplexity with one pass per token with that at K=10."""


class Runs:
    """The records of one row, by seed."""

    def __init__(self, records: Sequence[Record], key: str) -> None:
        self.by_seed = {r["seed"]: r for r in records if r["key"] == key}

    def __bool__(self) -> bool:
        return bool(self.by_seed)

    def loss_at(self, seed: int, axis: str, x: float) -> float:
        """The validation loss of a seed at a position of its curve, interpolated."""
        curve = self.by_seed[seed]["curve"]
        return float(np.interp(x, curve[axis], curve["val_loss"]))

    def end(self, seed: int, axis: str) -> float:
        """The last position of a seed's curve."""
        return float(self.by_seed[seed]["curve"][axis][-1])

    def perplexities(self) -> list[float]:
        """The perplexity of every seed at the end of training."""
        return [exp(r["curve"]["val_loss"][-1]) for r in self.by_seed.values()]

    def macs_per_step(self) -> float:
        """The average multiply-accumulates of a step, without the validation."""
        return fmean(r["curve"]["macs"][-1] / r["curve"]["step"][-1] for r in self.by_seed.values())

    def streamed(self) -> list[float]:
        """How much higher the streamed perplexity is than that at K=10, in percent, for every seed."""
        found = [r["evaluation"] for r in self.by_seed.values()]
        pairs = [(e["sequential"], e["parallel"].get("10")) for e in found]
        return [100.0 * (s["perplexity"] / k["perplexity"] - 1.0) for s, k in pairs if s is not None and k is not None]

    def against(self, other: "Runs", axis: str) -> list[float]:
        """The relative difference in perplexity to another row at equal tokens or compute, in percent, paired by seed.

        It is taken at the last position that both curves cover.
        """
        found = []
        for seed in self.by_seed.keys() & other.by_seed.keys():
            x = min(self.end(seed, axis), other.end(seed, axis))
            found.append(100.0 * (exp(self.loss_at(seed, axis, x) - other.loss_at(seed, axis, x)) - 1.0))
        return found


def spread(values: Sequence[float], digits: int = 1, signed: bool = False) -> str:
    """Format the mean and, for several values, their standard deviation."""
    if not values:
        return ""
    # Adding 0 turns the "-0.0" of tiny negative numbers into "0.0".
    mean = f"{round(fmean(values), digits) + 0.0:{'+' if signed else ''}.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {stdev(values):.{digits}f}"


def percent(values: Sequence[float], digits: int = 1) -> str:
    """Format relative differences in percent."""
    return f"{spread(values, digits, signed=True)} %" if values else ""


def compute_table(records: Sequence[Record]) -> str | None:
    """One line per shape: the recipe against its transformer."""
    lines = []
    for shape in SHAPES:
        ready, plain = Runs(records, f"d{shape.key}"), Runs(records, f"n{shape.key}")
        if not ready or not plain:
            continue
        lines.append(
            [
                f"D={shape.layers} C={shape.width}",
                str(len(ready.by_seed.keys() & plain.by_seed.keys())),
                f"{ready.macs_per_step() / plain.macs_per_step():.2f} ×",
                spread(ready.perplexities()),
                percent(ready.against(plain, "tokens")),
                percent(ready.against(plain, "macs")),
                percent(ready.streamed(), 3),
            ]
        )
    head = ["model", "seeds", "cost of a step", "perplexity", "equal tokens", "equal compute", "streamed"]
    return aligned([head, *lines]) if lines else None


def ways_table(records: Sequence[Record]) -> str | None:
    """One line per shape and way to train, against the same transformer."""
    lines = []
    for shape in SHAPES:
        plain, of_shape = Runs(records, f"n{shape.key}"), []
        ways = {"": "recipe: K=2, then K=2..4"} | {f"-{key}": name for key, (name, _) in WAYS.items()}
        for key, name in ways.items():
            ready = Runs(records, f"d{shape.key}{key}")
            if not ready or not plain:
                continue
            of_shape.append(
                [
                    f"D={shape.layers} C={shape.width}",
                    name,
                    str(len(ready.by_seed)),
                    f"{ready.macs_per_step() / plain.macs_per_step():.2f} ×",
                    spread(ready.perplexities()),
                    percent(ready.against(plain, "macs")),
                    percent(ready.streamed(), 2),
                ]
            )
        # The recipe alone is in the first table.
        lines += of_shape if len(of_shape) > 1 else []
    head = ["model", "training", "seeds", "cost of a step", "perplexity", "equal compute", "streamed"]
    return aligned([head, *lines]) if lines else None


def scale_table(records: Sequence[Record]) -> str | None:
    """Perplexity after short runs, by the size of the correction."""
    names = {t.key: t.name for t in trials_of(["scale"])}
    lines: dict[str, list[str]] = {}
    columns = []
    for shape, steps in PROBED:
        keys = {key: name for key, name in names.items() if key.startswith(f"scale-d{shape.key}-")}
        if not any(Runs(records, key) for key in keys):
            continue
        columns.append(f"D={shape.layers} C={shape.width}, {steps} steps")
        for key, name in keys.items():
            lines.setdefault(name, [""] * (len(columns) - 1)).append(spread(Runs(records, key).perplexities()))
        plain = Runs(records, f"n{shape.key}")
        if plain:
            at = [exp(plain.loss_at(seed, "step", steps)) for seed in plain.by_seed if seed == 0]
            lines.setdefault("transformer at equal tokens", [""] * (len(columns) - 1)).append(spread(at))
    rows = [[name, *cells, *[""] * (len(columns) - len(cells))] for name, cells in lines.items() if any(cells)]
    return aligned([["factor on the correction", *columns], *rows]) if columns else None


def convergence_table(records: Sequence[Record]) -> str | None:
    """The convergence term: quality, streaming, contraction, and passes that a prompt needs."""
    lines = []
    for trial in trials_of(["convergence"]):
        runs = Runs(records, trial.key)
        if not runs:
            continue
        found = [r["evaluation"] for r in runs.by_seed.values()]
        prompts = [spread([e["prompt_passes"][f"{t:g}"] for e in found]) for t in TOLERANCES]
        name = "weight 0" if trial.part != "convergence" else trial.name
        rate = spread([e["norm_rate"] for e in found], 2)
        lines.append([name, str(len(found)), spread(runs.perplexities()), percent(runs.streamed(), 2), rate, *prompts])
    head = ["convergence term", "seeds", "perplexity", "streamed", "L̂ (norm)"]
    head += [f"passes to {tolerance:g}" for tolerance in TOLERANCES]
    return aligned([head, *lines]) if len(lines) > 1 else None


def conversion_table(records: Sequence[Record]) -> str | None:
    """A pretrained model trained further in several ways."""
    lines = []
    for trial in trials_of(["conversion"]):
        runs = Runs(records, trial.key)
        if not runs:
            continue
        before = [exp(r["curve"]["val_loss"][0]) for r in runs.by_seed.values()]
        plain = Runs(records, "convert-continued")
        compared = [percent(runs.against(plain, axis), 2) if plain and trial.ready else "" for axis in ("step", "macs")]
        lines.append(
            [
                trial.name,
                str(len(before)),
                spread(before, 3),
                spread(runs.perplexities(), 3),
                *compared,
                percent(runs.streamed(), 3),
            ]
        )
    head = ["training", "seeds", "before", "after", "equal steps", "equal compute", "streamed"]
    return aligned([head, *lines]) if lines else None


TABLES = {
    "compute": compute_table,
    "ways": ways_table,
    "scale": scale_table,
    "convergence": convergence_table,
    "conversion": conversion_table,
}


def tables_of(records: Sequence[Record]) -> dict[str, str]:
    """All tables for which there are runs."""
    made = {part: make(records) for part, make in TABLES.items()}
    return {part: table for part, table in made.items() if table is not None}


def as_markdown(records: Sequence[Record]) -> str:
    """All tables with their titles and an explanation of their columns."""
    parts = [f"{TITLES[part]}:\n\n{table}" for part, table in tables_of(records).items()]
    return "\n\n".join([*parts, LEGEND])


def shapes_with_pairs(records: Sequence[Record]) -> list[Shape]:
    """The shapes of which both models have runs."""
    return [s for s in SHAPES if Runs(records, f"d{s.key}") and Runs(records, f"n{s.key}")]


assert set(TITLES) == set(TABLES) == set(PARTS) - {"headline"}
