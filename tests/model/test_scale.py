"""The size of a correction: a fixed or learned factor on its output."""

import dataclasses

import pytest
import torch
from helpers import gap, random_tokens, small_config, small_model

from contextready import account, build_model
from contextready.errors import ContextReadyError
from contextready.model.shapes import weight_shapes

GAINS = [None, "scalar", "channel"]


def corrections(model, tokens):
    e = model.backbone.embed(tokens)
    return model.correction(torch.ones_like(e), e)


@pytest.mark.parametrize("gain", GAINS)
def test_the_factor_multiplies_the_correction(gain):
    torch.manual_seed(0)
    plain = build_model(small_config())
    torch.manual_seed(0)
    scaled = build_model(small_config(correction_scale=0.25, correction_gain=gain))
    tokens = random_tokens()
    assert corrections(plain, tokens).abs().max() > 0
    assert gap(corrections(scaled, tokens), 0.25 * corrections(plain, tokens)) < 1e-7


def test_the_factor_of_the_paper_is_one():
    assert (small_config().correction_scale, small_config().correction_gain) == (1.0, None)
    model = small_model()
    tokens = random_tokens()
    network = model.correction.ffn(model.correction.norm(torch.ones(1, 1, 12).double() + model.backbone.embed(tokens)))
    assert torch.equal(corrections(model, tokens), network)


def test_a_learned_factor_per_channel_scales_each_channel():
    model = small_model(correction_gain="channel")
    tokens = random_tokens()
    before = corrections(model, tokens)
    with torch.no_grad():
        model.correction.gain[3] *= 7.0
    after = corrections(model, tokens)
    assert gap(after[..., 3], 7.0 * before[..., 3]) < 1e-12
    assert gap(after[..., 4:], before[..., 4:]) == 0.0


@pytest.mark.parametrize(("gain", "more"), [(None, 0), ("scalar", 1), ("channel", 12)])
def test_learned_factors_are_weights_and_are_counted(gain, more):
    config = small_config(correction_scale=0.5, correction_gain=gain)
    model = build_model(config)
    assert account(config).parameters == account(small_config()).parameters + more
    assert sum(p.numel() for p in model.parameters()) == account(config).parameters
    assert dict(weight_shapes(config)) == {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert account(config).macs == account(small_config()).macs


def test_a_transformer_ignores_the_size_of_a_correction_that_it_does_not_have():
    config = small_config(correction=None, correction_scale=0.5, correction_gain="channel")
    model = build_model(config)
    assert sum(p.numel() for p in model.parameters()) == account(config).parameters


def test_zero_and_scaled_starts_as_a_transformer_and_learns_from_the_first_step():
    model = build_model(small_config(correction_init="zero", correction_scale=0.02))
    tokens = random_tokens()
    assert torch.equal(model(tokens, 3), model(tokens, 1))
    model(tokens, 2).square().sum().backward()
    assert model.correction.ffn.down.weight.grad.abs().max() > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"correction_scale": 0.0}, "correction_scale must be greater than 0 and at most 1e\\+06, but got 0"),
        ({"correction_scale": float("nan")}, "but got nan"),
        ({"correction_scale": -1.0}, "but got -1"),
        ({"correction_gain": "chanel"}, "Unknown correction_gain 'chanel'; did you mean 'channel'?"),
        ({"correction": "block_head", "correction_scale": 0.5}, "correction=block_head has no network of its own"),
        ({"correction": "tied", "correction_gain": "scalar"}, "correction=tied has no network of its own"),
    ],
)
def test_bad_sizes_are_refused(changes, message):
    with pytest.raises(ContextReadyError, match=message):
        dataclasses.replace(small_config(), **changes)
