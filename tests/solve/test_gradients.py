"""Truncated and implicit gradients compared with the exact gradient through the stream, in float64."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from helpers import contractive_model, random_tokens, small_model

from contextready import ContextReadyError
from contextready.model.correction import CORRECTIONS
from contextready.runs.config import TrainConfig
from contextready.solve.gradients import continued, settle
from contextready.train.objective import Objective

T = 7
TARGETS = random_tokens(length=T, seed=5)


def stream_gradient(model, tokens):
    """Backpropagation through time: the stream, token by token, differentiated."""
    model.zero_grad()
    z, _ = model.read(model.backbone.embed(tokens), model.init_state(len(tokens)))
    F.cross_entropy(model.backbone.head(z).flatten(0, 1), TARGETS.flatten()).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def gradient_of(model, tokens, passes, scale=1.0, **options):
    model.zero_grad()
    Objective(model, **options).backward(tokens, TARGETS, passes, scale)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def distance(one, other):
    assert one.keys() == other.keys()
    size = sum(float(g.square().sum()) for g in other.values()) ** 0.5
    return sum(float((one[n] - other[n]).square().sum()) for n in one) ** 0.5 / size


@pytest.mark.parametrize("kind", list(CORRECTIONS))
@pytest.mark.parametrize(("layers", "window"), [(1, None), (2, 3)])
def test_the_implicit_gradient_is_that_of_the_stream(kind, layers, window):
    """This needs no contraction: the fixed point is exact after T + 1 passes, and the adjoint after T steps."""
    model, tokens = small_model(correction=kind, layers=layers, window=window), random_tokens(length=T)
    exact = stream_gradient(model, tokens)
    found = gradient_of(model, tokens, T + 2, gradient="implicit", adjoint_tolerance=0.0)
    assert distance(found, exact) < 1e-8


def test_the_implicit_gradient_converges_with_its_tolerance():
    model, tokens = contractive_model(), random_tokens(length=T)
    exact = stream_gradient(model, tokens)
    errors = [
        distance(gradient_of(model, tokens, T + 2, gradient="implicit", adjoint_steps=m), exact) for m in range(T + 1)
    ]
    assert errors[0] > 1e-3
    assert errors[-1] < 1e-10
    assert all(after < before for before, after in pairwise(errors[:5]))
    loose = gradient_of(model, tokens, T + 2, gradient="implicit", adjoint_tolerance=1e-2)
    assert errors[-1] < distance(loose, exact) < 5e-2


def test_no_adjoint_step_is_a_gradient_through_the_last_pass():
    model, tokens = small_model(), random_tokens(length=T)
    one_step = gradient_of(model, tokens, 5, gradient="implicit", adjoint_steps=0)
    truncated = gradient_of(model, tokens, 5, gradient="truncated", truncated_passes=1)
    assert distance(one_step, truncated) < 1e-12


@pytest.mark.parametrize("through", [1, 2, 3])
def test_a_truncated_gradient_by_hand(through):
    model, tokens = small_model(), random_tokens(length=T)
    found = gradient_of(model, tokens, 5, gradient="truncated", truncated_passes=through)
    model.zero_grad()
    e = model.backbone.embed(tokens)
    with torch.no_grad():
        z, _ = model.backbone.blocks(e)
        for _ in range(5 - through - 1):
            z, _ = model.backbone.blocks(e + model.correction(F.pad(z, (0, 0, 1, -1)), e))
    for _ in range(through):
        z, _ = model.backbone.blocks(e + model.correction(F.pad(z, (0, 0, 1, -1)), e))
    F.cross_entropy(model.backbone.head(z).flatten(0, 1), TARGETS.flatten()).backward()
    by_hand = {name: p.grad.clone() for name, p in model.named_parameters()}
    assert distance(found, by_hand) < 1e-12
    assert distance(found, gradient_of(model, tokens, 5)) > 1e-3


@pytest.mark.parametrize("through", [5, 9])
def test_truncating_nothing_is_the_unroll(through):
    model, tokens = small_model(), random_tokens(length=T)
    found = gradient_of(model, tokens, 5, gradient="truncated", truncated_passes=through)
    assert distance(found, gradient_of(model, tokens, 5)) == 0.0


@pytest.mark.parametrize("options", [{"gradient": "truncated"}, {"gradient": "implicit"}])
def test_losses_are_those_of_the_unroll_and_gradients_scale_and_add_up(options):
    model, tokens = small_model(), random_tokens(length=T)
    objective = Objective(model, **options)
    for passes in (1, 2, 4):
        expected = Objective(model)(tokens, TARGETS, passes, measure=True)
        found = objective.backward(tokens, TARGETS, passes, measure=True)
        assert found.mean.item() == pytest.approx(expected.mean.item(), abs=1e-12)
        assert found.residual == pytest.approx(expected.residual)
        assert not found.mean.requires_grad
    once = gradient_of(model, tokens, 4, **options)
    half = gradient_of(model, tokens, 4, scale=0.5, **options)
    assert distance({name: 2 * g for name, g in half.items()}, once) < 1e-12
    objective.backward(tokens, TARGETS, 4, 0.5)
    assert distance({name: p.grad for name, p in model.named_parameters()}, once) < 1e-12


@pytest.mark.parametrize("through", [1, 2])
def test_masks_are_tied_within_a_step_and_new_in_the_next(through):
    model, tokens = small_model(dropout=0.4).train(), random_tokens(length=T)
    e = model.backbone.embed(tokens).detach()
    torch.manual_seed(3)
    before = settle(model, e, T + 1)
    made = list(continued(model, e, before.carried_BTC, through))
    # With one mask there is a fixed point: T + 1 passes reach it, and more change nothing.
    assert (made[-1].z_BTC - before.z_BTC).abs().max() < 1e-12
    other = settle(model, e, T + 1)
    assert (other.z_BTC - before.z_BTC).abs().max() > 1e-3


def test_the_exact_gradient_holds_for_tied_masks_too():
    """The stream cannot share a parallel mask, so the reference is the unroll with tied masks."""
    model, tokens = small_model(dropout=0.4).train(), random_tokens(length=T)
    torch.manual_seed(3)
    found = gradient_of(model, tokens, T + 2, gradient="implicit", adjoint_tolerance=0.0)
    torch.manual_seed(3)
    moment = torch.get_rng_state()

    def tied(*args):
        torch.set_rng_state(moment)
        return model.recur(*args)

    objective = Objective(model)
    objective.one_pass = tied
    model.zero_grad()
    objective.backward(tokens, TARGETS, 2 * T)
    unrolled = {name: p.grad.clone() for name, p in model.named_parameters()}
    assert distance(found, unrolled) < 1e-8


@pytest.mark.parametrize("mode", ["truncated", "implicit"])
def test_memory_of_the_graph_does_not_grow_with_K(mode):
    model, tokens = contractive_model(), random_tokens(length=T)

    def saved_bytes(passes, gradient):
        kept = []

        def pack(tensor):
            kept.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            Objective(model, gradient=gradient).backward(tokens, TARGETS, passes)
        return sum(kept)

    assert saved_bytes(12, mode) == saved_bytes(3, mode) < saved_bytes(3, "unroll") < saved_bytes(12, "unroll")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gradient": "exact"}, "gradient=exact is unknown"),
        (
            {"gradient": "unroll", "truncated_passes": 2},
            "truncated_passes=2 needs gradient=truncated, but gradient=unroll",
        ),
        ({"adjoint_steps": 2}, "adjoint_steps=2 needs gradient=implicit"),
        ({"gradient": "truncated", "adjoint_tolerance": 0.1}, "adjoint_tolerance=0.1 needs gradient=implicit"),
        ({"gradient": "implicit", "compile": True}, "leave compile and checkpoint_passes out"),
        ({"gradient": "implicit", "adjoint_steps": -1}, "adjoint_steps must be at least 0, but got -1"),
        (
            {"gradient": "implicit", "adjoint_tolerance": -1.0},
            "adjoint_tolerance must be at least 0 and finite, but got -1.0",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ContextReadyError, match=message):
        TrainConfig(data="d", out="o", **changes)
