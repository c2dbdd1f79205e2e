"""The paper's tables in miniature: for each line, the row of the paper that it stands for, and what is measured.

A line without a row of the paper is a control that the paper lacks.
"""

from dataclasses import dataclass
from functools import partial

from contextready.reproduce.measures import (
    At,
    Cost,
    Crossover,
    During,
    Measure,
    Minus,
    Percent,
    Perplexity,
    Rate,
    Streamed,
)
from contextready.reproduce.runs import RUNS


@dataclass(frozen=True)
class Line:
    """One line of a table."""

    name: str
    """Our models in words."""
    measures: dict[str, Measure]
    """What is measured, by the key of the paper's column or of a column of our own."""
    row: int | None = None
    """The row of the paper's table."""


@dataclass(frozen=True)
class Column:
    """A column of a table in miniature."""

    key: str
    heading: str
    digits: int = 1
    signed: bool = False


@dataclass(frozen=True)
class Miniature:
    """A table of the paper in miniature."""

    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    notes: tuple[str, ...] = ()
    name_column: str = "name"
    """The key of the paper's column that names its rows."""

    @property
    def runs(self) -> tuple[str, ...]:
        """The runs behind it, each one once."""
        found = [run for line in self.lines for measure in line.measures.values() for run in measure.runs]
        return tuple(dict.fromkeys(found))


PPL, STREAMED = Column("ppl", "PPL"), Column("streaming", "streamed")
COST = Column("flops", "cost (k)", 0)
N, D = Column("ppl_n", "transformer"), Column("ppl_d", "context-ready")
DELTA = Column("delta", "difference", signed=True)
RELATIVE = Column("percent", "in %", signed=True)
BY_PASSES = tuple(Column(f"k{k}", f"K={k}", 2) for k in (1, 2, 3, 5, 10))


def _alone(run: str, row: int | None = None) -> Line:
    """A line with the perplexity of one run."""
    measures: dict[str, Measure] = {"flops": Cost(run), "ppl": Perplexity(run)}
    if run.startswith("d"):
        measures["streaming"] = Streamed(run)
    return Line(RUNS[run].name, measures, row)


def _pair(ready: str, plain: str, row: int | None = None, name: str | None = None) -> Line:
    """A line that compares a context-ready run with a transformer."""
    one, other = Perplexity(ready), Perplexity(plain)
    measures: dict[str, Measure] = {
        "ppl_n": other,
        "ppl_d": one,
        "delta": Minus(one, other),
        "percent": Percent(one, other),
    }
    return Line(name or f"{RUNS[ready].name} against {RUNS[plain].name}", measures, row)


def _by_passes(run: str, row: int | None = None) -> Line:
    measures: dict[str, Measure] = {f"k{k}": Perplexity(run, k) for k in (1, 2, 3, 5, 10)}
    measures |= {"streaming": Streamed(run), "correction": Minus(Perplexity(run, 1), Perplexity(run, 5))}
    return Line(RUNS[run].name, measures, row)


def _rated(run: str, row: int | None = None) -> Line:
    line = _alone(run, row)
    return Line(line.name, line.measures | {"rate": Rate(run)}, row)


def _matched(layers: int, row: int) -> list[Line]:
    converted, start, plain = f"d{layers}-c96-matched", f"n{layers}-c96-start", f"n{layers}-c96"
    scratch = f"d{layers}-c96"
    return [
        Line(
            f"D={layers} converted, against N={layers}",
            _pair(converted, plain).measures | {"crossover": Crossover(converted, plain, start)},
            row,
        ),
        Line(
            f"D={layers} from scratch, against N={layers}",
            _pair(scratch, plain).measures | {"crossover": Crossover(scratch, plain)},
        ),
    ]


def _converted(layers: int, row: int) -> list[Line]:
    run, plain, long = f"d{layers}-c96-tuned", f"n{layers}-c96", f"n{layers}-c96-long"
    after = Perplexity(run)
    lines = []
    for what, axis in (("as many more tokens", "tokens"), ("as much more compute", "macs")):
        control = At(long, run, axis, after=plain)
        lines.append(
            Line(
                f"N={layers} → D={layers}; control with {what}",
                {
                    "before": Perplexity(plain),
                    "after": after,
                    "control": control,
                    "delta": Minus(after, control),
                    "percent": Percent(after, control),
                },
                row if axis == "tokens" else None,
            )
        )
    return lines


_SEQ = ("d1-c128-t64", "d1-c128", "d1-c128-t256", "d2-c96", "d3-c96", "d5-c96")
_K_MIN = {"random": "d1-c50-k2-10", "fixed": "d1-c50-k10", "term": "d1-c50-k10-term"}
_D1 = ("d1-c128-k10", "d1-c128-k2-10", "d1-c128-tuned")
MATCHED_DEPTHS = (1, 2, 3, 5)

