"""The tables of the study, made from the records of its runs."""

from collections.abc import Sequence
from math import exp
from statistics import fmean, stdev

import numpy as np

from contextready.model.config import ModelConfig
from contextready.model.cost import account
from contextready.study.results import PARALLEL_SOLVERS, TOLERANCES, Record
from contextready.study.trials import CONTROLS, PROBED, RECIPE, SHAPES, WAYS, Shape, trials_of
from contextready.train.trials import aligned

TITLES = {
    "compute": "Equal training compute",
    "controls": "Other transformers at equal training compute",
    "ways": "Other ways to train",
    "scale": "The size of the correction",
    "convergence": "The convergence term",
    "prompts": "Reading prompts",
    "conversion": "Conversion of a pretrained model",
}
LEGEND = """\
Perplexities are on the validation tokens of the learning curve (eval_tokens), those of context-ready models at their
largest K. ± is the standard deviation over seeds; a single seed has none. "Equal tokens" and "equal compute" compare
with the transformer of the same cost per generated token after the same training tokens, and after the same
multiply-accumulates. "Streamed" compares the perplexity with one pass per token with that at K=10. The cost of reading
a prompt is in plain passes over it, and its error is the largest relative error of z at any position."""


class Runs:
    """The records of one row, by seed."""

    def __init__(self, records: Sequence[Record], key: str) -> None:
        self.by_seed = {r["seed"]: r for r in records if r["key"] == key}

    @property
    def macs_per_token(self) -> int:
        """Multiply-accumulates per generated token."""
        return account(ModelConfig(**next(iter(self.by_seed.values()))["model"])).macs

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

    def step_cost(self, other: "Runs", axis: str = "macs") -> str:
        """The average step in units of another row's, in multiply-accumulates or seconds, without the validation."""
        mine, theirs = (
            fmean(r["curve"][axis][-1] / r["curve"]["step"][-1] for r in runs.by_seed.values())
            for runs in (self, other)
        )
        return f"{mine / theirs:.2f} ×"

    @property
    def timed(self) -> bool:
        """Whether the seconds of these runs can be compared with others."""
        return all(r.get("timed") for r in self.by_seed.values())

    def streamed(self) -> list[float]:
        """How much higher the streamed perplexity is than that at K=10, in percent, for every seed."""
        found = [r["evaluation"] for r in self.by_seed.values()]
        pairs = [(e["sequential"], e["parallel"].get("10")) for e in found]
        return [100.0 * (s["perplexity"] / k["perplexity"] - 1.0) for s, k in pairs if s is not None and k is not None]

    def shared_seeds(self, other: "Runs") -> list[int]:
        """The seeds that both rows have."""
        return sorted(self.by_seed.keys() & other.by_seed.keys())

    def against(self, other: "Runs", axis: str) -> list[float]:
        """The relative difference in perplexity to another row at equal tokens or compute, in percent, paired by seed.

        It is taken at the last position that both curves cover.
        """
        found = []
        for seed in self.shared_seeds(other):
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
                shape.name,
                str(len(ready.shared_seeds(plain))),
                ready.step_cost(plain),
                spread(ready.perplexities()),
                percent(ready.against(plain, "tokens")),
                percent(ready.against(plain, "macs")),
                percent(ready.streamed(), 3),
            ]
        )
    head = ["model", "seeds", "cost of a step", "perplexity", "equal tokens", "equal compute", "streamed"]
    return aligned([head, *lines]) if lines else None


def controls_table(records: Sequence[Record]) -> str | None:
    """One line per shape and transformer: how the recipe compares with it, also in time if that was measured."""
    lines, axes = [], {"macs": "compute"}
    for shape in SHAPES:
        ready = Runs(records, f"d{shape.key}")
        found = {kind: Runs(records, f"{kind}{shape.key}") for kind in CONTROLS}
        # The first one alone is in the first table.
        if not ready or sum(map(bool, found.values())) < 2:
            continue
        if all(runs.timed for runs in (ready, *found.values())):
            axes["seconds"] = "time"
        for kind, name in CONTROLS.items():
            plain, width = found[kind], shape.wider if kind == "w" else shape.width
            if plain:
                line = [shape.name, f"N={shape.layers} C={width}, {name}", str(len(ready.shared_seeds(plain)))]
                line.append(f"{plain.macs_per_token / ready.macs_per_token:.2f} ×")
                line.append(percent(ready.against(plain, "tokens")))
                for axis in axes:
                    line += [ready.step_cost(plain, axis), percent(ready.against(plain, axis))]
                lines.append(line)
    head = ["model", "transformer", "seeds", "its cost per token", "equal tokens"]
    for name in axes.values():
        head += [f"{name} of a step", f"equal {name}"]
    return aligned([head, *(line + [""] * (len(head) - len(line)) for line in lines)]) if lines else None


