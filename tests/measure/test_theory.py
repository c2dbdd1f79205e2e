"""Every bound of the paper, checked on a small model whose true error is known."""

import itertools
import math

import pytest
import reference
import torch
from helpers import KINDS, contractive_model, oracle, random_tokens, randomise, small_model

from contextready import ContextReadyError, unroll
from contextready.measure.bounds import (
    causal_contraction_bound,
    layers_to_reach,
    path_sum_bound,
    receptive_field,
    tracking_bound,
    warm_start_bound,
)
from contextready.measure.contraction import (
    correction_operator,
    correction_trajectory,
    empirical_rate,
    jacobian_norms,
)
from contextready.solve.reading import a_posteriori_bound

T = 8


def contractive(scale=0.3, **changes):
    return contractive_model(scale, layers=1, width=8, heads=2, **changes)


@pytest.fixture(scope="module", params=["full", "windowed"])
def solved(request):
    """A model, its corrections c^(0) … c^(T) with the last exact, and Jacobian norms over all segments between them."""
    model = contractive(window=None if request.param == "full" else 3)
    tokens = random_tokens(batch=1, length=T)
    with torch.no_grad():
        e, trajectory = model.backbone.embed(tokens), correction_trajectory(model, tokens, T)
    exact = trajectory[-1]
    points = [c + s * (exact - c) for c in trajectory[:5] for s in torch.linspace(0, 1, 5)]
    a_TT = torch.stack([jacobian_norms(model, point, e)[0] for point in points]).amax(dim=0)
    return model, tokens, e, trajectory, a_TT


def largest(c):
    return c.norm(dim=-1).max().item()


@pytest.mark.parametrize("kind", KINDS)
def test_empirical_rate_is_the_papers(kind):
    model = small_model(correction=kind)
    tokens = random_tokens(batch=3, length=7)
    for K in (2, 4):
        expected = [reference.empirical_rate(oracle(model), row.tolist(), K) for row in tokens]
        measured = empirical_rate(model, tokens, K)
        assert measured.rate == pytest.approx(max(expected), rel=1e-9)
        assert measured.ratios_BT.nan_to_num(nan=0.0).amax(dim=1).tolist() == pytest.approx(expected, rel=1e-9)
        assert 0.0 < measured.norm_rate <= measured.rate
        assert measured.channel_rate == pytest.approx(reference.channel_rate(oracle(model), tokens.tolist(), K))


def test_empirical_rate_of_settled_positions():
    model = contractive()
    tokens = random_tokens(batch=1, length=6)
    ratios = empirical_rate(model, tokens, 3).ratios_BT
    assert ratios[0, 0].isnan()  # c_0 is settled after one correction, so nothing is left to compare
    assert ratios[0, 1] < 1e-12  # c_1 is settled after two, so its third change is zero
    assert (ratios[0, 2:] > 0).all()
    assert empirical_rate(model, tokens, 9)[:2] == (0.0, 0.0)
    with pytest.raises(ContextReadyError, match=r"corrections must be at least 2.*got 1"):
        empirical_rate(model, tokens, 1)


def test_norm_rate_and_the_floor_of_rounding():
    model, tokens = contractive(), random_tokens(batch=2, length=40)
    c = correction_trajectory(model, tokens, 4)
    measured = empirical_rate(model, tokens, 4)
    assert measured.norm_rate == pytest.approx(largest(c[4] - c[3]) / largest(c[3] - c[2]))
    assert not measured.ratios_BT.requires_grad
    model.float()
    single = empirical_rate(model, tokens, 4)
    assert single[:2] == pytest.approx(measured[:2], rel=1e-3)
    with torch.no_grad():
        broken = contractive()
        broken.correction.ffn.up.weight[0, 0] = float("nan")
    assert math.isnan(empirical_rate(broken, tokens, 4).rate)
    with pytest.raises(ContextReadyError, match="float32 or float64"):
        empirical_rate(contractive(dtype=torch.bfloat16), tokens, 4)
    # In float32 this has long converged: only rounding still changes, and it has no rate.
    assert empirical_rate(model, tokens, 20)[:2] == (0.0, 0.0)