MINIATURES: dict[str, Miniature] = {
    "main": Miniature(
        (COST, PPL, STREAMED),
        (
            _alone("d2-c144", 0),
            _alone("d3-c120", 1),
            _alone("n3-c136", 2),
            _alone("n6-c96-head", 3),
            _alone("n6-c96"),
            _alone("n1-c240", 4),
            _alone("n6-c136", 5),
            _alone("n3-c192", 6),
            _alone("d2-c208", 7),
            _alone("n2-c240", 8),
        ),
        (
            "The cost is in thousand multiply-accumulates per token, with the head, as in the paper.",
            "N=6 C=96 has one head in the line that stands for N=12 C=768, as in the author's run, and four in the "
            "next one.",
        ),
    ),
    "efficiency": Miniature(
        (COST, PPL, STREAMED),
        (
            _alone("n3-c96", 0),
            _alone("n4-c96", 1),
            _alone("d3-c96", 2),
            _alone("n5-c96", 3),
            _alone("n6-c96", 4),
            _alone("d5-c96", 5),
            _alone("d3-c96-term"),
            _alone("d3-c96-random"),
        ),
        ("Without the head, N=3, 4, 5 and 6 cost 36, 48, 60 and 72 C², D=3 and D=5 44 and 68 C².",),
    ),
    "width": Miniature(
        (N, D, DELTA, RELATIVE),
        (
            _pair("d2-c48-half", "n2-c48", 0),
            _pair("d2-c96-half", "n2-c96", 1),
            _pair("d2-c192-half", "n2-c192", 2),
            *(_pair(f"d2-c{c}", f"n2-c{c}", name=f"D=2 C={c}, equal batches, against N=2") for c in (48, 96, 192, 384)),
        ),
        (
            "The first three context-ready models have half the batch and twice the steps, as in the author's runs. "
            "The others have the same batches as the transformers.",
        ),
        "width",
    ),
    "d1": Miniature(
        (Column("early", "PPL at 40 %"), Column("ppl_100k", "PPL at 80 %"), Column("best", "at the end"), STREAMED),
        (
            Line(
                "N=3 C=96",
                {"early": During("n3-c96", 0.4), "ppl_100k": During("n3-c96", 0.8), "best": Perplexity("n3-c96")},
                0,
            ),
            *(
                Line(
                    RUNS[run].name,
                    {
                        "early": During(run, 0.4),
                        "ppl_100k": During(run, 0.8),
                        "best": Perplexity(run, 10),
                        "streaming": Streamed(run),
                    },
                    row,
                )
                for row, run in enumerate(_D1[:2], 1)
            ),
            Line(
                RUNS[_D1[2]].name,
                {
                    "early": Perplexity("n1-c128-start"),
                    "ppl_100k": During(_D1[2], 2 / 3),
                    "best": Perplexity(_D1[2], 10),
                    "streaming": Streamed(_D1[2]),
                },
                3,
            ),
            Line(
                "D=1 C=128, K=2..5",
                {
                    "early": During("d1-c128", 0.4),
                    "ppl_100k": During("d1-c128", 0.8),
                    "best": Perplexity("d1-c128"),
                    "streaming": Streamed("d1-c128"),
                },
            ),
        ),
        ("The fine-tuned layer makes 40 % of the steps as a transformer (its first column), the others with K=10.",),
    ),
    "seq": Miniature(
        (*BY_PASSES, Column("streaming", "streamed", 2), Column("correction", "K=1 minus K=5")),
        tuple(_by_passes(run, row) for row, run in enumerate(_SEQ)),
        name_column="layers",
    ),
    "depth-d1": Miniature(
        (*BY_PASSES, Column("streaming", "streamed", 2)),
        tuple(_by_passes(run, row) for row, run in ((0, "d1-c128-t64"), (2, "d1-c128"), (4, "d1-c128-t256"))),
        name_column="block_size",
    ),
    "depth-deep": Miniature(
        (*BY_PASSES, Column("streaming", "streamed", 2)),
        tuple(_by_passes(run, row) for row, run in enumerate(("d2-c96", "d3-c96", "d5-c96"))),
        name_column="layers",
    ),
    "correction": Miniature(
        (COST, PPL, STREAMED),
        (
            *(
                _alone(run, row)
                for row, run in enumerate(("d3-c96-blind", "n3-c96-ffn", "d3-c96-block_head", "n3-c96"))
            ),
            *(_alone(run) for run in ("d1-c96-tied_norm", "d1-c96", "n1-c96")),
        ),
        ("The last three lines compare a correction that shares the block's own FFN with a dedicated one.",),
    ),
    "variants": Miniature(
        (COST, PPL, STREAMED, Column("rate", "L̂ (channel)", 2)),
        tuple(
            _rated(f"d{d}-c96{end}", row)
            for row, (d, end) in enumerate((d, end) for d in (2, 3) for end in ("-blind", "", "-concat_z"))
        ),
    ),
    "scale": Miniature(
        (N, D, DELTA, RELATIVE),
        (
            _pair("d3-c50-blind", "n3-c50-ffn", 0),
            _pair("d3-c74-blind", "n3-c74-ffn", 1),
            _pair("d3-c96", "n4-c96", 2),
            _pair("d3-c160", "n4-c160", 3),
        ),
    ),
    "k_min": Miniature(
        tuple(Column(key, RUNS[run].name.replace("D=1 C=50 blind, ", ""), 2) for key, run in _K_MIN.items()),
        tuple(
            Line(name, {key: measure(run) for key, run in _K_MIN.items()}, row)
            for name, measure, row in (
                ("PPL at K=10", partial(Perplexity, passes=10), 0),
                ("PPL streamed", Streamed, 1),
                ("PPL at K=1", partial(Perplexity, passes=1), 2),
                ("L̂ (channel)", Rate, 3),
                ("L̂ (norm)", partial(Rate, kind="norm"), None),
            )
        ),
    ),
    "k10": Miniature(
        (N, D, DELTA, RELATIVE),
        tuple(
            Line(
                f"D=1 C=128, K=10, against N=3 C=96, after {round(100 * at)} % of the steps",
                {
                    "ppl_n": During("n3-c96", at),
                    "ppl_d": During("d1-c128-k10", at),
                    "delta": Minus(During("d1-c128-k10", at), During("n3-c96", at)),
                    "percent": Percent(During("d1-c128-k10", at), During("n3-c96", at)),
                },
                row,
            )
            for row, at in enumerate((0.4, 0.6, 0.7, 0.8, 1.0))
        ),
        name_column="steps",
    ),
    "block-size": Miniature(
        (N, D, DELTA, RELATIVE),
        (
            _pair("d1-c128-t64", "n3-c96-t64", 0),
            _pair("d1-c128", "n3-c96", 1, "D=1 C=128, T=128 against N=3 C=96, T=128"),
            _pair("d1-c128-t256", "n3-c96-t256", 2),
        ),
        name_column="block_size",
    ),
    "token-matched": Miniature(
        (N, D, DELTA, RELATIVE, Column("crossover", "ahead from (tokens)", -3)),
        tuple(line for row, d in enumerate(MATCHED_DEPTHS) for line in _matched(d, row)),
    ),
    "fine-tuning": Miniature(
        (
            Column("before", "before"),
            Column("after", "converted"),
            Column("control", "trained further"),
            DELTA,
            RELATIVE,
        ),
        (*_converted(3, 0), *_converted(5, 1)),
    ),
    "wikipedia": Miniature(
        (COST, PPL, STREAMED),
        tuple(
            _alone(run, row)
            for row, run in enumerate(
                ("d3-c144-concat_z", "n4-c144", "d5-c96", "n5-c96-ffn", "d2-c96-concat_z", "n3-c96")
            )
        ),
    ),
}
"""The tables that are reproduced by training, in the order of the paper."""