def ways_table(records: Sequence[Record]) -> str | None:
    """One line per shape and way to train, against the same transformer."""
    lines = []
    for shape in SHAPES:
        plain, of_shape = Runs(records, f"n{shape.key}"), []
        ways = {"": RECIPE}
        for key, way in WAYS.items():
            shorter = shape in way.shapes and way.steps_of(shape) < shape.steps
            ways[f"-{key}"] = f"{way.name} ({way.steps_of(shape)} steps)" if shorter else way.name
        for key, name in ways.items():
            ready = Runs(records, f"d{shape.key}{key}")
            if not ready or not plain:
                continue
            of_shape.append(
                [
                    shape.name,
                    name,
                    str(len(ready.by_seed)),
                    ready.step_cost(plain),
                    spread(ready.perplexities()),
                    percent(ready.against(plain, "tokens")),
                    percent(ready.against(plain, "macs")),
                    percent(ready.streamed(), 2),
                ]
            )
        # The recipe alone is in the first table.
        lines += of_shape if len(of_shape) > 1 else []
    head = ["model", "training", "seeds", "cost of a step", "perplexity", "equal tokens", "equal compute", "streamed"]
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
        columns.append(f"{shape.name}, {steps} steps")
        for key, name in keys.items():
            lines.setdefault(name, [""] * (len(columns) - 1)).append(spread(Runs(records, key).perplexities()))
        plain = Runs(records, f"n{shape.key}")
        if plain:
            at = [exp(plain.loss_at(seed, "step", steps)) for seed in plain.by_seed if seed == 0]
            lines.setdefault("transformer at equal tokens", [""] * (len(columns) - 1)).append(spread(at))
    rows = [[name, *cells, *[""] * (len(columns) - len(cells))] for name, cells in lines.items() if any(cells)]
    return aligned([["factor on the correction", *columns], *rows]) if columns else None


def _by_weight(records: Sequence[Record]) -> list[tuple[str, Runs]]:
    """The rows of the convergence term that have runs, under their names."""
    rows = [
        (t.name if t.part == "convergence" else "weight 0", Runs(records, t.key)) for t in trials_of(["convergence"])
    ]
    return [(name, runs) for name, runs in rows if runs]


def convergence_table(records: Sequence[Record]) -> str | None:
    """The convergence term: quality, streaming and contraction."""
    lines = []
    for name, runs in _by_weight(records):
        found = [r["evaluation"] for r in runs.by_seed.values()]
        rate = spread([e["norm_rate"] for e in found], 2)
        lines.append([name, str(len(found)), spread(runs.perplexities()), percent(runs.streamed(), 2), rate])
    head = ["convergence term", "seeds", "perplexity", "streamed", "L̂ (norm)"]
    return aligned([head, *lines]) if len(lines) > 1 else None


def prompts_table(records: Sequence[Record]) -> str | None:
    """What reading a prompt costs with the models of the convergence term, by solver and tolerance."""
    lines = []
    rows = _by_weight(records)
    for name, runs in rows if len(rows) > 1 else ():
        found = [r["evaluation"]["prompts"] for r in runs.by_seed.values() if r["evaluation"].get("prompts")]
        for solver in PARALLEL_SOLVERS if found else ():
            cells = [[e[solver][f"{tolerance:g}"] for e in found] for tolerance in TOLERANCES]
            shown = [
                f"{spread([c['cost'] for c in cell])} (error {fmean(c['error'] for c in cell):.0e})" for cell in cells
            ]
            lines.append([name, solver, str(len(found)), *shown])
    head = ["convergence term", "solver", "seeds", *(f"tolerance {tolerance:g}" for tolerance in TOLERANCES)]
    return aligned([head, *lines]) if lines else None


def conversion_table(records: Sequence[Record]) -> str | None:
    """Pretrained models trained further in several ways."""
    lines = []
    bases = dict.fromkeys(r["model"]["pretrained"] for r in records if "pretrained" in r["model"])
    for base in bases:
        of_base = [r for r in records if r["model"].get("pretrained") == base]
        plain = Runs(of_base, "convert-continued")
        for trial in trials_of(["conversion"]):
            runs = Runs(of_base, trial.key)
            if not runs:
                continue
            before = [exp(r["curve"]["val_loss"][0]) for r in runs.by_seed.values()]
            # The control makes more steps, so its row shows where the others end.
            ends = [runs.end(seed, "step") / trial.longer for seed in runs.by_seed]
            after = [exp(runs.loss_at(seed, "step", end)) for seed, end in zip(runs.by_seed, ends, strict=True)]
            compared = [
                percent(runs.against(plain, axis), 2) if plain and trial.ready else "" for axis in ("step", "macs")
            ]
            lines.append([base, trial.name, str(len(before)), spread(before, 3), spread(after, 3), *compared])
    head = ["model", "training", "seeds", "before", "after", "equal steps", "equal compute"]
    return aligned([head, *lines]) if lines else None


TABLES = {
    "compute": compute_table,
    "controls": controls_table,
    "ways": ways_table,
    "scale": scale_table,
    "convergence": convergence_table,
    "prompts": prompts_table,
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


assert set(TITLES) == set(TABLES)