def test_trajectory_is_repeated_application_of_the_operator(solved):
    model, _, e, trajectory, _ = solved
    assert trajectory[0].abs().max() == 0
    for before, after in itertools.pairwise(trajectory):
        assert torch.allclose(correction_operator(model, before, e), after, atol=1e-13)
    assert torch.allclose(correction_operator(model, trajectory[-1], e), trajectory[-1], atol=1e-13)


def test_jacobian_is_strictly_past_only_and_right(solved):
    model, _, e, trajectory, a_TT = solved
    assert a_TT.triu().abs().max() == 0
    assert a_TT.tril(-1)[1:].amax(dim=1).min() > 0
    c, step = trajectory[2].detach(), 1e-6
    change = torch.zeros_like(c)
    change[0, 3] = torch.randn(c.shape[-1], generator=torch.Generator().manual_seed(0), dtype=c.dtype)
    moved = (correction_operator(model, c + step * change, e) - correction_operator(model, c, e))[0] / step
    norms_TT = jacobian_norms(model, c, e)[0]
    assert (moved.norm(dim=-1) <= norms_TT[:, 3] * change.norm() * (1 + 1e-4) + 1e-6).all()
    assert moved[:4].abs().max() == 0


@pytest.mark.parametrize("of", ["correction", "embedding"])
def test_jacobian_norms_against_finite_differences(of):
    model = contractive(window=3)
    tokens = random_tokens(batch=2, length=5)
    with torch.no_grad():
        e, c = model.backbone.embed(tokens), correction_trajectory(model, tokens, 2)[-1]
    norms_BTT = jacobian_norms(model, c, e, of)
    step, C = 1e-6, e.shape[-1]
    for row, s in itertools.product(range(2), range(5)):
        columns = []
        for i in range(C):
            change = torch.zeros_like(e)
            change[row, s, i] = step
            up = (c + change, e) if of == "correction" else (c, e + change)
            down = (c - change, e) if of == "correction" else (c, e - change)
            with torch.no_grad():
                columns.append((correction_operator(model, *up) - correction_operator(model, *down))[row] / (2 * step))
        expected_T = torch.linalg.matrix_norm(torch.stack(columns, dim=-1), ord=2)
        assert torch.allclose(norms_BTT[row, :, s], expected_T, atol=1e-6)
    # Corrections affect later positions only; embeddings affect their own position too.
    assert (norms_BTT.diagonal(dim1=1, dim2=2) > 0).all() == (of == "embedding")


def test_a_posteriori_bound(solved):
    _, _, _, trajectory, a_TT = solved
    rate = causal_contraction_bound(a_TT)
    assert rate < 1
    for k in range(1, 5):
        error = largest(trajectory[k] - trajectory[-1])
        bound = a_posteriori_bound(rate, largest(trajectory[k] - trajectory[k - 1]))
        assert error <= bound < 100 * error


def test_contraction(solved):
    """Theorem (training convergence): the error falls at least by L per pass."""
    _, _, _, trajectory, a_TT = solved
    rate = causal_contraction_bound(a_TT)
    start = largest(trajectory[0] - trajectory[-1])
    for k in range(1, 5):
        assert largest(trajectory[k] - trajectory[-1]) <= rate**k * start