CONTROLS = Miniature(
    (COST, PPL, STREAMED, Column("rate", "L̂ (channel)", 2)),
    tuple(_rated(run) for run in ("d3-c96-k2", "d3-c96-k5", "d3-c96", "d3-c96-term", "d1-c128", "d1-c128-term")),
    ("Fixed K against K drawn from 2 to 5, and the convergence term on and off. The paper has no table of these.",),
)
FRACTIONS = (0.2, 0.4, 0.6, 0.8, 1.0)
"""Of the training, for trends over its length."""


def _over_time(one: str, other: str) -> Line:
    """How much higher the perplexity of one run is than that of another one with as many steps, as they train."""
    measures: dict[str, Measure] = {f"{at:.0%}": Percent(During(one, at), During(other, at)) for at in FRACTIONS}
    return Line(f"{RUNS[one].name} against {RUNS[other].name}", measures)


TREND = Miniature(
    tuple(Column(f"{at:.0%}", f"at {at:.0%}", 1, signed=True) for at in FRACTIONS),
    (
        *(_over_time(f"n{n}-c96", "n1-c96") for n in (3, 6)),
        *(_over_time(f"d{d}-c96", f"n{d}-c96") for d in MATCHED_DEPTHS),
        _over_time("d3-c96", "n4-c96"),
        _over_time("d5-c96", "n6-c96"),
        *(_over_time(f"d2-c{c}", f"n2-c{c}") for c in (48, 192)),
    ),
    (
        "The difference in perplexity, in percent, after a part of the training, at equal tokens. It shows where an "
        "effect is heading: the first two lines compare deep transformers with a shallow one, the others context-ready "
        "models with transformers.",
    ),
)
MINIATURES |= {"controls": CONTROLS, "trend": TREND}
OF_OUR_OWN = {
    "controls": "controls: fixed K and the convergence term (not in the paper)",
    "trend": "trend: differences during the training (not in the paper)",
}
"""Tables that the paper does not have, with their titles."""


def runs_of(tables: tuple[str, ...] | list[str]) -> list[str]:
    """Return the runs behind these tables, each one once."""
    return list(dict.fromkeys(run for table in tables for run in MINIATURES[table].runs))
