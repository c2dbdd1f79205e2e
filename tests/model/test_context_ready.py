"""Streaming, chunks and parallel passes are one function; causality; independence of rows; conversion."""

import copy

import pytest
import torch
from helpers import (
    KINDS,
    SILENT_AT_START,
    gap,
    random_tokens,
    randomise,
    small_config,
    small_model,
    stream_in_chunks,
)

from contextready import ContextReady, ContextReadyError, build_correction, build_model, unroll
from contextready.model.attention import Attend
from contextready.model.context_ready import shift_right
from contextready.model.correction import Correction
from contextready.model.correction_module import CorrectionModule

TOLERANCE = 1e-10


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_streaming_is_the_fixed_point(kind, window):
    model = small_model(correction=kind, window=window)
    tokens = random_tokens(length=11)
    one_by_one, _ = stream_in_chunks(model, tokens, [1] * 11)
    in_chunks, _ = stream_in_chunks(model, tokens, [3, 1, 5, 2])
    assert gap(in_chunks, one_by_one) < TOLERANCE
    assert gap(model(tokens, passes=12), one_by_one) < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_exactly_the_first_positions_match_after_K_passes(kind):
    model = small_model(correction=kind)
    tokens = random_tokens(length=9)
    exact, _ = model.stream(tokens, model.init_state(2))
    for K in range(1, 9):
        matching = K if kind in SILENT_AT_START else K - 1
        difference_T = (model(tokens, K) - exact).abs().amax(dim=(0, 2))
        assert difference_T[:matching].numel() == 0 or difference_T[:matching].max() < TOLERANCE
        assert difference_T[matching] > 1e-6


def test_first_pass_has_no_correction_even_at_position_zero():
    model = small_model()
    tokens = random_tokens()
    plain = ContextReady(model.backbone)(tokens)
    assert gap(model(tokens, 1), plain) == 0.0
    assert gap(model(tokens, 2)[:, :1], plain[:, :1]) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_cumulative_unroll_does_not_stream(kind):
    model = small_model(correction=kind, gain=0.5)
    tokens = random_tokens(length=7)
    exact, _ = model.stream(tokens, model.init_state(2))
    assert gap(model(tokens, 8), exact) < TOLERANCE
    assert gap(model(tokens, 8, cumulative=True), exact) > 1e-3


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_later_tokens_change_no_earlier_bit(kind, window):
    model = small_model(correction=kind, window=window, dtype=torch.float32)
    tokens = random_tokens(length=33)
    for t in (0, 1, 16, 32):
        changed = tokens.clone()
        changed[:, t] = (changed[:, t] + 1) % 23
        for logits, other in (
            (model(tokens, 5), model(changed, 5)),
            (_streamed(model, tokens), _streamed(model, changed)),
        ):
            assert torch.equal(logits[:, :t], other[:, :t])
            assert not torch.equal(logits[:, t], other[:, t])


def _streamed(model, tokens):
    return model.stream(tokens, model.init_state(tokens.shape[0]))[0]


@pytest.mark.parametrize("window", [None, 3])
def test_a_row_does_not_depend_on_its_neighbours(window):
    model = small_model(window=window)
    tokens = random_tokens(batch=3, length=10)
    changed = tokens.clone()
    changed[1:] = random_tokens(batch=2, length=10, seed=5)
    for run in (lambda t: model(t, 5), lambda t: _streamed(model, t)):
        assert torch.equal(run(tokens)[0], run(changed)[0])
        assert gap(run(tokens)[:1], run(tokens[:1])) < TOLERANCE


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kind", ["add", "concat", "blind"])
def test_zero_initialised_conversion_changes_nothing_and_learns(kind, window):
    base = small_model(correction=None, window=window)
    backbone = copy.deepcopy(base.backbone)
    model = ContextReady(backbone, build_correction(kind, backbone, init="zero"))
    tokens = random_tokens()
    for K in (1, 2, 5):
        assert gap(model(tokens, K), base(tokens)) == 0.0
    state, plain = model.init_state(2), base.init_state(2)
    for t in range(tokens.shape[1]):
        logits, state = model.stream(tokens[:, t : t + 1], state)
        expected, plain = base.stream(tokens[:, t : t + 1], plain)
        assert gap(logits, expected) == 0.0

    model(tokens, 2).square().mean().backward()
    assert model.correction.ffn.down.weight.grad.abs().max() > 1e-6
    # The inner layer learns one step later, because its gradient passes through the zero output layer.
    assert model.correction.ffn.up.weight.grad.abs().max() == 0.0


