"""Models with their matrices in bf16: what is narrow, what stays as it is, and how close the logits are."""

import pytest
import torch
from helpers import KINDS, random_tokens, small_model
from prefill_helpers import settling_model, wrapped
from torch import nn

from contextready import ContextReadyError
from contextready.model import narrow
from contextready.model.narrow import NarrowHead, NarrowLinear, in_precision, is_narrow, narrowed

UNIT = 2.0**-8
"""The distance between neighbouring numbers in bf16, relative to the number, is at most twice this."""


def rounded(x):
    return x.to(torch.bfloat16).double()


def linear(inputs=64, outputs=48, bias=True):
    torch.manual_seed(5)
    return nn.Linear(inputs, outputs, bias=bias)


@pytest.mark.parametrize("rows", [1, 2, 33])
@pytest.mark.parametrize("bias", [False, True])
def test_a_narrow_layer_rounds_its_inputs_weights_and_outputs_and_nothing_else(bias, rows):
    wide = linear(bias=bias)
    x = torch.randn(rows, 3, 64)
    exact = rounded(x) @ rounded(wide.weight).T + (rounded(wide.bias) if bias else 0.0)
    found = NarrowLinear(wide)(x)
    assert found.dtype == torch.float32
    # Half a unit for the output; products are summed in fp32.
    assert ((found - exact).abs() <= UNIT * exact.abs() + 1e-5).all()
    assert not torch.equal(found, wide(x))


@pytest.mark.parametrize("bias", [False, True])
def test_the_largest_logits_of_a_narrow_head_are_not_rounded(bias, monkeypatch):
    monkeypatch.setattr(narrow, "CANDIDATES", 5)
    wide = linear(outputs=200, bias=bias)
    x = torch.randn(2, 3, 64)
    exact = rounded(x) @ rounded(wide.weight).T + (rounded(wide.bias) if bias else 0.0)
    found = NarrowHead(wide)(x)
    error = (found - exact).abs()
    # The last candidates may be passed by rounded ones.
    assert (error.gather(-1, exact.topk(2, dim=-1).indices) < 1e-5).all()
    assert error.max() > 1e-4  # the others are rounded
    assert torch.equal(found.argmax(-1), exact.argmax(-1))


def test_a_head_with_few_outputs_is_not_rounded_at_all():
    wide = linear(outputs=7)
    x = torch.randn(4, 64)
    exact = rounded(x) @ rounded(wide.weight).T + rounded(wide.bias)
    assert (NarrowHead(wide)(x) - exact).abs().max() < 1e-5


@pytest.mark.parametrize("changes", [{}, {"bias": True, "extra_ffn": True}, {"tied_embeddings": True}, {"window": 5}])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_streamed_logits_are_close_to_those_in_fp32(kind, changes):
    model, tokens = settling_model(kind, dtype=torch.float32, **changes), random_tokens(batch=3, length=40)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    twin = narrowed(model)
    exact, state = model.stream(tokens, model.init_state(3))
    found, narrow_state = twin.stream(tokens, twin.init_state(3))
    assert found.dtype == torch.float32
    assert 0.0 < (found - exact).norm() / exact.norm() < 1e-2
    assert (found - exact).abs().max() < 0.05 * exact.abs().max()
    # The model itself is as before, and either continues from the state of the other.
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert narrow_state.cache.layers[0][0].dtype == narrow_state.carried_BRC.dtype == torch.float32
    more = random_tokens(batch=3, length=4, seed=8)
    continued, expected = model.stream(more, narrow_state)[0], model.stream(more, state)[0]
    assert (continued - expected).norm() / expected.norm() < 1e-2
    assert twin.stream(more, state)[0].shape == expected.shape


@pytest.mark.parametrize("kind", KINDS)
def test_matrices_are_narrow_and_everything_else_is_shared(kind):
    model = small_model(correction=kind, dtype=torch.float32)
    twin = narrowed(model)
    assert is_narrow(twin)
    assert not is_narrow(model)
    originals = {id(weight) for weight in model.parameters()}
    for part in twin.modules():
        own = list(part.parameters(recurse=False))
        assert all(weight.dtype == torch.bfloat16 for weight in own) or not isinstance(part, nn.Linear)
        assert all(id(weight) in originals for weight in own) or isinstance(part, nn.Linear)
    assert twin.correction.fits(twin.backbone)
    prompts_only = narrowed(model, head=False)
    assert prompts_only.backbone.unembedding.weight is model.backbone.unembedding.weight
    assert not twin.training


def test_precisions_by_name(monkeypatch):
    model = small_model(dtype=torch.float32)
    assert in_precision(model, "fp32") is model
    assert is_narrow(in_precision(model, "bf16"))
    for native in (False, True):
        monkeypatch.setattr("contextready.device.multiplies_bf16", lambda _, native=native: native)
        assert is_narrow(in_precision(model, "auto")) == native
    other = wrapped(model)
    assert in_precision(other, "auto") is other
    with pytest.raises(ContextReadyError, match="Only native transformers compute in bf16"):
        in_precision(other, "bf16")
    with pytest.raises(ContextReadyError, match="Unknown precision 'bf8'; choose one of: auto, fp32, bf16"):
        in_precision(model, "bf8")


def test_a_device_that_cannot_compute_in_bf16_is_refused(monkeypatch):
    def unsupported(*_):
        raise RuntimeError("not implemented for BFloat16")

    monkeypatch.setattr("contextready.device.F.linear", unsupported)
    with pytest.raises(ContextReadyError, match="device=cpu cannot compute in bf16; choose precision=fp32"):
        in_precision(small_model(dtype=torch.float32), "bf16")
