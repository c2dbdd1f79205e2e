"""The package compared with the oracle in float64, for every correction, with full and windowed attention."""

import pytest
import reference
from helpers import KINDS, gap, per_row, random_tokens, small_model, stream_in_chunks

TOLERANCE = 1e-10
SHAPES = [(1, None), (1, 3), (3, None), (3, 3)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("extra_ffn", [False, True])
@pytest.mark.parametrize(("layers", "window"), SHAPES)
def test_transformer(layers, window, extra_ffn, bias):
    model = small_model(correction=None, layers=layers, window=window, extra_ffn=extra_ffn, bias=bias)
    tokens = random_tokens()
    expected = per_row(reference.transformer, model, tokens)
    assert gap(model(tokens), expected) < TOLERANCE
    logits, state = model.stream(tokens[:, :4], model.init_state(2))
    more, _ = model.stream(tokens[:, 4:], state)
    assert gap(logits, expected[:, :4]) < TOLERANCE
    assert gap(more, expected[:, 4:]) < TOLERANCE


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, "memoryless"])
@pytest.mark.parametrize(("layers", "window"), SHAPES)
def test_parallel_and_streaming(layers, window, kind, bias):
    model = small_model(correction=kind, layers=layers, window=window, bias=bias)
    tokens = random_tokens(batch=1, length=7)
    for K in (1, 2, 3, 8):
        assert gap(model(tokens, K), per_row(reference.parallel, model, tokens, K)) < TOLERANCE
    streamed, _ = stream_in_chunks(model, tokens, [1] * 7)
    assert gap(streamed, per_row(reference.streaming, model, tokens)) < TOLERANCE


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kind", [None, *KINDS])
def test_the_authors_rotary_angles_and_head(kind, window):
    """With randomised weights, both make a difference."""
    model = small_model(correction=kind, window=window, heads=2, bias=True, rope="integer", head_bias=True)
    tokens = random_tokens(batch=1, length=7)
    streamed, _ = stream_in_chunks(model, tokens, [3, 1, 3] if kind is None else [1] * 7)
    if kind is None:
        expected = per_row(reference.transformer, model, tokens)
        assert gap(model(tokens), expected) < TOLERANCE
        assert gap(streamed, expected) < TOLERANCE
        return
    for K in (1, 2, 3, 8):
        assert gap(model(tokens, K), per_row(reference.parallel, model, tokens, K)) < TOLERANCE
    assert gap(streamed, per_row(reference.streaming, model, tokens)) < TOLERANCE


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gain", [None, "scalar", "channel"])
@pytest.mark.parametrize("kind", ["add", "balanced", "concat", "concat_z", "blind", "memoryless"])
def test_a_scaled_correction(kind, gain, bias):
    model = small_model(correction=kind, correction_scale=0.3, correction_gain=gain, bias=bias)
    tokens = random_tokens(batch=1, length=7)
    for K in (1, 2, 4):
        assert gap(model(tokens, K), per_row(reference.parallel, model, tokens, K)) < TOLERANCE
    streamed, _ = stream_in_chunks(model, tokens, [1] * 7)
    assert gap(streamed, per_row(reference.streaming, model, tokens)) < TOLERANCE


@pytest.mark.parametrize("kind", [*KINDS, "memoryless"])
def test_cumulative_unroll(kind):
    model = small_model(correction=kind, gain=0.5)
    tokens = random_tokens(batch=1, length=7)
    expected = per_row(reference.parallel, model, tokens, 4, cumulative=True)
    assert gap(model(tokens, 4, cumulative=True), expected) < TOLERANCE


def test_oracle_itself_streams_its_fixed_point():
    """The oracle's own parallel passes and stream agree, so it is an independent check and not a copy."""
    model = small_model(correction="add", window=3)
    tokens = random_tokens(batch=1, length=6)
    streamed = per_row(reference.streaming, model, tokens)
    assert gap(per_row(reference.parallel, model, tokens, 7), streamed) < TOLERANCE
    assert gap(per_row(reference.parallel, model, tokens, 3), streamed) > 1e-3
