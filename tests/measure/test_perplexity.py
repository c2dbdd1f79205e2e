"""Scores against the oracle, in float64."""

from math import exp, log

import numpy as np
import pytest
import reference
import torch
from helpers import contractive_model, oracle, small_model

from contextready.data.batches import Sequences
from contextready.data.shards import TokenArray
from contextready.measure import perplexity
from contextready.measure.perplexity import Score, parallel_scores, sequential_score

T = 6


def sequences(count=5, vocab_size=23):
    ids = np.random.default_rng(3).integers(vocab_size, size=count * T + 1).astype("<u2")
    return Sequences(TokenArray([ids[:8], ids[8:]]), T)


def literal_nll(logits_TV, targets):
    """Mean over positions of -log softmax, written out."""
    rows = [-(row[target] - np.log(np.exp(row).sum())) for row, target in zip(logits_TV, targets, strict=True)]
    return float(np.mean(rows))


def expected(model, function, *args):
    translated, found = oracle(model), []
    data = sequences()
    for i in range(data.count):
        x, y = data.read(np.array([i]))
        found.append(literal_nll(function(translated, x[0].tolist(), *args), y[0].tolist()))
    return np.array(found)


def test_parallel_scores_are_the_oracles():
    model = small_model()
    found = parallel_scores(model, sequences(), [1, 3, 4])
    assert sorted(found) == [1, 3, 4]
    for k, score in found.items():
        np.testing.assert_allclose(score.nll_N, expected(model, reference.parallel, k), rtol=1e-10)


def test_the_sequential_score_is_the_oracles_stream_and_that_of_many_passes():
    model = small_model()
    found = sequential_score(model, sequences())
    np.testing.assert_allclose(found.nll_N, expected(model, reference.streaming), rtol=1e-10)
    np.testing.assert_allclose(found.nll_N, parallel_scores(model, sequences(), [T + 1])[T + 1].nll_N, rtol=1e-10)


def test_a_transformer_has_one_score():
    model = small_model(correction=None)
    found = parallel_scores(model, sequences(), [1])
    np.testing.assert_allclose(found[1].nll_N, expected(model, reference.transformer), rtol=1e-10)


@pytest.mark.parametrize("rows", [1, 2, 100])
def test_scores_do_not_depend_on_the_batch(monkeypatch, rows):
    model = contractive_model()
    whole = parallel_scores(model, sequences(), [2])[2], sequential_score(model, sequences())
    monkeypatch.setattr(perplexity, "PARALLEL_TOKENS", rows * T)
    monkeypatch.setattr(perplexity, "SEQUENTIAL_ROWS", rows)
    monkeypatch.setattr(perplexity, "LOGITS_AT_ONCE", rows * T * 23)
    parts = parallel_scores(model, sequences(), [2])[2], sequential_score(model, sequences())
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_allclose(one.nll_N, other.nll_N, rtol=1e-10)


def test_only_the_first_sequences_can_be_scored_and_progress_is_reported():
    model, told = small_model(), []
    few = parallel_scores(model, sequences(), [2], count=3, advance=told.append)[2]
    assert sum(told) == 3 * T
    np.testing.assert_allclose(few.nll_N, parallel_scores(model, sequences(), [2])[2].nll_N[:3], rtol=1e-12)


def test_the_figures_of_a_score():
    nll = np.array([2.0, 2.5, 3.0, 2.1])
    score = Score(nll)
    assert score.loss == pytest.approx(2.4)
    assert score.perplexity == pytest.approx(exp(2.4))
    assert score.loss_error == pytest.approx(np.std(nll, ddof=1) / 2)
    assert score.perplexity_error == pytest.approx(exp(2.4) * score.loss_error)
    assert score.bits_per_byte(4.0) == pytest.approx((2.4 / log(2) / 4, score.loss_error / log(2) / 4))
    assert np.isnan(Score(nll[:1]).loss_error)


def test_the_error_of_a_difference_is_that_of_the_paired_difference():
    """Two scores that vary together differ by a constant, so the difference is known exactly."""
    nll = np.random.default_rng(0).normal(3.0, 0.5, 400)
    gap, error = Score(nll + 1e-4).perplexity_above(Score(nll))
    assert gap == pytest.approx(exp(nll.mean()) * 1e-4, rel=1e-3)
    assert error < 1e-4 * Score(nll).perplexity_error * 2


def test_the_error_covers_the_truth_as_often_as_it_should():
    draws = np.random.default_rng(1).normal(2.0, 0.3, (2000, 50))
    inside = [abs(Score(nll).loss - 2.0) < Score(nll).loss_error for nll in draws]
    assert 0.63 < np.mean(inside) < 0.72


def test_large_states_stream_in_fewer_rows(monkeypatch):
    model, told = contractive_model(), []
    whole = sequential_score(model, sequences())
    monkeypatch.setattr(perplexity, "SEQUENTIAL_BYTES", 1)
    np.testing.assert_allclose(sequential_score(model, sequences(), advance=told.append).nll_N, whole.nll_N, rtol=1e-10)
    assert told == [T] * 5


def test_evaluation_leaves_no_gradient_and_the_mode_alone():
    model = small_model().train()
    sequential_score(model, sequences())
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert torch.is_grad_enabled()


def test_tokens_that_do_not_count_are_left_out():
    """The loss is the mean over the tokens that count, however they are spread over sequences and processes."""
    whole = sequences()
    ids = whole.tokens.read(0, len(whole.tokens))
    mask = (np.arange(len(ids)) % 5 < 2).astype(np.uint8)
    mask[T + 1 : 2 * T + 1] = 0  # one sequence has none
    masked = Sequences(TokenArray([ids], counted=TokenArray([mask])), T)
    model = small_model()
    found = parallel_scores(model, masked, [3])[3]
    inputs, targets = whole.read(np.arange(5))
    logits = model(inputs, passes=3)
    nll = -torch.log_softmax(logits, dim=-1).gather(2, targets[..., None])[..., 0].detach().numpy()
    counted = mask[1 : 5 * T + 1].reshape(5, T) == 1
    assert found.loss == pytest.approx(nll[counted].mean(), rel=1e-12)
    assert found.counts_N.tolist() == counted.sum(axis=1).tolist()
    shares = [parallel_scores(model, masked, [3], share=(i, 2))[3] for i in range(2)]
    assert Score.interleaved(shares).loss == pytest.approx(found.loss, rel=1e-12)
    assert sequential_score(model, masked).loss == pytest.approx(
        parallel_scores(model, masked, [T + 1])[T + 1].loss, rel=1e-10
    )