def test_a_custom_correction_that_is_not_registered_streams_as_its_passes_do():
    class Doubled(Correction):
        def __call__(self, ops, z, e):
            return ops.corr_ffn(ops.LN(z + e + e))

    backbone, tokens = small_model().backbone, random_tokens()
    model = randomise(ContextReady(backbone, CorrectionModule(Doubled(), backbone).double()))
    assert model.is_recurrent
    assert Doubled.name is None
    assert gap(model.stream(tokens, model.init_state(2))[0], model(tokens, 10)) < TOLERANCE
    assert gap(model(tokens, 10), ContextReady(backbone)(tokens)) > 1e-3


def test_correction_takes_the_dtype_of_its_backbone():
    base = small_model(correction=None, dtype=torch.float64)
    assert {p.dtype for p in build_correction("add", base.backbone).parameters()} == {torch.float64}


def test_tied_correction_shares_the_last_block_and_is_saved_once():
    model = small_model(correction="tied")
    names = [name for name in model.state_dict() if name.startswith("correction.")]
    assert names == ["correction.norm.weight"]
    moved = copy.deepcopy(model)
    tokens = random_tokens()
    with torch.no_grad():
        moved.backbone.layers[-1].ffn.down.weight.zero_()
    assert gap(moved(tokens, 3), moved(tokens, 1)) < TOLERANCE  # a zero shared FFN corrects nothing
    assert gap(model(tokens, 3), model(tokens, 1)) > 1e-3  # and the copy's weights are its own


def test_dropout_is_redrawn_at_every_pass_and_off_in_evaluation():
    model = small_model(dropout=0.5).train()
    tokens = random_tokens(batch=1, length=6)
    e = model.backbone.embed(tokens)
    torch.manual_seed(0)
    # Two passes without a correction have the same input, so only the masks can differ.
    assert gap(model.recur(e, None).z_BTC, model.recur(e, None).z_BTC) > 1e-3
    model.eval()
    assert gap(model.recur(e, None).z_BTC, model.recur(e, None).z_BTC) == 0.0


def test_dropout_sits_at_the_input_and_at_the_end_of_every_branch():
    model = small_model(correction=None, layers=1, extra_ffn=True, dropout=0.5).train().backbone
    block, x = model.layers[0], torch.ones(1, 40, 12, dtype=torch.float64)
    torch.manual_seed(0)
    z, _ = model.blocks(x)
    torch.manual_seed(0)
    masks = [torch.nn.functional.dropout(torch.ones_like(x), 0.5) for _ in range(4)]
    attend = Attend(model.config, x)
    h = x * masks[0]
    h = h + masks[1] * block.attn(block.attn_norm(h), attend, 0)
    h = h + masks[2] * block.ffn(block.ffn_norm(h))
    h = h + masks[3] * model.extra_ffn(model.extra_norm(h))
    assert gap(z, h) < 1e-12
    assert all(0.3 < (mask == 0).double().mean() < 0.7 for mask in masks)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_through_the_stream_is_that_of_the_converged_unroll(kind):
    """Backpropagation through time, across a state, is backpropagation through T + 1 passes."""

    def gradients(run):
        model = small_model(correction=kind, window=4)
        run(model).square().mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    tokens = random_tokens(length=7)
    streamed = gradients(lambda model: stream_in_chunks(model, tokens, [3, 4])[0])
    unrolled = gradients(lambda model: model(tokens, 8))
    in_chunks = gradients(lambda model: _unrolled_in_chunks(model, tokens, [3, 4]))
    for a, b, c in zip(streamed, unrolled, in_chunks, strict=True):
        assert gap(a, b) < TOLERANCE
        assert gap(a, c) < TOLERANCE


def _unrolled_in_chunks(model, tokens, lengths):
    state, pieces, start = model.init_state(tokens.shape[0]), [], 0
    for length in lengths:
        z, info = unroll(model, tokens[:, start : start + length], length + 1, state=state)
        state, start = info.state, start + length
        pieces.append(model.backbone.head(z))
    return torch.cat(pieces, dim=1)


def test_gradients_reach_every_weight_through_all_passes():
    for kind in KINDS:
        model = small_model(correction=kind)
        model(random_tokens(), 4).square().mean().backward()
        assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters()), kind


def test_gradient_of_the_unroll_is_right():
    """Against finite differences, in float64."""
    model = small_model(width=4, heads=2, layers=1, vocab_size=5)
    tokens = random_tokens(batch=1, length=4, vocab_size=5)
    for name in ("correction.ffn.up.weight", "backbone.layers.0.attn.qkv.weight", "backbone.embedding.weight"):

        def loss(value, name=name):
            return torch.func.functional_call(model, {name: value}, (tokens, 2)).square().mean()

        weight = model.get_parameter(name)
        assert torch.autograd.gradcheck(loss, (weight.detach().clone().requires_grad_(),))


