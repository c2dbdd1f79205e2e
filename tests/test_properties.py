"""For random shapes, windows, heads and chunks, streaming, chunked solving and parallel passes compute the same."""

import torch
from helpers import KINDS, gap, randomise, stream_in_chunks
from hypothesis import given, settings
from hypothesis import strategies as st

from contextready import ModelConfig, build_model, unroll

TOLERANCE = 1e-10


@st.composite
def models(draw):
    heads, half = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    config = ModelConfig(
        vocab_size=draw(st.integers(1, 11)),
        width=heads * half * 2,
        layers=draw(st.integers(1, 3)),
        heads=heads,
        window=draw(st.none() | st.integers(1, 12)),
        extra_ffn=draw(st.booleans()),
        bias=draw(st.booleans()),
        rope_base=draw(st.sampled_from([10.0, 10_000.0, 500_000.0])),
        correction=draw(st.sampled_from(KINDS)),
    )
    return randomise(build_model(config).double(), seed=draw(st.integers(0, 2**31))).eval()


@st.composite
def chunkings(draw, most=12):
    return draw(st.lists(st.integers(1, 5), min_size=1, max_size=4).filter(lambda lengths: sum(lengths) <= most))


def tokens_for(model, batch, length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.backbone.config.vocab_size, (batch, length), generator=generator)


@given(models(), chunkings(), st.integers(1, 3), st.integers(0, 4))
@settings(deadline=None, max_examples=80)
@torch.no_grad()
def test_one_function(model, lengths, batch, history):
    T = sum(lengths)
    tokens = tokens_for(model, batch, T)
    one_by_one, after = stream_in_chunks(model, tokens, [1] * T, model.init_state(batch, history))
    in_chunks, _ = stream_in_chunks(model, tokens, lengths, model.init_state(batch, history))
    assert gap(in_chunks, one_by_one) < TOLERANCE
    assert gap(model(tokens, T + 1), one_by_one) < TOLERANCE

    state, start, pieces = model.init_state(batch, history), 0, []
    for length in lengths:
        z, info = unroll(model, tokens[:, start : start + length], length + 1, state=state)
        state, start = info.state, start + length
        pieces.append(model.backbone.head(z))
    assert gap(torch.cat(pieces, dim=1), one_by_one) < TOLERANCE
    assert state.position == after.position == T
    assert state.nbytes == after.nbytes
    more = tokens_for(model, batch, 2, seed=1)
    assert gap(model.stream(more, state)[0], model.stream(more, after)[0]) < TOLERANCE


@given(models(), st.integers(1, 10), st.integers(0, 10), st.data())
@settings(deadline=None, max_examples=60)
@torch.no_grad()
def test_states_continue_exactly(model, length, history, data):
    tokens = tokens_for(model, 3, length)
    _, state = model.stream(tokens, model.init_state(3, history))
    position = data.draw(st.integers(max(0, length - history), length))
    rows = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=4))
    changed = state.rollback(position).select(rows)
    expected = model.init_state(len(rows), history)
    if position:
        _, expected = model.stream(tokens[rows, :position], expected)
    more = tokens_for(model, len(rows), 3, seed=2)
    assert gap(model.stream(more, changed)[0], model.stream(more, expected)[0]) < TOLERANCE


@given(models(), st.integers(2, 10), st.integers(1, 11), st.data())
@settings(deadline=None, max_examples=60)
@torch.no_grad()
def test_causal_at_every_depth(model, length, passes, data):
    tokens = tokens_for(model, 2, length)
    t = data.draw(st.integers(0, length - 1))
    changed = tokens.clone()
    changed[:, t:] = tokens_for(model, 2, length - t, seed=3)
    assert torch.equal(model(tokens, passes)[:, :t], model(changed, passes)[:, :t])
    exact, _ = model.stream(tokens, model.init_state(2))
    settled = min(length, passes - 1)
    assert gap(model(tokens, passes)[:, :settled], exact[:, :settled]) < TOLERANCE if settled else True
