"""The checks of a claim on the runs of the miniature: what is measured, in which unit, and which rule judges it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from contextready.reproduce.measures import Closed, Measure, Minus, Percent, Perplexity, Rate, Records, Streamed
from contextready.reproduce.runs import RUNS
from contextready.reproduce.verdicts import Verdict, of_effect, of_limit, of_match, of_range

MOST_PASSES = 10
"""The K at which the passes count as converged, as in the paper."""
AGREEMENT = 0.01
"""The largest difference in PPL that the paper sees between streaming and K=10."""


@dataclass(frozen=True)
class Part:
    """One measurement for a claim."""

    what: str
    measure: Measure
    unit: str
    judge: Callable[[Sequence[float]], Verdict]
    paper: str
    """The figure of the paper, in the same unit if it can be compared."""
    digits: int = 1
    is_control: bool = False
    """Whether it is a control that the paper lacks. It has a verdict of its own and does not count for the claim."""

    def values(self, records: Records) -> list[float]:
        """The value of every seed."""
        return list(self.measure.of(records).values())


@dataclass(frozen=True)
class Check:
    """How a claim is checked."""

    parts: tuple[Part, ...]
    tables: tuple[str, ...]
    """The tables of the miniature whose runs it needs."""
    note: str = ""
    """What a reader of the verdict should know."""


def effect(
    what: str,
    first: Measure,
    second: Measure,
    theirs: tuple[str, str] | None = None,
    *,
    sign: int = -1,
    is_control: bool = False,
) -> Part:
    """A difference in percent; `theirs` are the two perplexities that the paper prints, if it prints any."""
    expected = float(sign) if theirs is None else 100.0 * (float(theirs[0]) / float(theirs[1]) - 1.0)
    judge = partial(of_effect, expected=expected, sized=theirs is not None)
    side = "lower" if sign < 0 else "higher"
    paper = side if theirs is None else f"{expected:+.1f} % ({theirs[0]} against {theirs[1]})"
    return Part(what, Percent(first, second), "%", judge, paper, is_control=is_control)


def against(one: str, other: str, theirs: tuple[str, str] | None = None, *, is_control: bool = False) -> Part:
    """The perplexity of one run against that of another one, which should be higher."""
    what = f"{RUNS[one].name} against {RUNS[other].name}"
    return effect(what, Perplexity(one), Perplexity(other), theirs, is_control=is_control)


def match(what: str, first: Measure, second: Measure, most: float, theirs: str) -> Part:
    """A perplexity that is at most a few percent above another one."""
    return Part(what, Percent(first, second), "%", partial(of_match, most=most), theirs)


def within(
    what: str,
    measure: Measure,
    low: float,
    high: float,
    theirs: str,
    *,
    unit: str = "",
    digits: int = 2,
    below: float | None = None,
    above: float | None = None,
) -> Part:
    """A value in a range; `below` or `above` is the side that the claim is about."""
    judge = partial(of_range, low=low, high=high, below=below, above=above)
    return Part(what, measure, unit, judge, theirs, digits)


def rate(
    run: str, low: float, high: float, theirs: str, *, below: float | None = None, above: float | None = None
) -> Part:
    """The contraction rate of a run, as the author computes it."""
    return within(f"L̂ of {RUNS[run].name}", Rate(run), low, high, theirs, below=below, above=above)


def streamed(run: str) -> Part:
    """Streaming against the converged passes."""
    what, difference = f"{RUNS[run].name}, streamed minus K=10", Minus(Streamed(run), Perplexity(run, MOST_PASSES))
    return Part(what, difference, "PPL", partial(of_limit, limit=AGREEMENT), f"{AGREEMENT}", 4)


def closed(run: str, passes: int, theirs: float) -> Part:
    """How much of the gap between one pass and five is closed: the paper's figure, give or take five points."""
    what = f"{RUNS[run].name}, gap closed by K={passes}"
    return within(
        what, Closed(run, passes), theirs - 5.0, theirs + 5.0, f"{theirs:g} %", unit="%", digits=1, above=50.0
    )


def trend(what: str, first: Measure, second: Measure, theirs: str, *, is_control: bool = False) -> Part:
    """A difference of two differences, which should be negative; its size is not compared."""
    judge = partial(of_effect, expected=-1.0, sized=False)
    return Part(what, Minus(first, second), "points", judge, theirs, is_control=is_control)


def excess(run: str, passes: int) -> Percent:
    """How much higher the perplexity after these passes is than after five, in percent."""
    return Percent(Perplexity(run, passes), Perplexity(run, 5))


def gain(ready: str, plain: str) -> Percent:
    """How much higher the perplexity of one run is than that of another one, in percent."""
    return Percent(Perplexity(ready), Perplexity(plain))