def test_causal_contraction_bound_in_weighted_norms():
    """In the norm of weights that decrease fast, even an expansive strictly causal operator is a contraction."""
    model = contractive(scale=10.0)
    tokens = random_tokens(batch=1, length=T)
    with torch.no_grad():
        e, trajectory = model.backbone.embed(tokens), correction_trajectory(model, tokens, T)
    c, other = trajectory[2], trajectory[-1]
    a_TT = torch.stack([jacobian_norms(model, c + s * (other - c), e)[0] for s in torch.linspace(0, 1, 21)]).amax(dim=0)
    for decay in (1.0, 0.5, 0.01):
        w_T = decay ** torch.arange(T, dtype=torch.float64)
        bound = causal_contraction_bound(a_TT, w_T)
        with torch.no_grad():
            moved = correction_operator(model, other, e) - correction_operator(model, c, e)
        weighted = (w_T * moved.norm(dim=-1)[0]).max() / (w_T * (other - c).norm(dim=-1)[0]).max()
        assert weighted.item() <= bound * (1 + 1e-9)
        assert bound == pytest.approx(max(w_T[t] * (a_TT[t] / w_T).sum() for t in range(T)).item())
    assert causal_contraction_bound(a_TT) > 1
    assert bound < 1


def test_path_sum_bound(solved):
    model, _, e, trajectory, a_TT = solved
    first = largest(correction_operator(model, torch.zeros_like(e), e).detach())
    for n in range(T + 1):
        error_T = (trajectory[n] - trajectory[-1]).norm(dim=-1)[0]
        bound_T = path_sum_bound(a_TT, first, corrections=n)
        assert (error_T <= bound_T * (1 + 1e-9) + 1e-13).all()
        assert (bound_T[:n] == 0).all()  # the first n positions are exact
        assert (bound_T[n:] > 0).all()
        series = first * sum(torch.linalg.matrix_power(a_TT, k).sum(dim=1) for k in range(n, T))
        assert torch.allclose(bound_T, torch.as_tensor(series, dtype=bound_T.dtype), rtol=1e-9, atol=1e-15)
    assert path_sum_bound(a_TT, first, 2)[-1] < 100 * (trajectory[2] - trajectory[-1]).norm(dim=-1)[0, -1]


def test_warm_start_bound(solved):
    """One pass from the old fixed point after the embeddings moved a little."""
    model, _, e, trajectory, _ = solved
    old = trajectory[-1]
    moved_e = e + 0.01 * torch.randn(e.shape, generator=torch.Generator().manual_seed(0), dtype=e.dtype)
    with torch.no_grad():
        new = old
        for _ in range(T + 1):
            new = correction_operator(model, new, moved_e)
        error = largest(correction_operator(model, old, moved_e) - new)
    corners = [(old + s * (new - old), e + r * (moved_e - e)) for s in (0.0, 0.5, 1.0) for r in (0.0, 0.5, 1.0)]
    a_TT = torch.stack([jacobian_norms(model, c, at)[0] for c, at in corners]).amax(dim=0)
    m_TT = torch.stack([jacobian_norms(model, c, at, of="embedding")[0] for c, at in corners]).amax(dim=0)
    rate, embedding_rate = causal_contraction_bound(a_TT), m_TT.sum(dim=1).max().item()
    bound = warm_start_bound(rate, embedding_rate, largest(moved_e - e))
    assert 0 < error <= bound < 1000 * error


def test_tracking_bound():
    """With a small error in every step, a model stays within ε / (1 - L_h). With window 1 the state is z alone."""
    process = contractive(window=1)
    architecture = contractive(window=1)
    with torch.no_grad():
        for weight, noise in zip(
            architecture.parameters(), randomise(contractive(window=1), seed=7).parameters(), strict=True
        ):
            weight.add_(1e-3 * noise)
        architecture.backbone.embedding.weight.copy_(process.backbone.embedding.weight)
    e = process.backbone.embed(random_tokens(batch=1, length=60)).detach()

    def step(model, z, t):
        # Window 1: no other position is attended to, and rotation cancels, so the position does not matter.
        return model.recur(e[:, t : t + 1], z).z_BTC

    z = s = torch.zeros_like(e[:, :1])
    step_error, rate, drift = 0.0, 0.0, []
    for t in range(60):
        with torch.no_grad():
            step_error = max(step_error, (step(architecture, s, t) - step(process, s, t)).norm().item())
        for r in (0.0, 0.5, 1.0):
            point = s + r * (z - s)
            jacobian = torch.autograd.functional.jacobian(lambda v, t=t: step(architecture, v, t), point)
            rate = max(rate, torch.linalg.matrix_norm(jacobian[0, 0, :, 0, 0], ord=2).item())
        with torch.no_grad():
            z, s = step(architecture, z, t), step(process, s, t)
        drift.append((z - s).norm().item())
    assert rate < 1
    bound = tracking_bound(rate, step_error)
    assert max(drift) <= bound < 20 * max(drift)


