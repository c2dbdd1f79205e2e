"""The unroll: residuals, tolerance, bound, and chunks that continue exactly."""

import math

import pytest
import reference
import torch
from helpers import KINDS, contractive_model, gap, oracle, random_tokens, small_model

from contextready import ContextReady, ContextReadyError, UnrollInfo, build_correction, unroll
from contextready.solve.norms import largest_change, norms


@pytest.mark.parametrize("kind", KINDS)
def test_residuals_are_the_change_of_z(kind):
    model = small_model(correction=kind)
    tokens = random_tokens(batch=1, length=6)
    z, info = unroll(model, tokens, passes=5)
    assert info.passes == 5
    assert not info.exact
    assert not unroll(model, tokens, passes=6)[1].exact
    assert unroll(model, tokens, passes=7)[1].exact
    assert info.changes_KBT.shape == (4, 1, 6)
    zs = [
        torch.stack([torch.from_numpy(v) for v in z])
        for z in reference.trajectory(oracle(model), tokens[0].tolist(), 5)[0]
    ]
    assert gap(z[0], zs[-1]) < 1e-10
    for k in range(4):
        assert gap(info.changes_KBT[k, 0], (zs[k + 1] - zs[k]).norm(dim=-1) / zs[k + 1].norm(dim=-1)) < 1e-10
    assert info.changes[-1] == pytest.approx(((zs[4] - zs[3]).norm(dim=-1) / zs[4].norm(dim=-1)).max().item())
    r = info.changes
    assert info.rate == pytest.approx(max(r[1] / r[0], r[2] / r[1], r[3] / r[2]))
    assert unroll(model, tokens, passes=3)[1].rate == pytest.approx(r[1] / r[0])
    made = UnrollInfo(torch.tensor([9.0, 1.0, 2.0, 3.0, 1.5]).view(5, 1, 1), None, None, True)
    assert made.rate == 2.0  # the worst of the last three, not of all
    slower = UnrollInfo(torch.tensor([1.0, 9.0, 9.0, 9.0, 9.0]).view(5, 1, 1), None, None, True)
    assert slower.rate == 1.0
    assert not info.converged
    assert info.state is None


def test_logits_of_the_unroll_are_the_models():
    model = small_model()
    tokens = random_tokens()
    assert torch.equal(model.backbone.head(unroll(model, tokens, 4)[0]), model(tokens, 4))


@pytest.mark.parametrize("tolerance", [1e-2, 1e-6])
def test_tolerance_stops_at_the_first_pass_that_meets_it(tolerance):
    model = contractive_model()
    tokens = random_tokens(length=30)
    z, info = unroll(model, tokens, tolerance=tolerance)
    assert info.converged
    assert info.passes < 31
    _, earlier = unroll(model, tokens, info.passes - 1, tolerance=tolerance)
    assert info.changes[-1] <= tolerance < earlier.changes[-1]
    assert not earlier.converged
    assert gap(z, unroll(model, tokens, passes=info.passes)[0]) == 0.0


def test_error_bound_holds_where_the_truth_is_known():
    model = contractive_model()
    tokens = random_tokens(length=24)
    exact, _ = unroll(model, tokens, passes=25)
    for passes in range(3, 12):
        z, info = unroll(model, tokens, passes)
        error = ((z - exact).norm(dim=-1) / exact.norm(dim=-1)).max().item()
        assert info.rate < 1
        assert error <= info.error_bound < 20 * error
        assert info.error_bound == pytest.approx(info.rate / (1 - info.rate) * info.changes[-1])


def test_no_bound_without_contraction_and_still_exact():
    model = contractive_model(scale=10.0)
    tokens = random_tokens(length=12)
    _, early = unroll(model, tokens, passes=6)
    assert early.rate >= 1.0
    assert early.error_bound is None
    z, info = unroll(model, tokens, tolerance=0.0)
    assert info.passes == 13  # T + 1, exact whatever the contraction
    streamed, _ = model.stream(tokens, model.init_state(2))
    assert gap(model.backbone.head(z), streamed) < 1e-10
    assert not early.exact
    assert not early.converged
    assert info.exact
    assert info.converged
    assert info.error_bound == 0.0
    assert not unroll(model, tokens, passes=13, cumulative=True)[1].exact


def test_converged_says_what_stopped_the_passes_in_low_precision_too():
    for dtype in (torch.float32, torch.bfloat16):
        model = contractive_model(dtype=dtype)
        for exponent in range(1, 30):
            _, info = unroll(model, random_tokens(length=20), tolerance=0.7**exponent)
            assert info.converged


def test_nothing_is_claimed_about_numbers_that_are_not_finite():
    model = small_model()
    with torch.no_grad():
        model.backbone.layers[0].ffn.up.weight[0, 0] = float("nan")
    _, info = unroll(model, random_tokens(), tolerance=1e-3)
    assert (info.exact, info.converged, info.error_bound) == (False, False, None)


def test_nothing_is_exact_while_dropout_is_redrawn():
    model = small_model(dropout=0.3)
    assert unroll(model, random_tokens(), 10)[1].exact
    _, info = unroll(model.train(), random_tokens(), 10)
    assert (info.exact, info.error_bound) == (False, None)


