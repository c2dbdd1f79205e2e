"""The settings with which the author's runs can be repeated: initial weights, the head's bias, places of dropout.

`test_oracle.py` compares the rotary angles, the head's bias and the corrections with the oracle.
"""

import pytest
import torch
from helpers import gap, random_tokens, small_config, small_model

from contextready import CORRECTIONS, ContextReadyError, build_model
from contextready.model.cost import account
from contextready.model.shapes import weight_shapes
from contextready.solve.gradients import continued, settle
from contextready.solve.unroll import drops_out
from contextready.train.objective import Objective

AUTHORS = {"bias": True, "head_bias": True, "rope": "integer", "init": "torch"}


def mask(x, p=0.5):
    return torch.nn.functional.dropout(torch.ones_like(x), p)


def test_weights_start_as_in_pytorch():
    torch.manual_seed(0)
    model = build_model(small_config(vocab_size=500, width=64, layers=4, heads=2, **AUTHORS))
    assert 0.98 < model.backbone.embedding.weight.std() < 1.02
    linears = [part for part in model.modules() if isinstance(part, torch.nn.Linear)]
    assert len(linears) == 4 * 4 + 1 + 2
    for linear in linears:
        bound = linear.in_features**-0.5
        for p in (linear.weight, linear.bias):
            # The largest of many uniform numbers is near the bound, at every depth.
            assert 0.9 * bound < p.abs().max() <= bound
    norms = [part for part in model.modules() if isinstance(part, torch.nn.LayerNorm)]
    assert all(bool((norm.weight == 1).all()) and not bool(norm.bias.any()) for norm in norms)


def test_a_correction_at_zero_has_no_bias_either():
    model = build_model(small_config(correction_init="zero", **AUTHORS)).eval()
    assert not any(bool(p.any()) for p in model.correction.ffn.down.parameters())
    assert bool(model.correction.ffn.up.bias.any())
    tokens = random_tokens()
    assert torch.equal(model(tokens, 1), model(tokens, 3))


def test_the_default_start_is_unchanged():
    """Settings that are left out draw no random numbers."""

    def first(**changes):
        torch.manual_seed(0)
        return build_model(small_config(**changes)).state_dict()

    plain, other = first(), first(dropout=0.3, attention_dropout=0.2, dropout_at="embedding", rope="integer")
    assert all(torch.equal(plain[name], other[name]) for name in plain)


@pytest.mark.parametrize("kind", [None, *CORRECTIONS])
@pytest.mark.parametrize("extra_ffn", [False, True])
def test_weights_are_counted_and_named(kind, extra_ffn):
    config = small_config(correction=kind, extra_ffn=extra_ffn, **AUTHORS)
    model = build_model(config)
    named = (model.backbone if kind is None else model).state_dict()
    assert {name: tuple(p.shape) for name, p in named.items()} == dict(weight_shapes(config))
    assert sum(p.numel() for p in model.parameters()) == account(config).parameters


@pytest.mark.parametrize("kind", ["add", "tied"])
def test_dropout_of_the_embeddings_is_the_same_in_all_passes(kind):
    """The masks of one pass, drawn again in the same order: e once; then the correction and the branches."""
    model = small_model(layers=1, dropout=0.5, dropout_at="embedding", correction=kind).train()
    tokens, block = random_tokens(batch=1, length=20), model.backbone.layers[0]
    torch.manual_seed(0)
    e = model.embed(tokens)
    first = model.recur(e, None)
    second = model.recur(e, first.carried_BTC)
    torch.manual_seed(0)
    expected_e = mask(e) * model.backbone.embed(tokens)
    assert gap(e, expected_e) == 0.0
    assert 0.3 < (e == 0).double().mean() < 0.7

    def blocks(h):
        from contextready.model.attention import Attend

        h = h + mask(h) * block.attn(block.attn_norm(h), Attend(model.backbone.config, h), 0)
        return h + mask(h) * block.ffn(block.ffn_norm(h))

    assert gap(first.z_BTC, blocks(e)) < 1e-12
    network = block.ffn if kind == "tied" else model.correction.ffn
    correction = mask(e) * network(model.correction.norm(first.z_BTC + e))
    assert gap(second.correction_BTC, correction) < 1e-12
    assert gap(second.z_BTC, blocks(e + correction)) < 1e-12


