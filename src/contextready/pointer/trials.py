"""The trials behind the tables, at paper scale and in miniature: the settings that each passes to `crt pointer`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from contextready.errors import ContextReadyError, nearest
from contextready.train import trials

PASSES = (2, 5, 10, 20)
PARTS = ("headline", "table", "layout", "growth", "parallel")


@dataclass(frozen=True)
class Trial(trials.Trial):
    """A row of the tables: a model and its training settings, to be run with several seeds."""

    answers: str = "masked"
    layers: int = 1
    ready: bool = True
    """Whether the model is context-ready."""
    compared_in: tuple[str, ...] = ()
    """Other parts whose tables also show this row."""

    def belongs_to(self, part: str) -> bool:
        """Whether this row appears in the table of a part."""
        return part == self.part or part in self.compared_in

    def words(self, seed: int, out: Path) -> tuple[str, ...]:
        """The arguments for `crt pointer`."""
        recipe, *rest = super().words(seed, out)
        return (recipe, f"answers={self.answers}", *rest)


@dataclass(frozen=True)
class Scale:
    """The runs at one scale: recipes and settings of the transformers by depth, and of the context-ready layer."""

    transformers: dict[int, tuple[str, tuple[str, ...]]]
    ready: str
    variants: dict[str, tuple[str, ...]]
    """The `answers` of the main table, and what else must be set for each; the other parts have the first ones."""
    growth: dict[str, tuple[str, tuple[str, ...]]]
    layout: tuple[int, ...] = ()
    """Depths of the transformers in the layout of the author's runs, if the main table has other layouts."""
    layout_settings: tuple[str, ...] = ()
    """Settings for all trials in that layout, which take more steps to learn."""
    parallel: tuple[str, ...] = ()
    """Settings for all trials that compare training methods, which are the most expensive ones."""


SCALES = {
    "cpu": Scale(
        {n: ("pointer-mini", ("correction=none", f"layers={n}", "eval_every=100")) for n in (1, 2, 3, 4, 5, 6)},
        "pointer-mini",
        {"masked": (), "visible": ()},
        {f"H={h}": ("pointer-mini", (f"hops={h}", "steps=10000")) for h in (8, 12)},
        layout=(2, 4),
        layout_settings=("steps=6000",),
        parallel=("batch_size=32",),
    ),
    "paper": Scale(
        {n: (f"pointer/pointer-n{n}-c256", ()) for n in (1, 3, 5, 10, 11, 12)},
        "pointer/pointer-d1-c256",
        # The paper prints visible answers with 10 tables after the base table; the author's runs had 9 and no answers.
        {"absent": (), "visible": ("hops=10",)},
        {
            "H=9, M=10, C=128": ("pointer/pointer-d1-c128", ()),
            "H=19, M=8, C=512": ("pointer/pointer-d1-c512", ()),
        },
    ),
}


def trials_of(scale: str, parts: Sequence[str]) -> list[Trial]:
    """List the trials of these parts, each one once and the most important ones first."""
    if scale not in SCALES:
        raise ContextReadyError(f"Unknown scale '{scale}'; {nearest(scale, list(SCALES))}")
    s = SCALES[scale]
    rows: list[Trial] = []
    main, few = next(iter(s.variants)), {min(n for n in s.transformers if n > 1)}
    for answers, more in s.variants.items():
        # Parallel trials with their own settings need their own BPTT trial to compare with.
        others = ("growth",) if s.parallel else ("growth", "parallel")
        layout = ("layout",) if answers == "absent" else ()
        compared_in = (*others, *layout) if answers == main else layout
        rows.append(
            Trial(f"{answers}-d1", "D=1 BPTT", "table", s.ready, more, answers=answers, compared_in=compared_in)
        )
        # The deepest models take longest. Starting with them leaves no core idle at the end.
        for n in sorted(s.transformers, key=lambda n: (n not in few, -n)):
            rows.append(_transformer(s, n, "table", answers, more, layout))
    if s.layout:
        rows.append(Trial("absent-d1", "D=1 BPTT", "layout", s.ready, s.layout_settings, answers="absent"))
        rows += [_transformer(s, n, "layout", "absent", s.layout_settings) for n in s.layout]
    for name, (recipe, settings) in s.growth.items():
        rows.append(Trial(f"growth-{_plain(name)}", f"D=1 BPTT, {name}", "growth", recipe, settings, answers=main))
    first, last = PASSES[0], PASSES[-1]
    ways: list[tuple[str, str, tuple[str, ...]]] = [("bptt", "D=1 BPTT", ())] if s.parallel else []
    ways += [(f"k{k}", f"D=1, K={k} passes", ("gradient=unroll", f"passes={k}")) for k in PASSES]
    ways += [
        (f"random{k}", f"D=1, K drawn from {first} to {k}", ("gradient=unroll", f"passes={first}..{k}"))
        for k in PASSES[1:]
    ]
    ways.append(("implicit", f"D=1, implicit at K={last}", ("gradient=implicit", f"passes={last}")))
    rows += [
        Trial(f"parallel-{key}", name, "parallel", s.ready, (*words, *s.parallel), answers=main)
        for key, name, words in ways
    ]
    headline = {f"{main}-n{n}" for n in few} | {f"{main}-d1"}
    return [
        trial
        for trial in rows
        if any(trial.key in headline if part == "headline" else trial.belongs_to(part) for part in parts)
    ]


def _transformer(
    s: Scale, n: int, part: str, answers: str, more: tuple[str, ...], compared_in: tuple[str, ...] = ()
) -> Trial:
    recipe, settings = s.transformers[n]
    return Trial(
        f"{answers}-n{n}",
        f"N={n}",
        part,
        recipe,
        (*settings, *more),
        answers=answers,
        layers=n,
        ready=False,
        compared_in=compared_in,
    )


def _plain(name: str) -> str:
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())
