"""The rule behind the verdicts."""

from itertools import pairwise

import pytest

from contextready.reproduce.verdicts import (
    CONTRADICTED,
    IN_SIGN,
    NOT_SEEN,
    NOT_TESTABLE,
    REPRODUCED,
    RULE,
    Verdict,
    is_seen,
    of_effect,
    of_identity,
    of_limit,
    of_match,
    of_range,
    worst,
)


@pytest.mark.parametrize(
    ("values", "seen"),
    [
        ([-1.0, -1.2, -0.9], True),
        ([-1.0, -1.2, 0.1], False),
        # The same sign, but the mean is within two standard errors: mean 1.04, standard deviation 1.7.
        ([0.01, 0.1, 3.0], False),
        ([0.0, 1.0, 1.0], False),
        ([2.0], True),
        ([-2.0, -0.1], True),
        ([-2.0, 0.1], False),
        ([], False),
    ],
)
def test_an_effect_is_seen_if_seeds_agree_and_it_exceeds_two_standard_errors(values, seen):
    assert is_seen(values) is seen
    assert is_seen([-value for value in values]) is seen


@pytest.mark.parametrize(
    ("values", "expected", "verdict"),
    [
        ([-4.0, -4.1, -3.9], -4.0, Verdict(REPRODUCED)),
        ([-2.1, -2.0, -2.2], -4.0, Verdict(REPRODUCED)),
        ([-1.9, -1.8, -1.7], -4.0, Verdict(IN_SIGN)),
        ([-7.9, -7.8, -7.7], -4.0, Verdict(REPRODUCED)),
        ([-8.2, -8.1, -8.3], -4.0, Verdict(IN_SIGN)),
        ([4.0, 4.1, 3.9], -4.0, Verdict(NOT_SEEN)),
        ([-4.0, 4.1, -3.9], -4.0, Verdict(NOT_SEEN)),
        ([-4.0], -4.0, Verdict(REPRODUCED, True)),
        ([-4.0, -3.0], -20.0, Verdict(IN_SIGN, True)),
        ([], -4.0, Verdict(NOT_TESTABLE)),
    ],
)
def test_effects(values, expected, verdict):
    assert of_effect(values, expected) == verdict
    mirrored = of_effect([-value for value in values], -expected)
    assert mirrored == verdict


def test_an_effect_without_a_figure_is_at_best_reproduced_in_sign():
    assert of_effect([-4.0, -4.1, -3.9], -1.0, sized=False) == Verdict(IN_SIGN)
    assert of_effect([-1.0, -1.1, -0.9], -1.0, sized=False) == Verdict(IN_SIGN)


def test_matches_ranges_limits_and_identities():
    assert of_match([0.9, 1.0, 0.8], 1.0) == Verdict(REPRODUCED)
    assert of_match([-5.0], 1.0) == Verdict(REPRODUCED, True)
    assert of_match([1.1, 1.2, 1.0], 1.0) == Verdict(NOT_SEEN)
    assert of_range([0.6, 0.7, 0.5], 0.5, 0.72, 0.85, None) == Verdict(REPRODUCED)
    assert of_range([0.3, 0.3, 0.3], 0.5, 0.72, 0.85, None) == Verdict(IN_SIGN)
    assert of_range([0.9, 0.9, 0.9], 0.5, 0.72, 0.85, None) == Verdict(NOT_SEEN)
    assert of_range([1.4], 0.88, 1.2, None, 0.88) == Verdict(IN_SIGN, True)
    assert of_range([0.5], 0.88, 1.2, None, 0.88) == Verdict(NOT_SEEN, True)
    assert of_limit([0.01, -0.01, 0.0], 0.01) == Verdict(REPRODUCED)
    assert of_limit([0.0, 0.0, 0.02], 0.01) == Verdict(CONTRADICTED)
    assert of_identity([("1", "1"), ("2", "2")]) == Verdict(REPRODUCED)
    assert of_identity([("1", "1"), ("2", "3")]) == Verdict(CONTRADICTED)
    for judge in (lambda v: of_match(v, 1), lambda v: of_range(v, 0, 1, None, None), lambda v: of_limit(v, 1)):
        assert judge([]) == Verdict(NOT_TESTABLE)


def test_a_claim_has_the_worst_verdict_of_its_parts():
    order = [REPRODUCED, IN_SIGN, NOT_SEEN, CONTRADICTED]
    for better, word in pairwise(order):
        assert worst([Verdict(word), Verdict(better)]) == Verdict(word)
    assert worst([Verdict(REPRODUCED), Verdict(NOT_TESTABLE)]) == Verdict(REPRODUCED, True)
    assert worst([Verdict(REPRODUCED, True), Verdict(IN_SIGN)]) == Verdict(IN_SIGN, True)
    assert worst([Verdict(NOT_TESTABLE)]) == worst([]) == Verdict(NOT_TESTABLE)
    assert str(Verdict(IN_SIGN, True)) == f"{IN_SIGN}°"


def test_the_rule_is_written_down():
    for word in (REPRODUCED, IN_SIGN, NOT_SEEN, CONTRADICTED, NOT_TESTABLE):
        assert f'"{word}"' in " ".join(RULE.split())
