"""Choosing a token: each filter against its definition, written naively."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contextready.errors import ContextReadyError
from contextready.infer.sampling import Sampling, choose, log_probabilities, rng_for


def random_logits(size=50, seed=0, scale=3.0):
    return (scale * np.random.default_rng(seed).standard_normal(size)).astype(np.float32)


def softmax(scores):
    chances = np.exp(np.asarray(scores, dtype=np.float64) - np.max(scores))
    return chances / chances.sum()


class Fixed:
    """Draws one number, always the same."""

    def __init__(self, number):
        self.number, self.drawn = number, 0

    def random(self):
        self.drawn += 1
        return self.number


def frequencies(logits, sampling, seen=(), draws=1000):
    """How often each token is chosen over evenly spaced draws: the distribution, to one part in `draws`."""
    counts = np.zeros(len(logits))
    for i in range(draws):
        counts[choose(logits, sampling, Fixed((i + 0.5) / draws), seen)] += 1
    return counts / draws


def naive(logits, sampling, seen=()):
    """The distribution by the definitions, one token at a time."""
    scores = [float(x) for x in logits]
    for token in set(seen):
        penalty = sampling.repetition_penalty
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    chances = dict(enumerate(softmax([score / sampling.temperature for score in scores])))
    order = sorted(chances, key=lambda token: (-chances[token], token))
    if sampling.top_k is not None:
        order = [token for i, token in enumerate(order) if i < sampling.top_k]
    total = sum(chances[token] for token in order)
    kept, mass = [], 0.0
    for token in order:
        kept.append(token)
        mass += chances[token] / total
        if mass >= sampling.top_p:
            break
    kept = [token for token in kept if chances[token] >= sampling.min_p * chances[order[0]]]
    total = sum(chances[token] for token in kept)
    return np.array([chances[token] / total if token in kept else 0.0 for token in range(len(scores))])


FILTERS = {
    "nothing": {},
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 2.5},
    "top_k": {"top_k": 4},
    "top_k of all": {"top_k": 500},
    "top_p": {"top_p": 0.7},
    "top_p of one": {"top_p": 1e-9},
    "min_p": {"min_p": 0.2},
    "penalty": {"repetition_penalty": 1.7},
    "reward": {"repetition_penalty": 0.6},
    "all": {"temperature": 1.4, "top_k": 9, "top_p": 0.8, "min_p": 0.15, "repetition_penalty": 1.3},
}


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("seed", [0, 1])
def test_distribution_is_the_definition(name, seed):
    logits, seen = random_logits(20, seed), [1, 4, 4, 7, 12]
    expected = naive(logits, Sampling(**FILTERS[name]), seen)
    found = frequencies(logits, Sampling(**FILTERS[name]), seen)
    assert np.abs(found - expected).max() < 2 / 1000
    assert ((found > 0) <= (expected > 0)).all()


def test_filters_come_in_hugging_faces_order():
    # top-p looks at what top-k left, renormalised: 0.4/0.7 ≥ 0.55 leaves one, where 0.4 < 0.55 would leave two.
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    assert set(np.flatnonzero(frequencies(logits, Sampling(top_k=2, top_p=0.55)))) == {0}
    assert set(np.flatnonzero(frequencies(logits, Sampling(top_p=0.55)))) == {0, 1}
    # The temperature comes before top-p: cold, the first token alone has the mass.
    assert set(np.flatnonzero(frequencies(logits, Sampling(top_p=0.55, temperature=0.3)))) == {0}
    # The penalty comes before the temperature and before the filters: token 0 is no longer among the first two.
    shifted = logits - logits.min()
    assert set(np.flatnonzero(frequencies(shifted, Sampling(top_k=2, repetition_penalty=4.0), [0]))) == {1, 2}


def test_penalty_by_sign_once_and_only_for_seen_tokens():
    logits = np.array([2.0, -2.0, 1.5, -3.0, 0.0])
    expected = softmax([1.0, -4.0, 1.5, -3.0, 0.0])
    for seen in ([0, 1, 4, 0, 0], np.array([True, True, False, False, True]), (0, 1, 4)):
        found = frequencies(logits, Sampling(repetition_penalty=2.0), seen)
        assert np.abs(found - expected).max() < 2 / 1000
    assert logits.tolist() == [2.0, -2.0, 1.5, -3.0, 0.0]
    assert choose(logits, Sampling(temperature=0, repetition_penalty=2.0), Fixed(0.0), [0]) == 2
    assert choose(logits, Sampling(temperature=0, repetition_penalty=2.0), Fixed(0.0), []) == 0


def test_ties_at_the_kth_are_kept_and_greedy_takes_the_first():
    logits = np.array([0.0, 3.0, 1.0, 3.0, 3.0, -1.0])
    assert set(np.flatnonzero(frequencies(logits, Sampling(top_k=2)))) == {1, 3, 4}
    assert choose(logits, Sampling(temperature=0), Fixed(0.9)) == 1


def test_greedy_draws_nothing_and_sampling_draws_once():
    source = Fixed(0.5)
    choose(random_logits(), Sampling(temperature=0), source)
    assert source.drawn == 0
    choose(random_logits(), Sampling(top_k=3, top_p=0.9, min_p=0.1), source)
    assert source.drawn == 1


@pytest.mark.parametrize("number", [0.0, 1 - 2**-53])
def test_extreme_draws_choose_tokens_that_have_a_chance(number):
    # Chances of exactly 0 lie at both ends.
    logits = np.array([-1e30, 0.1, 0.2, 0.3, -1e30], dtype=np.float32)
    assert choose(logits, Sampling(), Fixed(number)) == (1 if number == 0 else 3)


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-3])
def test_tiny_temperature_is_greedy_without_overflow(temperature):
    logits = random_logits(40)
    assert choose(logits, Sampling(temperature=temperature), rng_for(0, 0)) == logits.argmax()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-80, 80, width=32), min_size=1, max_size=30),
    st.floats(0.01, 1.0),
    st.floats(0.0, 1.0),
    st.integers(1, 40),
    st.floats(0, 1 - 2**-53),
)
def test_something_is_always_chosen_and_the_most_likely_always_can_be(logits, top_p, min_p, top_k, number):
    scores = np.array(logits, dtype=np.float32)
    sampling = Sampling(top_p=top_p, min_p=min_p, top_k=top_k)
    assert 0 <= choose(scores, sampling, Fixed(number)) < len(scores)
    chosen = {choose(scores, sampling, Fixed((i + 0.5) / 64)) for i in range(64)}
    # Scores that differ by less than rounding are equally likely.
    likely = np.exp(scores.astype(np.float64) - scores.max())
    assert any(likely[token] == 1.0 for token in chosen)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_logits_are_refused(bad, temperature):
    logits = random_logits()
    logits[3] = bad
    with pytest.raises(ContextReadyError, match="not finite"):
        choose(logits, Sampling(temperature=temperature), rng_for(0, 0))
    with pytest.raises(ContextReadyError, match="not finite"):
        log_probabilities(logits, 0)


def test_log_probabilities_are_of_the_raw_logits():
    logits = random_logits(300)
    expected = np.log(softmax(logits))
    logprob, top = log_probabilities(logits, 17, 5)
    assert logprob == pytest.approx(expected[17], abs=1e-12)
    order = np.argsort(-expected)[:5]
    assert [token for token, _ in top] == order.tolist()
    assert [value for _, value in top] == pytest.approx(expected[order].tolist(), abs=1e-12)
    assert log_probabilities(logits, 17) == (logprob, [])
    assert [token for token, _ in log_probabilities(logits, 0, 300)[1]] == np.argsort(-expected).tolist()
    assert [token for token, _ in log_probabilities(np.array([1.0, 2.0, 2.0, 2.0]), 0, 2)[1]] == [1, 2]


def test_draws_depend_on_the_seed_and_the_sample():
    first = rng_for(3, 1).random(4).tolist()
    assert rng_for(3, 1).random(4).tolist() == first
    assert rng_for(3, 2).random(4).tolist() != first
    assert rng_for(1, 3).random(4).tolist() != first


def test_penalty_that_overflows_is_refused_without_a_warning():
    with pytest.raises(ContextReadyError, match="not finite"):
        choose(np.array([1e10, 2.0]), Sampling(repetition_penalty=1e-300), rng_for(0, 0), [0])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"temperature": -0.1}, "temperature must .* got -0.1"),
        ({"temperature": float("nan")}, "temperature must .* got nan"),
        ({"temperature": float("inf")}, "temperature must .* got inf"),
        ({"top_k": 0}, r"top_k must .* got 0"),
        ({"top_k": 2.5}, r"top_k must .* got 2\.5"),
        ({"top_p": 0.0}, r"top_p must .* got 0\.0"),
        ({"top_p": 1.01}, r"top_p must .* got 1\.01"),
        ({"top_p": float("nan")}, r"top_p must .* got nan"),
        ({"min_p": -0.1}, r"min_p must .* got -0\.1"),
        ({"min_p": 1.1}, r"min_p must .* got 1\.1"),
        ({"min_p": float("nan")}, r"min_p must .* got nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must .* got 0"),
        ({"repetition_penalty": -1.0}, "repetition_penalty must .* got -1"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty must .* got nan"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty must .* got inf"),
    ],
)
def test_impossible_settings_are_refused(changes, says):
    with pytest.raises(ContextReadyError, match=says):
        Sampling(**changes)


def test_limits_themselves_are_allowed():
    assert Sampling(temperature=0).greedy
    assert not Sampling(temperature=1e-9, top_k=1, top_p=1, min_p=1, repetition_penalty=0.1).greedy
