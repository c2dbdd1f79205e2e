"""Minutes, not seconds: `make slow`."""

import pytest
import test_properties as properties
import torch
from helpers import contractive_model, gap
from hypothesis import given, settings
from hypothesis import strategies as st

from contextready import unroll

pytestmark = pytest.mark.slow


@torch.inference_mode()
def test_a_windowed_stream_of_20000_tokens_holds_constant_memory_and_stays_exact():
    # A contractive model: in an expansive one rounding itself grows along the sequence, as in any chaotic recurrence.
    model = contractive_model(width=32, heads=4, window=24)
    tokens = torch.randint(23, (1, 20_000), generator=torch.Generator().manual_seed(0))
    streamed, chunked, full = model.init_state(1), model.init_state(1), None
    for start in range(0, 20_000, 500):
        chunk = tokens[:, start : start + 500]
        logits, streamed = model.stream(chunk, streamed)
        z, info = unroll(model, chunk, tolerance=1e-13, state=chunked)
        chunked = info.state
        assert gap(model.backbone.head(z), logits) < 1e-9
        full = full or streamed.nbytes
        assert streamed.nbytes == chunked.nbytes == full
    assert streamed.position == 20_000


@settings(deadline=None, max_examples=1500)
@given(properties.models(), properties.chunkings(), st.integers(1, 3), st.integers(0, 4))
def test_one_function_on_many_more_models(model, lengths, batch, history):
    properties.test_one_function.hypothesis.inner_test(model, lengths, batch, history)


@settings(deadline=None, max_examples=1500)
@given(properties.models(), st.integers(1, 10), st.integers(0, 10), st.data())
def test_states_continue_exactly_on_many_more_models(model, length, history, data):
    properties.test_states_continue_exactly.hypothesis.inner_test(model, length, history, data)
