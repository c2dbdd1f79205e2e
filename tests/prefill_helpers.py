"""Models whose prompts converge quickly, an opaque backbone, and comparisons of states."""

import torch
from helpers import gap, random_tokens, small_model

from contextready import ContextReady
from contextready.model.cache import KVCache
from contextready.model.correction_module import build_correction
from contextready.solve.norms import norms
from contextready.solve.prefill import buffer_capacity
from contextready.solve.sweep import Chunk

STEP = 4
"""The segment length of most tests."""


def settling_model(kind="add", **changes):
    """A model with this correction whose passes converge quickly: large embeddings, small branches."""
    model = small_model(correction=kind, **changes)
    with torch.no_grad():
        model.backbone.embedding.weight.mul_(6.0)
        for name, weight in model.named_parameters():
            if name.endswith(("out.weight", "down.weight")):
                weight.mul_(0.12)
    return model


class Wrapped:
    """Another backbone: a transformer whose internals are hidden."""

    def __init__(self, inner):
        for name in ("width", "embed", "blocks", "head", "init_cache", "parameters"):
            setattr(self, name, getattr(inner, name))


def wrapped(model):
    hidden = ContextReady(Wrapped(model.backbone), build_correction("add", model.backbone))
    hidden.correction = model.correction
    return hidden.eval()


def largest_norm(z):
    """The largest ‖z‖ of any position."""
    return float(norms(z).max())


def largest_error(z, exact):
    """The largest error of a position, relative to its norm."""
    return float((norms(z - exact) / norms(exact)).max())


def chunk_of(model, e, state):
    """A chunk after a state, in a buffer of its own."""
    B, T, _ = e.shape
    buffer = model.backbone.init_buffer(B, buffer_capacity(model.backbone, state.position + T, T, state.history))
    for row in range(B):
        buffer.load(row, state.cache.select(torch.tensor([row])))
    return Chunk(model, e, buffer, state.position, state.z_prev_B1C)


def state_after(chunk, state):
    """The state after a chunk that followed this one."""
    end = state.position + chunk.e_BTC.shape[1]
    caches = [chunk.buffer.cache(row, end, state.history) for row in range(chunk.buffer.batch_size)]
    return state.advanced(chunk.carried_BTC, KVCache.stacked(caches))


def read(model, tokens, state=None):
    """z of every token, read one at a time, and the state after them."""
    with torch.inference_mode():
        return model.read(model.backbone.embed(tokens), state or model.init_state(len(tokens)))


def assert_same_state(model, found, expected, tolerance):
    """Compare keys, values, carried vectors, history and position, and streams from there and from one token before."""
    assert (found.position, found.history) == (expected.position, expected.history)
    assert (found.cache.window, found.cache.keep) == (expected.cache.window, expected.cache.keep)
    assert found.carried_BRC.shape == expected.carried_BRC.shape
    scale = max(largest_norm(expected.carried_BRC), 1.0)
    assert gap(found.carried_BRC, expected.carried_BRC) <= tolerance * scale
    for kv, wanted in zip(found.cache.layers, expected.cache.layers, strict=True):
        for a, b in zip(kv, wanted, strict=True):
            assert a.shape == b.shape
            assert a.numel() == 0 or gap(a, b) <= tolerance * scale
    more = random_tokens(batch=found.batch_size, length=5, seed=6)
    backs = [0, 1] if expected.history and expected.position else [0]
    with torch.inference_mode():
        for back in backs:
            a, b = (model.stream(more, state.rollback(state.position - back))[0] for state in (found, expected))
            assert gap(a, b) <= tolerance * scale