def test_norms_of_half_precision_do_not_overflow():
    model = contractive_model(width=48, dtype=torch.float16)
    with torch.no_grad():
        model.backbone.embedding.weight.mul_(2000)
    z, info = unroll(model, random_tokens(length=20), passes=3)
    assert z.abs().max() > 1000
    assert z.isfinite().all()
    assert 1000 < norms(z).max() < float("inf")
    assert all(residual < 1 for residual in info.changes)


def test_a_model_whose_output_is_zero_has_converged():
    model = small_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    _, info = unroll(model, random_tokens(), passes=3)
    assert (info.changes, info.rate) == ([0.0, 0.0], 0.0)


def test_passes_limit_a_tolerance():
    _, info = unroll(small_model(), random_tokens(length=20), passes=3, tolerance=1e-12)
    assert (info.passes, info.converged) == (3, False)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_continue_exactly(kind, window):
    model = small_model(correction=kind, window=window)
    tokens = random_tokens(length=14)
    exact, after = model.stream(tokens, model.init_state(2))
    state, pieces = model.init_state(2), []
    for chunk in (tokens[:, :5], tokens[:, 5:6], tokens[:, 6:]):
        z, info = unroll(model, chunk, passes=chunk.shape[1] + 1, state=state)
        assert state.position + chunk.shape[1] == info.state.position
        state = info.state
        pieces.append(model.backbone.head(z))
    assert gap(torch.cat(pieces, dim=1), exact) < 1e-10
    more = random_tokens(length=3, seed=4)
    assert gap(model.stream(more, state)[0], model.stream(more, after)[0]) < 1e-10


def test_the_first_pass_of_a_chunk_has_no_correction():
    model = small_model()
    tokens = random_tokens(length=8)
    _, info = unroll(model, tokens[:, :5], 6, state=model.init_state(2))
    first, _ = unroll(model, tokens[:, 5:], 1, state=info.state)
    plain, _ = model.backbone.blocks(model.backbone.embed(tokens[:, 5:]), info.state.cache)
    assert gap(first, plain) == 0.0


def test_a_chunk_with_a_tolerance_continues_within_it():
    model = contractive_model()
    tokens = random_tokens(length=40)
    exact, _ = model.stream(tokens, model.init_state(2))
    _, info = unroll(model, tokens[:, :30], tolerance=1e-9, state=model.init_state(2))
    assert info.passes < 31
    logits, _ = model.stream(tokens[:, 30:], info.state)
    assert 0 < gap(logits, exact[:, 30:]) < 1e-7


def test_one_pass_and_a_model_that_corrects_nothing():
    model = small_model()
    _, info = unroll(model, random_tokens(), passes=1)
    assert (info.passes, info.changes, info.rate, info.error_bound) == (1, [], None, None)
    base = small_model(correction=None).backbone
    still = ContextReady(base, build_correction("add", base, init="zero"))
    _, info = unroll(still, random_tokens(), passes=3)
    assert (info.changes, info.rate, info.error_bound) == ([0.0, 0.0], 0.0, 0.0)
    _, info = unroll(still, random_tokens(), tolerance=0.0)
    assert (info.passes, info.converged) == (2, True)


def test_gradients_flow_but_not_into_the_info():
    model = small_model()
    z, info = unroll(model, random_tokens(), 3)
    assert z.requires_grad
    assert not info.changes_KBT.requires_grad


def test_bad_calls_say_what_is_wrong():
    model, tokens = small_model(), random_tokens()
    for call, message in (
        (lambda: unroll(model, tokens), "passes .* a tolerance, or both"),
        (lambda: unroll(model, tokens, 0), "passes must be .* at least 1, but got 0"),
        (lambda: unroll(model, tokens, tolerance=-1.0), "tolerance must be at least 0 .* but got -1.0"),
        (lambda: unroll(model, tokens, tolerance=float("nan")), "tolerance must be at least 0 .* but got nan"),
        (lambda: unroll(model, tokens, 2, state=model.init_state(1)), "1 rows, but the input has 2"),
        (
            lambda: unroll(model, tokens, 2, state=small_model(width=24).init_state(2)),
            "width 24, .* width 12",
        ),
    ):
        with pytest.raises(ContextReadyError, match=message):
            call()


def test_change_is_relative_to_each_position():
    z = torch.tensor([[[100.0, 0.0], [1.0, 0.0], [0.0, 0.0], [5.0, 0.0]]])
    before = z + torch.tensor([[[1.0, 0.0], [0.5, 0.0], [0.0, 0.0], [4.0, 0.0]]])
    assert largest_change(before[:, :3], z[:, :3]) == pytest.approx(0.5)
    assert largest_change(before, z) == pytest.approx(0.8)
    assert largest_change(before, z, torch.tensor([[1, 1, 1, 0]])) == pytest.approx(0.5)
    assert largest_change(z, z) == 0.0
    assert math.isnan(largest_change(before, z * math.nan))
