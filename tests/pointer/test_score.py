"""Scores by level: compared with a count by hand, for models that read in one pass and token by token."""

import numpy as np
import pytest
import torch

from contextready.model.config import ModelConfig
from contextready.model.context_ready import build_model
from contextready.pointer import score
from contextready.pointer.score import LevelScore, levels_solved, score_levels, score_passes
from contextready.pointer.task import IGNORED, PointerTask

TASK = PointerTask(hops=2, keys=2, values=3)
REPEATED = PointerTask(hops=2, keys=2, values=3, answers="absent")
ASKED = {TASK: [20, 20, 10], REPEATED: [20, 20, 20, 10]}
ASKED |= {PointerTask(2, 2, 3, answers="absent", queries="none"): ASKED[REPEATED]}
"""How often ten sequences ask for each level. The final query is a level of its own."""


def make(correction, seed=0, task=TASK):
    torch.manual_seed(seed)
    model = build_model(
        ModelConfig(task.vocab_size, 16, 2, 2, window=task.window, correction=correction, extra_ffn=True)
    ).double()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.3)
        # Guess values only, so that some guesses are right.
        model.backbone.unembedding.weight[task.values :] = 0
        model.backbone.unembedding.weight[: task.values] *= 20
    return model


def logits_of(model, inputs_BT):
    """Compute logits differently than the score does: by a converged unroll, or by one forward pass."""
    return model(inputs_BT, passes=inputs_BT.shape[1] + 1 if model.is_recurrent else 1)


@pytest.mark.parametrize("task", ASKED, ids=str)
@pytest.mark.parametrize("correction", [None, "add", "concat"])
def test_the_score_is_a_count_by_hand(correction, task, monkeypatch):
    monkeypatch.setattr(score, "ROWS", 4)  # several parts, the last one short
    model, batch = make(correction, task=task), task.batch("test", 0, 0, 10)
    found = score_levels(model, task, batch)
    logits_BTV = logits_of(model, batch.inputs_BT).detach()
    asked, right, nll = (np.zeros(task.levels) for _ in range(3))
    for row in range(10):
        for t, target in enumerate(batch.targets_BT[row].tolist()):
            if target != IGNORED:
                level = int(batch.levels_T[t])
                asked[level] += 1
                right[level] += int(logits_BTV[row, t].argmax()) == target
                nll[level] -= float(logits_BTV[row, t].log_softmax(-1)[target])
    assert np.array_equal(found.asked_L, asked)
    assert asked.tolist() == ASKED[task]
    assert np.array_equal(found.right_L, right)
    assert 0 < right.sum() < asked.sum()
    np.testing.assert_allclose(found.nll_L, nll, rtol=1e-9)
    assert found.accuracy == pytest.approx(right / asked)
    assert found.loss == pytest.approx(nll.sum() / asked.sum())


def test_shares_join_to_the_whole():
    model, batch = make("add"), TASK.batch("test", 1, 0, 7)
    parts = []
    for i in range(3):
        rows = slice(i, None, 3)
        parts.append(
            score_levels(
                model, TASK, batch._replace(inputs_BT=batch.inputs_BT[rows], targets_BT=batch.targets_BT[rows])
            )
        )
    joined, whole = LevelScore.joined(parts), score_levels(model, TASK, batch)
    assert np.array_equal(joined.right_L, whole.right_L)
    assert np.array_equal(joined.asked_L, whole.asked_L)
    assert joined.loss == pytest.approx(whole.loss)


def test_a_level_is_solved_at_99_of_100():
    assert levels_solved([1.0, 0.99, 0.9899, 0.5]) == 2
    score = LevelScore(np.array([100.0, 100.0]), np.array([99.0, 98.0]), np.zeros(2))
    assert score.solved == 1


def test_a_context_ready_model_is_scored_as_it_streams_not_after_few_passes():
    """After two passes the answers differ, so the score must be sequential unless passes are asked for."""
    model, batch = make("add", seed=3), TASK.batch("test", 0, 0, 40)
    streamed = score_levels(model, TASK, batch)
    two = model(batch.inputs_BT, passes=2).argmax(-1)
    asked_T = batch.levels_T >= 0
    right = (two == batch.targets_BT)[:, asked_T].sum()
    assert float(right) != streamed.right_L.sum()
    assert score_passes(model, TASK, batch, [2, 5])[2].right_L.sum() == float(right)
    converged = score_passes(model, TASK, batch, [2, TASK.tokens + 1])[TASK.tokens + 1]
    assert np.array_equal(converged.right_L, streamed.right_L)
