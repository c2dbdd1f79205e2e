"""The trials behind the tables of state tracking: the settings that each passes to `crt task`."""

from collections.abc import Sequence
from dataclasses import dataclass

from contextready.train import trials

PARTS = ("headline", "table", "ways", "convert")
TABLE = ("s5", "a5", "z60", "parity", "assign")
WAYS_ON = ("a5", "parity")
CONVERTED = ("parity", "assign")
LENGTHS = {"a5": 16, "z60": 16, "parity": 16, "assign": 5}
"""Lengths of training other than the default, so that a seed of everything takes about an hour and a half."""
DEPTHS = (1, 2, 3, 4, 5, 6)
"""Layers of the transformers."""
READY = (1, 2)
"""Layers of the context-ready models."""
WINDOW = "window=4"
"""Attention of the context-ready models. With a short window, only the carried vector reaches back far."""
HEADLINE = ("s5-d1", "s5-n2", "s5-n4")
WAYS: dict[str, tuple[str, tuple[str, ...]]] = {
    "short": ("BPTT without a curriculum", (WINDOW, "curriculum=0")),
    "full": ("BPTT with full attention", ()),
    "k4": ("K=4", (WINDOW, "gradient=unroll", "passes=4")),
    "k8": ("K=2..8", (WINDOW, "gradient=unroll", "passes=2..8")),
    "k16": ("K=2..16", (WINDOW, "gradient=unroll", "passes=2..16")),
    "k16-convergence": (
        "K=2..16, convergence term 0.1",
        (WINDOW, "gradient=unroll", "passes=2..16", "convergence_weight=0.1"),
    ),
    "truncated": ("K=2..16, through the last pass only", (WINDOW, "gradient=truncated", "passes=2..16")),
    "implicit": ("implicit at K=16", (WINDOW, "gradient=implicit", "passes=16")),
}
"""Other ways to train one context-ready layer than BPTT with a curriculum and a short window."""
CONVERSIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "plain": ("trained further, no correction", ("correction=none",)),
    "converted": ("converted, all weights", ()),
    "correction": ("converted, correction only", ("tune=correction",)),
}
"""How a pretrained model is trained further. Steps of BPTT cost about as much as those without a correction."""


@dataclass(frozen=True)
class Trial(trials.Trial):
    """A row of the tables: a task, a model and its training settings, to be run with several seeds."""

    layers: int = 1
    ready: bool = True
    """Whether the model is context-ready."""
    gru: bool = False

    @property
    def task(self) -> str:
        """The name of the task."""
        return self.recipe

    def belongs_to(self, part: str) -> bool:
        """Whether this row appears in a part; the headline is some rows of the table."""
        return self.key in HEADLINE if part == "headline" else part == self.part


def trials_of(parts: Sequence[str]) -> list[Trial]:
    """List the trials of these parts, each one once."""
    rows = [trial for task in TABLE for trial in _table(task)]
    for task in WAYS_ON:
        rows += [
            Trial(f"{task}-d1-{key}", name, "ways", task, (*_length(task), *words))
            for key, (name, words) in WAYS.items()
        ]
    for task in CONVERTED:
        rows += [
            Trial(f"{task}-{key}", name, "convert", task, (*_length(task), *words), ready=key != "plain")
            for key, (name, words) in CONVERSIONS.items()
        ]
    return [trial for trial in rows if any(trial.belongs_to(part) for part in parts)]


def _length(task: str) -> tuple[str, ...]:
    """The setting of the length at which a task is trained."""
    return (f"length={LENGTHS[task]}",) if task in LENGTHS else ()


def _table(task: str) -> list[Trial]:
    """The models that are compared on a task."""
    length = _length(task)
    ready = [Trial(f"{task}-d{d}", f"D={d}", "table", task, (*length, WINDOW, f"layers={d}"), layers=d) for d in READY]
    transformers = [
        Trial(
            f"{task}-n{n}", f"N={n}", "table", task, (*length, "correction=none", f"layers={n}"), layers=n, ready=False
        )
        for n in DEPTHS
    ]
    gru = Trial(f"{task}-gru", "GRU", "table", task, (*length, "correction=none"), ready=False, gru=True)
    return [*ready, *transformers, gru]