def test_receptive_field_against_a_real_stack():
    """A context-ready layer has no such limit: its last output depends on the first token."""
    layers, window = 2, 3
    assert receptive_field(layers, window) == 4
    assert layers_to_reach(4, window) == 2
    assert layers_to_reach(5, window) == 3
    assert layers_to_reach(0, window) == 0
    for distance, width in itertools.product(range(1, 40), range(2, 9)):
        needed = layers_to_reach(distance, width)
        assert receptive_field(needed, width) >= distance > receptive_field(needed - 1, width)
        assert needed >= math.ceil(distance / width)  # the paper's bound, which does not count the token itself
    with pytest.raises(ContextReadyError, match="window of 1"):
        layers_to_reach(3, 1)

    tokens = random_tokens(batch=1, length=12)
    changed = tokens.clone()
    changed[0, 0] = (changed[0, 0] + 1) % 23
    transformer = small_model(correction=None, layers=layers, window=window)
    difference = (transformer(tokens) - transformer(changed)).abs().amax(dim=-1)[0]
    assert (difference[:5] > 0).all()
    assert (difference[5:] == 0).all()
    model = small_model(layers=layers, window=window)
    difference = (unroll(model, tokens, 13)[0] - unroll(model, changed, 13)[0]).abs().amax(dim=-1)[0]
    assert (difference > 1e-9).all()


def test_bounds_by_hand():
    assert a_posteriori_bound(0.75, 2.0) == pytest.approx(6.0)
    assert warm_start_bound(0.75, 5.0, 0.1) == pytest.approx(1.5)
    assert tracking_bound(0.75, 2.0) == pytest.approx(8.0)
    a_TT = torch.tensor([[0.0, 0.0, 0.0], [0.5, 0.0, 0.0], [0.25, 2.0, 0.0]])
    assert causal_contraction_bound(a_TT) == pytest.approx(2.25)
    assert causal_contraction_bound(a_TT, torch.tensor([4.0, 2.0, 1.0])) == pytest.approx(1.0625)
    assert path_sum_bound(a_TT, 3.0, 0).tolist() == pytest.approx([3.0, 4.5, 12.75])
    assert path_sum_bound(a_TT, 3.0, 2).tolist() == pytest.approx([0.0, 0.0, 3.0])


def test_bad_input_says_what_is_wrong(solved):
    *_, a_TT = solved
    ones = torch.ones(T, dtype=torch.float64)
    for call, message in (
        (lambda: a_posteriori_bound(1.0, 0.1), "rate must be at least 0 and less than 1, but got 1"),
        (lambda: tracking_bound(-0.1, 0.1), "rate"),
        (lambda: warm_start_bound(2.0, 1.0, 0.1), "rate"),
        (lambda: causal_contraction_bound(a_TT.T), "zero on and above the diagonal"),
        (lambda: causal_contraction_bound(-a_TT), "non-negative"),
        (lambda: causal_contraction_bound(a_TT, ones - 1), "positive"),
        (lambda: causal_contraction_bound(a_TT, ones[1:]), "per position"),
        (lambda: path_sum_bound(a_TT, 1.0, -1), "corrections must be at least 0, but got -1"),
        (lambda: jacobian_norms(None, ones, ones, of="z"), "'correction' or 'embedding', but got 'z'"),
    ):
        with pytest.raises(ContextReadyError, match=message):
            call()
