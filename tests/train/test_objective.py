"""The loss and the schedules, compared with hand-written loops and with other ways to compute the passes."""

from collections import Counter
from dataclasses import replace
from itertools import islice, pairwise

import pytest
import torch
import torch.nn.functional as F
from helpers import random_tokens, small_model

from contextready.model.context_ready import shift_right
from contextready.model.correction import CORRECTIONS
from contextready.runs.config import build_run
from contextready.solve.unroll import unroll
from contextready.train.objective import Objective
from contextready.train.schedule import learning_rate, passes_of_step


def batch(seed=1):
    tokens = random_tokens(batch=3, length=10, seed=seed)
    return tokens[:, :-1], tokens[:, 1:]


def loss_by_hand(logits, targets):
    """Mean over every token of -log softmax, one token at a time."""
    total = 0.0
    for row, wanted in zip(logits, targets, strict=True):
        for scores, target in zip(row, wanted, strict=True):
            total -= (scores[target] - torch.logsumexp(scores, dim=0)).item()
    return total / targets.numel()


def gradients(model, objective, passes):
    model.zero_grad(set_to_none=True)
    result = objective(*batch(), passes, measure=True)
    result.mean.backward()
    return result, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("correction", list(CORRECTIONS))
@pytest.mark.parametrize("passes", [1, 2, 4])
def test_the_loss_is_the_mean_cross_entropy_of_the_last_pass(correction, passes):
    model = small_model(correction=correction)
    inputs, targets = batch()
    logits = model(inputs, passes=passes)
    loss = Objective(model)(inputs, targets, passes).mean.item()
    assert loss == pytest.approx(loss_by_hand(logits, targets), rel=1e-12)
    assert loss == pytest.approx(F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item(), rel=1e-12)


def test_the_loss_of_a_transformer_is_that_of_its_one_pass():
    model = small_model(correction=None, extra_ffn=True)
    inputs, targets = batch()
    result = Objective(model)(inputs, targets, 1, measure=True)
    assert result.mean.item() == pytest.approx(loss_by_hand(model(inputs), targets), rel=1e-12)
    assert result.residual is None


def test_more_passes_are_another_loss():
    model = small_model()
    losses = [Objective(model)(*batch(), passes).mean.item() for passes in (1, 2, 3)]
    assert len({round(loss, 6) for loss in losses}) == 3


def test_the_gradient_goes_through_every_pass():
    model = small_model()
    _, found = gradients(model, Objective(model), 3)
    inputs, targets = batch()
    model.zero_grad(set_to_none=True)
    F.cross_entropy(model(inputs, passes=3).flatten(0, 1), targets.flatten()).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-10, atol=1e-12)
    _, alone = gradients(model, Objective(model), 1)
    assert all(grad is None for name, grad in alone.items() if name.startswith("correction."))


@pytest.mark.parametrize("gradient", ["unroll", "truncated"])
@pytest.mark.parametrize("passes", [1, 2, 4])
def test_the_convergence_term_is_the_change_by_one_more_pass(gradient, passes):
    """0.5 · mean (x_{K+1} - stopgrad x_K)², where x_k is the input of pass k, with its gradient."""
    model = small_model()
    inputs, targets = batch()
    found = Objective(model, gradient=gradient, convergence_weight=0.5)(inputs, targets, passes)
    e = model.backbone.embed(inputs)
    made = list(islice(model.passes(e), passes + 1))
    term = 0.5 * (made[-1].x_BTC - made[-2].x_BTC.detach()).square().mean()
    assert term.item() > 1e-6
    assert found.mean.item() == pytest.approx(Objective(model)(inputs, targets, passes).mean.item(), rel=1e-12)
    assert (found.total - found.mean).item() == pytest.approx(term.item(), rel=1e-6)
    if gradient == "unroll" or passes == 1:
        names, weights = zip(*model.named_parameters(), strict=True)
        ours = torch.autograd.grad(found.total - found.mean, weights, allow_unused=True)
        wanted = torch.autograd.grad(term, weights, allow_unused=True)
        for name, one, other in zip(names, ours, wanted, strict=True):
            if other is not None and other.any():
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-8, msg=name)


def test_the_convergence_term_reaches_the_correction_in_a_truncated_step():
    """Its gradient goes through the last pass and the correction after it, and nothing before."""
    model = small_model()
    inputs, targets = batch()
    found = Objective(model, gradient="truncated", convergence_weight=1.0)(inputs, targets, 3)
    weight = model.correction.ffn.down.weight
    (ours,) = torch.autograd.grad(found.total - found.mean, weight)
    e = model.backbone.embed(inputs)
    before = list(islice(model.passes(e), 2))[-1]
    last = model.recur(e, shift_right(before.carried_BTC.detach()))
    after = e + model.correction(shift_right(last.carried_BTC), e)
    (wanted,) = torch.autograd.grad((after - last.x_BTC.detach()).square().mean(), weight)
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-8)