def test_a_transformer_has_no_dropout_of_the_embeddings():
    model = small_model(correction=None, dropout=0.5, dropout_at="embedding").train()
    tokens = random_tokens()
    assert torch.equal(model.embed(tokens), model.backbone.embed(tokens))
    assert model.backbone.input_dropout.p == 0.0
    assert gap(model(tokens), model(tokens)) > 1e-3


@pytest.mark.parametrize("window", [None, 3])
def test_dropout_of_the_attention_weights(window):
    """Values of one make an output the sum of its weights, so it shows which weights were dropped."""
    model = small_model(correction=None, layers=1, heads=1, window=window, attention_dropout=0.5, bias=True)
    attention = model.backbone.layers[0].attn
    C = model.backbone.width
    with torch.no_grad():
        attention.qkv.weight.zero_()
        attention.qkv.bias[: 2 * C] = 0.0
        attention.qkv.bias[2 * C :] = 1.0
        attention.out.weight.copy_(torch.eye(C))
        attention.out.bias.zero_()
    from contextready.model.attention import Attend

    x = torch.zeros(1, 5, C, dtype=torch.float64)
    attend = Attend(model.backbone.config, x)
    assert gap(attention(x, attend, 0), torch.ones_like(x)) < 1e-12
    model.train()
    torch.manual_seed(0)
    sums = torch.stack([attention(x, attend, 0)[0, :, 0] for _ in range(300)])
    # Position 0 sees itself alone: its weight is dropped or doubled.
    assert set(sums[:, 0].tolist()) == {0.0, 2.0}
    assert (sums.mean(0) - 1.0).abs().max() < 0.2
    assert drops_out(model)
    assert not drops_out(model.eval())


def test_the_places_of_dropout_in_few_settings():
    model = small_model(dropout=0.4, attention_dropout=0.4, dropout_at="embedding").train()
    rates = {name: part.p for name, part in model.named_modules() if isinstance(part, torch.nn.Dropout)}
    assert rates.pop("backbone.input_dropout") == 0.0
    assert set(rates.values()) == {0.4}
    tokens = random_tokens()
    e = model.embed(tokens)
    # One set of masks has a fixed point, which the gradients without an unroll need.
    torch.manual_seed(1)
    settled = settle(model, e.detach(), 12)
    (again,) = continued(model, e, settled.carried_BTC, 1)
    assert gap(settled.z_BTC, again.z_BTC) < 1e-6


@pytest.mark.parametrize("gradient", ["unroll", "truncated", "implicit", "bptt"])
def test_every_gradient_mode_trains_with_them(gradient):
    model = small_model(dropout=0.2, attention_dropout=0.2, dropout_at="embedding", **AUTHORS).train()
    weight = 0.1 if gradient in ("unroll", "truncated") else 0.0
    objective = Objective(model, gradient=gradient, convergence_weight=weight)
    objective.backward(random_tokens(), random_tokens(seed=5), None if gradient == "bptt" else 3)
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope": "neox"}, "rope=neox is unknown"),
        ({"init": "tf"}, "init=tf is unknown"),
        ({"dropout_at": "inptu"}, "did you mean 'input'"),
        ({"attention_dropout": 1.0}, "attention_dropout must be at least 0 and less than 1, but got 1.0"),
        ({"rope": "integer", "rope_base": 500.0}, "rope_base=500 does not apply to rope=integer"),
    ],
)
def test_wrong_values_are_refused(changes, message):
    with pytest.raises(ContextReadyError, match=message):
        small_config(**changes)
