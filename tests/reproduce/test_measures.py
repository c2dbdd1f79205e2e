"""Measures on made-up runs, against numbers computed by hand."""

from math import log

import pytest

from contextready.reproduce.measures import (
    At,
    Closed,
    Cost,
    Crossover,
    During,
    Minus,
    Percent,
    Perplexity,
    Rate,
    Records,
    Rise,
    Streamed,
)

MODEL = {"vocab_size": 10, "width": 4, "layers": 1, "heads": 2}


def record(key, seed, curve, *, parallel=None, streamed=None, macs=1, tokens=100, passes=5, rates=(0.5, 0.4, 0.3)):
    """A run with one validation per step."""
    steps = list(range(len(curve)))
    return {
        "key": key,
        "seed": seed,
        "model": MODEL,
        "passes": passes,
        "curve": {
            "step": steps,
            "tokens": [tokens * step for step in steps],
            "macs": [macs * step for step in steps],
            "val_loss": [log(p) for p in curve],
        },
        "evaluation": {
            "parallel": {str(k): {"perplexity": p} for k, p in (parallel or {1: curve[-1]}).items()},
            "sequential": None if streamed is None else {"perplexity": streamed},
            **dict(zip(("rate", "norm_rate", "channel_rate"), rates, strict=True)),
        },
    }


PARALLEL = {1: 60.0, 2: 24.0, 3: 21.0, 5: 20.0, 10: 19.0}
RECORDS = Records(
    [
        record("d", 0, [100, 50, 20], parallel=PARALLEL, streamed=19.5, macs=4),
        record("d", 1, [100, 60, 30], parallel={**PARALLEL, 5: 30.0}, streamed=30.5, macs=4),
        record("n", 0, [100, 40, 25, 22, 21], passes=1, rates=(None, None, None)),
        record("n", 2, [100, 40, 25], passes=1, rates=(None, None, None)),
        record("start", 0, [100, 80], passes=1),
        record("tuned", 0, [80, 84, 30], parallel=PARALLEL, tokens=50, macs=2),
    ]
)


@pytest.mark.parametrize(
    ("measure", "expected"),
    [
        (Perplexity("d"), {0: 20.0, 1: 30.0}),
        (Perplexity("d", 10), {0: 19.0, 1: 19.0}),
        (Perplexity("d", 7), {}),
        (Perplexity("n"), {0: 21.0, 2: 25.0}),
        (Perplexity("nothing"), {}),
        (Streamed("d"), {0: 19.5, 1: 30.5}),
        (Streamed("n"), {}),
        (Rate("d"), {0: 0.3, 1: 0.3}),
        (Rate("d", "norm"), {0: 0.4, 1: 0.4}),
        (Rate("n"), {}),
        (During("d", 0.5), {0: 50.0, 1: 60.0}),
        (Minus(Perplexity("d"), Perplexity("n")), {0: -1.0}),
        (Percent(Perplexity("d"), Streamed("d")), {0: 100 * (20 / 19.5 - 1), 1: 100 * (30 / 30.5 - 1)}),
        (Closed("d", 2), {0: 100 * 36 / 40, 1: 100 * 36 / 30}),
        # Two steps of the first model are 200 tokens, and 8 multiply-accumulates, more than the other one has.
        (At("n", "d"), {0: 25.0}),
        (At("n", "d", "macs"), {}),
        # The conversion starts after 100 tokens and lasts 100 more.
        (At("n", "tuned", "tokens", after="start"), {0: 25.0}),
        # Ahead at 200 tokens only.
        (Crossover("d", "n"), {0: 200.0}),
        (Crossover("n", "d"), {}),
        # At 150 tokens it has 84 against about 32, at 200 it has 30 against 25.
        (Crossover("tuned", "n", after="start"), {}),
        (Rise("tuned"), {0: 5.0}),
        (Rise("d"), {0: 0.0, 1: 0.0}),
        # A block of 12C², and a head of VC.
        (Cost("n"), {0: (12 * 16 + 40) / 1000, 2: (12 * 16 + 40) / 1000}),
    ],
)
def test_measures(measure, expected):
    assert measure.of(RECORDS) == pytest.approx(expected)
    assert all(isinstance(run, str) for run in measure.runs)


def test_measures_name_the_runs_that_they_need():
    assert Minus(Perplexity("a"), Percent(Streamed("b"), Closed("c", 2))).runs == ("a", "b", "c")
    assert At("a", "b", after="c").runs == Crossover("a", "b", "c").runs == ("a", "b", "c")