def test_the_convergence_term_of_a_transformer_is_zero():
    model = small_model(correction=None)
    found = Objective(model, convergence_weight=1.0)(*batch(), 1)
    assert found.total.item() == found.mean.item()


@pytest.mark.parametrize("correction", ["add", None])
def test_recomputed_passes_give_the_same_loss_and_gradients(correction):
    model = small_model(correction=correction, dropout=0.3).train()
    passes = 3 if correction else 1
    torch.manual_seed(5)
    kept, kept_gradients = gradients(model, Objective(model), passes)
    torch.manual_seed(5)
    again, again_gradients = gradients(model, Objective(model, recompute=True), passes)
    assert torch.equal(kept.mean, again.mean)
    assert kept.residual == again.residual
    assert all(torch.equal(kept_gradients[name], again_gradients[name]) for name in kept_gradients)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("correction", ["add", None])
def test_compiled_passes_give_the_same_loss_and_gradients(correction, recompute):
    torch._dynamo.reset()
    model = small_model(correction=correction)
    passes = 3 if correction else 1
    plain, plain_gradients = gradients(model, Objective(model), passes)
    compiled, compiled_gradients = gradients(model, Objective(model, compiled=True, recompute=recompute), passes)
    torch.testing.assert_close(compiled.mean, plain.mean, rtol=1e-12, atol=0)
    for name, gradient in plain_gradients.items():
        torch.testing.assert_close(compiled_gradients[name], gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("passes", [2, 3, 5])
def test_the_residual_is_that_of_unroll_in_the_first_row(passes):
    model = small_model()
    inputs, targets = batch()
    measured = Objective(model)(inputs, targets, passes, measure=True).residual
    _, info = unroll(model, inputs[:1], passes)
    assert measured == pytest.approx(info.changes[-1], rel=1e-9)
    assert measured > 0


def test_there_is_no_residual_of_one_pass_or_unasked():
    model = small_model()
    assert Objective(model)(*batch(), 1, measure=True).residual is None
    assert Objective(model)(*batch(), 3).residual is None


def schedule_of(**changes):
    settings = {"vocab_size": 9, "width": 4, "layers": 1, "heads": 1, "correction": "add", "data": "d", "out": "o"}
    return build_run(settings | changes).train


def test_the_rate_rises_linearly_then_stays():
    t = schedule_of(lr=0.5, warmup=4, steps=10)
    assert [learning_rate(t, step) for step in range(6)] == [0.125, 0.25, 0.375, 0.5, 0.5, 0.5]
    assert learning_rate(schedule_of(lr=0.5, warmup=0), 0) == 0.5


def test_the_cosine_falls_from_the_rate_to_its_part():
    t = schedule_of(lr=0.5, warmup=4, steps=104, schedule="cosine", min_lr=0.1)
    rates = [learning_rate(t, step) for step in range(4, 105)]
    assert rates[0] == 0.5
    assert rates[50] == pytest.approx(0.275)  # half-way: the middle between 0.5 and 0.05
    assert rates[-1] == pytest.approx(0.05)
    assert all(before > after for before, after in pairwise(rates))
    assert learning_rate(t, 10_000) == pytest.approx(0.05)
    assert learning_rate(schedule_of(lr=0.5, warmup=9, steps=5, schedule="cosine"), 4) == pytest.approx(0.5 * 5 / 9)


def test_depths_depend_on_seed_and_step_only():
    t = schedule_of(passes="2..6", seed=3)
    drawn = [passes_of_step(t, step) for step in range(200)]
    torch.manual_seed(1)
    assert [passes_of_step(replace(t, lr=9.0, steps=7, batch_size=2), step) for step in range(200)] == drawn
    assert [passes_of_step(t, step) for step in reversed(range(200))] == drawn[::-1]
    assert [passes_of_step(replace(t, seed=4), step) for step in range(200)] != drawn


def test_depths_are_uniform_with_both_ends():
    t = schedule_of(passes="2..5")
    counts = Counter(passes_of_step(t, step) for step in range(8000))
    assert set(counts) == {2, 3, 4, 5}
    # Four values with 2,000 each expected; five standard deviations are 194.
    assert all(abs(count - 2000) < 194 for count in counts.values())


def test_a_fixed_depth_is_fixed():
    assert {passes_of_step(schedule_of(passes=4), step) for step in range(50)} == {4}
    assert {passes_of_step(schedule_of(passes="3..3"), step) for step in range(50)} == {3}
