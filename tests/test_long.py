"""Tests that take minutes; run them with `make slow`."""

import resource
from itertools import islice

import pytest
import test_properties as properties
import torch
from helpers import contractive_model, gap
from hypothesis import given, settings
from hypothesis import strategies as st

from contextready import unroll
from contextready.infer.generate import GenerationSettings, generate_pieces
from contextready.infer.ggml.engine import GgmlEngine
from contextready.infer.ggml.file import write_gguf
from contextready.infer.torch_engine import torch_engine

pytestmark = pytest.mark.slow


@torch.inference_mode()
def test_a_windowed_stream_of_20000_tokens_holds_constant_memory_and_stays_exact():
    # The model is contractive, because in an expansive one rounding errors grow along the sequence.
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


@pytest.mark.parametrize("kind", ["eager", "ggml"])
def test_a_windowed_model_generates_100000_tokens_in_constant_memory(kind, tmp_path):
    model = contractive_model(width=32, heads=4, window=64).float()
    if kind == "ggml":
        pytest.importorskip("ggml")
        write_gguf(model, tmp_path / "model.gguf", 64, "f32")
        engine = GgmlEngine(tmp_path / "model.gguf", threads=1)
    else:
        engine = torch_engine(model, capacity=64)
    pieces = generate_pieces(engine, [[1, 2, 3]], GenerationSettings(max_tokens=100_000))
    for _ in islice(pieces, 2_000):
        pass
    early = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert sum(1 for _ in pieces) == 98_000
    assert engine.position(0) == 100_002
    # The tokens themselves are kept for the completion, about 300 bytes each with their pieces.
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - early)
    assert grown < 98_000 * 600
    assert engine.state(0).nbytes == model.stream(torch.randint(23, (1, 200)), model.init_state(1))[1].nbytes


@settings(deadline=None, max_examples=1500)
@given(properties.models(), properties.chunkings(), st.integers(1, 3), st.integers(0, 4))
def test_one_function_on_many_more_models(model, lengths, batch, history):
    properties.test_one_function.hypothesis.inner_test(model, lengths, batch, history)


@settings(deadline=None, max_examples=1500)
@given(properties.models(), st.integers(1, 10), st.integers(0, 10), st.data())
def test_states_continue_exactly_on_many_more_models(model, length, history, data):
    properties.test_states_continue_exactly.hypothesis.inner_test(model, length, history, data)
