"""The setting `passes`: numbers, ranges and stages, and the two numbers that older files have instead."""

from collections import Counter

import pytest

from contextready.errors import ContextReadyError
from contextready.runs.config import build_run
from contextready.runs.passes import joined_passes, largest_passes, parse_passes
from contextready.train.cost import step_macs
from contextready.train.schedule import passes_of_step

SHAPE = {"vocab_size": 30, "width": 8, "layers": 1, "heads": 2, "correction": "add", "data": "d", "out": "o"}


def settings(**changes):
    return build_run(SHAPE | changes).train


def test_a_number_a_range_and_stages():
    assert [(s.least, s.most, s.fraction) for s in parse_passes("3").stages] == [(3, 3, 1.0)]
    assert [(s.least, s.most, s.fraction) for s in parse_passes("2..4").stages] == [(2, 4, 1.0)]
    stages = parse_passes("1@0.5, 2@0.4,2..4@0.1")
    assert [(s.least, s.most, s.fraction) for s in stages.stages] == [(1, 1, 0.5), (2, 2, 0.4), (2, 4, 0.1)]
    assert (stages.least, stages.most) == (1, 4)


def test_stages_have_their_fractions_of_the_steps():
    t = settings(passes="1@0.5,2@0.4,2..4@0.1", steps=1000)
    drawn = [passes_of_step(t, step) for step in range(1200)]
    assert set(drawn[:500]) == {1}
    assert set(drawn[500:900]) == {2}
    # Steps beyond the last one belong to the last stage.
    assert set(drawn[900:1000]) == set(drawn[1000:]) == {2, 3, 4}


@pytest.mark.parametrize("steps", [1, 3, 7, 10, 99])
def test_every_step_has_a_stage_whatever_their_number(steps):
    t = settings(passes="2@0.3,3@0.3,4@0.4", steps=steps)
    counts = Counter(passes_of_step(t, step) for step in range(steps))
    assert sum(counts.values()) == steps
    assert all(abs(counts[k] - share * steps) <= 1 for k, share in ((2, 0.3), (3, 0.3), (4, 0.4)))


def test_the_cost_of_a_step_is_the_mean_over_all_stages():
    from contextready.model.cost import account

    t = settings(passes="1@0.5,2..3@0.5", gradient="unroll")
    cost = account(build_run(SHAPE).model)
    each = {k: step_macs(cost, settings(passes=k, gradient="unroll")) for k in (1, 2, 3)}
    assert step_macs(cost, t) == pytest.approx(0.5 * each[1] + 0.25 * each[2] + 0.25 * each[3])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a number of passes; write a number"),
        ("two", "is not a number of passes"),
        ("2.5", "is not a number of passes"),
        ("2..", "is not a number of passes"),
        ("-2", "is not a number of passes"),
        ("²", "is not a number of passes"),
        ("9" * 400, "is not a number of passes"),
        ("0", "must be from 1 to 100,000, with the smaller number first"),
        ("100001", "must be from 1 to 100,000"),
        ("4..2", "with the smaller number first"),
        ("2,3", "must give a fraction for every stage"),
        ("2@0.5,3", "must give a fraction for every stage"),
        ("2@0.5", "must give a fraction for every stage"),
        ("2@0.5,3@0.4", "must be greater than 0 and add up to 1, but add up to 0.9"),
        ("2@0,3@1", "must be greater than 0 and add up to 1"),
        ("2@1.5,3@0.5", "must be greater than 0 and add up to 1"),
        (",".join(["2@0.01"] * 101), "is not a number of passes"),
    ],
)
def test_nonsense_is_one_sentence(text, message):
    with pytest.raises(ContextReadyError, match=message) as caught:
        settings(passes=text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"passes": 5, "min_passes": 2}, "2..5"),
        ({"passes": 5, "min_passes": None}, "5"),
        ({"passes": 5, "min_passes": 5}, "5"),
        ({"passes": None, "min_passes": None}, None),
        ({"passes": "5", "min_passes": "2"}, "2..5"),
        ({"passes": "5", "min_passes": "none"}, "5"),
        ({"passes": 3}, "3"),
        ({"passes": "2..3"}, "2..3"),
    ],
)
def test_two_numbers_of_older_files_become_one_setting(old, new):
    assert joined_passes(old | {"lr": 1.0}) == {"passes": new, "lr": 1.0}


def test_the_smallest_number_alone_is_refused():
    with pytest.raises(ContextReadyError, match="min_passes=3 needs passes too; write both as one setting"):
        joined_passes({"min_passes": "3"})
    with pytest.raises(ContextReadyError, match=r"min_passes=3 cannot be combined with passes=2\.\.5"):
        joined_passes({"min_passes": "3", "passes": "2..5"})


def test_the_largest_number_of_saved_settings():
    assert [largest_passes({"passes": p}) for p in (None, 5, "5", "2..7", "1@0.5,2..4@0.5")] == [None, 5, 5, 7, 4]


def test_defaults_depend_on_the_gradient():
    assert (settings().gradient, settings().passes) == ("truncated", "1@0.5,2@0.4,2..3@0.1")
    assert settings(gradient="unroll").passes == "2..5"
    assert settings(gradient="bptt").passes is None
    assert settings(correction=None).passes == "1"


def test_only_new_models_of_text_start_as_transformers():
    """Trained weights need no such start, and a task may need the correction from the first step."""
    later = "2@0.9,2..3@0.1"
    assert settings(init_from="runs/other").passes == later
    shape = {key: value for key, value in SHAPE.items() if key not in ("vocab_size", "data")}
    assert build_run(shape | {"task": "pointer", "hops": 2, "gradient": "truncated"}).train.passes == later
    pretrained = build_run({"pretrained": "some/model", "data": "d", "out": "o"})
    assert pretrained.train.passes == later


def test_a_run_with_stages_cannot_be_extended():
    from contextready.runs.run_checks import check_same_run

    before = build_run(SHAPE | {"passes": "1@0.5,2@0.5", "steps": 10}).as_dict()
    with pytest.raises(ContextReadyError, match="was trained with steps=10, not steps=20"):
        check_same_run(before, build_run(SHAPE | {"passes": "1@0.5,2@0.5", "steps": 20}), "run")
    before = build_run(SHAPE | {"passes": "2..3", "steps": 10}).as_dict()
    check_same_run(before, build_run(SHAPE | {"passes": "2..3", "steps": 20}), "run")