def test_shift_right():
    z = torch.arange(6.0).view(1, 3, 2)
    assert shift_right(z).tolist() == [[[0, 0], [0, 1], [2, 3]]]
    assert shift_right(z, torch.full((1, 1, 2), 9.0)).tolist() == [[[9, 9], [0, 1], [2, 3]]]


def test_initialisation_is_seeded_and_differs_by_choice():
    def weights(**changes):
        torch.manual_seed(3)
        return build_model(small_config(**changes)).correction.ffn.down.weight

    assert torch.equal(weights(), weights())
    assert weights().abs().max() > 0
    biased = build_model(small_config(bias=True))
    biases = {name: p for name, p in biased.named_parameters() if name.endswith("bias")}
    assert {"correction.ffn.down.bias", "correction.norm.bias", "backbone.layers.0.attn.qkv.bias"} <= biases.keys()
    assert all(p.abs().max() == 0 for p in biases.values())
    assert not any(name.endswith("bias") for name, _ in build_model(small_config()).named_parameters())
    assert 0.015 < biased.backbone.embedding.weight.std() < 0.025
    assert weights(correction_init="zero").abs().max() == 0


def test_bad_calls_say_what_is_wrong():
    model, other = small_model(), small_model(layers=1)
    tokens = random_tokens()
    e = model.backbone.embed(tokens)
    cases = [
        (lambda: model(tokens, 0), "whole number of at least 1, but got 0"),
        (lambda: model(tokens, 2.5), "but got 2.5"),
        (lambda: model(tokens, 2.0), "but got 2.0"),
        (lambda: model(tokens, None), r"passes \(the K of the unroll\) is required"),
        (lambda: model(tokens.to("meta"), 2), "tokens are on meta, but the model is on cpu"),
        (lambda: model.backbone.init_cache(2, history=-2), "history at least 0, but got 2 and -2"),
        (lambda: model(tokens + 23, 2), "out of range: this model's ids are 0 to 22"),
        (lambda: model(tokens - 30, 2), "out of range"),
        (lambda: model(tokens[0], 2), r"shape \(batch, tokens\).* got \(9,\)"),
        (lambda: model(tokens[:, :0], 2), r"got \(2, 0\)"),
        (lambda: model(tokens.float(), 2), "must be int64 or int32"),
        (lambda: model(tokens.bool(), 2), "must be int64 or int32"),
        (lambda: model.stream(tokens, other.init_state(2)), "state does not match the model"),
        (lambda: model.stream(tokens, small_model(width=24).init_state(2)), "has width 24, .* the model has width 12"),
        (
            lambda: model.stream(tokens, small_model(dtype=torch.float32).init_state(2)),
            "float32 .*but the model has .*float64",
        ),
        (lambda: model.stream(tokens[0], model.init_state(1)), r"got \(9,\)"),
        (lambda: unroll(model, tokens[0], tolerance=0.1), r"got \(9,\)"),
        (lambda: model.backbone.init_cache(2).rollback(1), "0 tokens have been read"),
        (lambda: model.stream(tokens, small_model(window=3).init_state(2)), "state does not match the model"),
        (lambda: model.stream(tokens, model.init_state(3)), "3 rows, but the input has 2"),
        (lambda: model.init_state(0), "batch_size must be at least 1"),
        (lambda: model.init_state(1, history=-1), "history"),
        (lambda: model.stream(tokens, None), "not a state"),
        (lambda: model.stream(tokens, model.backbone.init_cache(2)), "not a state"),
        (lambda: model.stream(tokens, small_model().to("meta").init_state(2)), "on meta, but the model has .* on cpu"),
        (lambda: model.backbone.blocks(e, model.init_state(2)), "not a cache for this kind"),
        (lambda: model.backbone.blocks(e, []), "not a cache for this kind"),
        (lambda: ContextReady(small_model(width=24).backbone, model.correction), "belongs to another backbone"),
        (lambda: ContextReady(other.backbone, build_correction("tied", model.backbone)), "belongs to another backbone"),
        (lambda: model.backbone.blocks(e, model.backbone.init_cache(5)), "5 rows, but the input has 2"),
        (lambda: build_correction("ad", model.backbone), "did you mean 'add'"),
        (lambda: build_correction("add", model.backbone, init="ones"), "random, zero"),
    ]
    for call, message in cases:
        with pytest.raises(ContextReadyError, match=message):
            call()
