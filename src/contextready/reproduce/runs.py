"""The runs of the miniature: small models, how each is trained, and the runs that others start from.

The tables share runs: a model that stands in several tables is trained once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from contextready.errors import ContextReadyError
from contextready.train import trials

RECIPE = "miniature"
WIDTH = 96
"""The width of most models."""
AS_PUBLISHED = ("correction_init=random", "correction_scale=1")
"""The start of the correction that the paper has."""
START = 0.36
"""When a transformer is converted in the token-matched table, as a fraction of all steps: 409M of 1,126M tokens."""
MATCHED = round((1.0 - START) * 2.0, 6)
"""The steps of its conversion: the rest of the tokens in batches of half the size."""


@dataclass(frozen=True)
class Run(trials.Trial):
    """A run of the miniature."""

    start: str | None = None
    """The run that it takes its weights from."""
    length: float = 1.0
    """How many times as many steps it makes as the recipe or the user says."""

    def words(self, seed: int, out: Path) -> tuple[str, ...]:
        """The arguments of the command that trains it."""
        origin = () if self.start is None else (f"init_from={out / f'{self.start}-seed{seed}'}",)
        return (*super().words(seed, out), *origin)


def _plain(layers: int, width: int = WIDTH, *more: str, suffix: str = "", name: str = "", length: float = 1.0) -> Run:
    """A transformer."""
    settings = ("correction=none", f"layers={layers}", f"width={width}", *more)
    return Run(
        f"n{layers}-c{width}{suffix}", f"N={layers} C={width}{name}", "transformer", RECIPE, settings, length=length
    )


def _ready(
    layers: int,
    width: int = WIDTH,
    *more: str,
    suffix: str = "",
    name: str = "",
    start: str | None = None,
    length: float = 1.0,
) -> Run:
    """A context-ready model."""
    settings = (f"layers={layers}", f"width={width}", *more)
    return Run(
        f"d{layers}-c{width}{suffix}",
        f"D={layers} C={width}{name}",
        "context-ready",
        RECIPE,
        settings,
        start=start,
        length=length,
    )


def _variant(layers: int, width: int, correction: str, *more: str) -> Run:
    return _ready(layers, width, f"correction={correction}", *more, suffix=f"-{correction}", name=f" {correction}")


ONE_HEAD, FFN = ("heads=1",), ("extra_ffn=true",)
HALF = ("batch_size=4",)
WIDE = 128
"""The width of the single layer that costs as much as three layers at the usual width."""

_ALL = [
    # Models that stand in several tables.
    *(_plain(n) for n in (1, 2, 3, 4, 5, 6)),
    *(_ready(d) for d in (1, 2, 3, 5)),
    # Equal cost, at two budgets.
    _ready(2, 144),
    _ready(3, 120),
    _plain(3, 136),
    _plain(6, WIDTH, *ONE_HEAD, suffix="-head", name=", 1 head"),
    _plain(1, 240),
    _plain(6, 136),
    _plain(3, 192),
    _ready(2, 208),
    _plain(2, 240),
    # Controls of the efficiency table.
    _ready(3, WIDTH, "convergence_weight=0.1", suffix="-term", name=", convergence term 0.1"),
    _ready(3, WIDTH, *AS_PUBLISHED, suffix="-random", name=", random start"),
    # Widths. Half the batch and twice the steps are the author's: the same tokens in twice as many updates.
    *(_plain(2, c) for c in (48, 192, 384)),
    *(_ready(2, c) for c in (48, 192, 384)),
    *(
        _ready(2, c, *HALF, suffix="-half", name=", half the batch, twice the steps", length=2.0)
        for c in (48, WIDTH, 192)
    ),
    # One wide layer, with the three strategies for ten passes, and at other block sizes.
    _ready(1, WIDE),
    _ready(1, WIDE, "passes=10", suffix="-k10", name=", K=10"),
    _ready(1, WIDE, "passes=2..10", suffix="-k2-10", name=", K=2..10"),
    _plain(1, WIDE, suffix="-start", name=", 0.4 of the steps", length=0.4),
    _ready(1, WIDE, "passes=10", suffix="-tuned", name=", K=10 after N=1", start=f"n1-c{WIDE}-start", length=0.6),
    _ready(1, WIDE, "convergence_weight=0.1", suffix="-term", name=", convergence term 0.1"),
    *(
        _ready(1, WIDE, f"block_size={t}", f"batch_size={b}", suffix=f"-t{t}", name=f", T={t}")
        for t, b in ((64, 8), (256, 4))
    ),
    *(
        _plain(3, WIDTH, f"block_size={t}", f"batch_size={b}", suffix=f"-t{t}", name=f", T={t}")
        for t, b in ((64, 8), (256, 4))
    ),
    # Corrections.
    _variant(3, WIDTH, "blind"),
    _variant(3, WIDTH, "block_head", *AS_PUBLISHED),
    _variant(3, WIDTH, "concat_z"),
    _variant(2, WIDTH, "blind"),
    _variant(2, WIDTH, "concat_z"),
    _variant(1, WIDTH, "tied_norm", *AS_PUBLISHED),
    *(_plain(n, WIDTH, *FFN, suffix="-ffn", name=" + FFN") for n in (3, 5)),
    _variant(3, 144, "concat_z"),
    _plain(4, 144),
    # Narrow and less narrow models; the two narrowest have the paper's own widths and a single head.
    *(_variant(3, c, "blind", *ONE_HEAD) for c in (50, 74)),
    *(_plain(3, c, *FFN, *ONE_HEAD, suffix="-ffn", name=" + FFN") for c in (50, 74)),
    _ready(3, 160),
    _plain(4, 160),
    # The k_min ablation, at the paper's own width.
    _ready(1, 50, "correction=blind", *ONE_HEAD, "passes=2..10", suffix="-k2-10", name=" blind, K=2..10"),
    _ready(1, 50, "correction=blind", *ONE_HEAD, "passes=10", suffix="-k10", name=" blind, K=10"),
    _ready(
        1,
        50,
        *("correction=blind", *ONE_HEAD, "passes=10", "convergence_weight=0.1"),
        suffix="-k10-term",
        name=" blind, K=10, convergence term 0.1",
    ),
    # Fixed K.
    _ready(3, WIDTH, "passes=2", suffix="-k2", name=", K=2"),
    _ready(3, WIDTH, "passes=5", suffix="-k5", name=", K=5"),
    # Conversions after a part of the steps, with equal tokens in the end.
    *(_plain(n, suffix="-start", name=f", {START:g} of the steps", length=START) for n in (1, 2, 3, 5)),
    *(
        _ready(
            d, WIDTH, *HALF, suffix="-matched", name=", converted early", start=f"n{d}-c{WIDTH}-start", length=MATCHED
        )
        for d in (1, 2, 3, 5)
    ),
    # Conversions after all steps, and the same transformers trained further, to equal compute.
    _ready(3, WIDTH, suffix="-tuned", name=", converted", start=f"n3-c{WIDTH}", length=0.5),
    _plain(3, WIDTH, suffix="-long", name=", trained further", length=3.0),
    _ready(5, WIDTH, suffix="-tuned", name=", converted", start=f"n5-c{WIDTH}", length=0.25),
    _plain(5, WIDTH, suffix="-long", name=", trained further", length=2.0),
]
RUNS: dict[str, Run] = {run.key: run for run in _ALL}
assert len(RUNS) == len(_ALL)


def with_starts(keys: Sequence[str]) -> list[Run]:
    """Return these runs without repetitions, each after the run that it starts from."""
    found: dict[str, Run] = {}
    for key in keys:
        if key not in RUNS:
            raise ContextReadyError(f"There is no run {key} in the miniature.")
        start = RUNS[key].start
        for one in (*((start,) if start is not None else ()), key):
            found.setdefault(one, RUNS[one])
    return list(found.values())
