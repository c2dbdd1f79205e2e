"""The receptive field of windowed attention, compared with a direct mask and with an optimal guess."""

import itertools
from itertools import islice

import numpy as np
import pytest
import torch

from contextready.measure.bounds import receptive_field
from contextready.model.config import ModelConfig
from contextready.model.context_ready import build_model
from contextready.pointer.score import best_accuracy, levels_solved
from contextready.pointer.task import PointerTask


def reached_by_mask(T, layers, window):
    """Which positions can reach which, by multiplying the mask of one layer with itself."""
    one_TS = np.array([[0 <= t - s < window for s in range(T)] for t in range(T)])
    all_TS = np.eye(T, dtype=bool)
    for _ in range(layers):
        all_TS = all_TS @ one_TS
    return all_TS


@pytest.mark.parametrize(("layers", "window"), [(1, 1), (1, 4), (2, 4), (3, 3), (4, 26)])
def test_the_reach_is_that_of_a_direct_mask(layers, window):
    T = 120
    distance_TS = np.arange(T)[:, None] - np.arange(T)
    assert np.array_equal(
        reached_by_mask(T, layers, window), (distance_TS >= 0) & (distance_TS <= receptive_field(layers, window))
    )


def test_with_a_correction_the_stream_sees_everything():
    torch.manual_seed(0)
    model = build_model(ModelConfig(8, 16, 1, 2, window=4, correction="add")).double()
    e_1TC = model.backbone.embed(torch.randint(8, (1, 24))).detach().requires_grad_()
    z_1TC, _ = model.read(e_1TC, model.init_state(1))
    z_1TC[0, -1].sum().backward()
    assert (e_1TC.grad[0].abs().sum(-1) > 0).all()


@pytest.mark.parametrize(("passes", "layers", "window"), [(1, 1, 4), (2, 1, 4), (3, 1, 3), (2, 2, 3)])
def test_parallel_passes_see_exactly_this_far(passes, layers, window):
    torch.manual_seed(0)
    model = build_model(ModelConfig(8, 16, layers, 2, window=window, correction="add")).double()
    e_1TC = model.backbone.embed(torch.randint(8, (1, 24))).detach().requires_grad_()
    made = next(islice(model.passes(e_1TC), passes - 1, None))
    made.z_BTC[0, -1].sum().backward()
    seen_T = e_1TC.grad[0].abs().sum(-1) > 0
    assert torch.equal(seen_T, 23 - torch.arange(24) <= receptive_field(layers, window, passes))


def best_by_enumeration(task, reached):
    """The best guess from what is within reach, over every possible content of the tables."""
    bases = list(itertools.product(range(task.values), repeat=task.keys))
    orders = list(itertools.permutations(range(task.keys)))
    content = [(base, hops) for base in bases for hops in itertools.product(orders, repeat=task.hops)]
    batch = task.written(
        np.array([base for base, _ in content]),
        np.array([hops for _, hops in content]),
        np.zeros(len(content), int),
    )
    best, asked = np.zeros(task.levels), np.zeros(task.levels)
    for t, level in enumerate(batch.levels_T.tolist()):
        if level < 0:
            continue
        counts = {}
        for row, target in zip(batch.inputs_BT, batch.targets_BT[:, t].tolist(), strict=True):
            seen = tuple(row[max(0, t - reached) : t + 1].tolist())
            counts.setdefault(seen, np.zeros(task.values))[target] += 1
        best[level] += sum(count.max() for count in counts.values()) / len(content)
        asked[level] += 1
    return best / asked


@pytest.mark.parametrize(
    ("answers", "queries"), [("masked", "level"), ("masked", "all"), ("absent", "level"), ("absent", "none")]
)
@pytest.mark.parametrize("reached", [3, 8, 11, 14, 17, 20, 25, 30])
def test_the_best_accuracy_is_that_of_an_optimal_guess(reached, answers, queries):
    """The bound is tight: the optimum over every possible content reaches it."""
    task = PointerTask(hops=2, keys=2, values=3, answers=answers, queries=queries)
    bound, optimum = np.array(best_accuracy(task, reached)), best_by_enumeration(task, reached)
    np.testing.assert_allclose(bound, optimum, atol=1e-12)


def test_the_bound_of_the_papers_staircase():
    """In the author's layout. The paper's table has 1, 3, 6, 7, 8 and 11 levels for 1, 3, 5, 10, 11 and 12 layers."""
    task = PointerTask(hops=9, answers="absent")
    best = {layers: best_accuracy(task, receptive_field(layers, 38)) for layers in range(1, 13)}
    allowed = {layers: levels_solved(accuracy) for layers, accuracy in best.items()}
    assert allowed == {1: 1, 2: 2, 3: 4, 4: 5, 5: 6, 6: 8, 7: 9, 8: 11, 9: 11, 10: 11, 11: 11, 12: 11}
    assert best[1][1] == pytest.approx(0.28)
    assert best[5][6] == pytest.approx(0.964)


def test_the_bound_in_the_wave_setting():
    task = PointerTask(hops=9, keys=10, values=20, answers="absent")
    allowed = {layers: levels_solved(best_accuracy(task, receptive_field(layers, 52))) for layers in (1, 5, 10, 11)}
    assert allowed == {1: 1, 5: 4, 10: 9, 11: 11}


@pytest.mark.parametrize(("keys", "values", "right"), [(5, 10, 0.358), (3, 10, 0.43)])
def test_the_plateau_is_a_guess_among_the_values_of_the_table(keys, values, right):
    """The best guess without following a pointer is the most frequent value of the base table."""
    tables = np.array(list(itertools.product(range(values), repeat=keys)))
    often = (tables[:, :, None] == np.arange(values)).sum(axis=1).max(axis=1)
    assert often.mean() / keys == pytest.approx(right, abs=5e-4)


def test_the_miniature():
    task = PointerTask(hops=4, keys=3, values=10)
    allowed = [levels_solved(best_accuracy(task, receptive_field(layers, task.window))) for layers in range(1, 7)]
    assert allowed == [1, 2, 3, 5, 5, 5]
    assert best_accuracy(task, receptive_field(2, 26)) == pytest.approx([1, 1, 0.4, 0.1, 0.1])
    layout = PointerTask(hops=4, keys=3, values=10, answers="absent")
    assert [levels_solved(best_accuracy(layout, receptive_field(n, layout.window))) for n in (2, 4)] == [3, 6]


def test_visible_answers_have_no_such_bound():
    with pytest.raises(ValueError, match="visible"):
        best_accuracy(PointerTask(answers="visible"), 10)
