"""Random models as exported files, and streams of the eager model and of the engine to compare."""

import numpy as np
import torch
from helpers import random_tokens, small_model

# Logits are of order one, both sides round in float32.
TOLERANCE = 1e-5


def exported(model, folder, type="f32", trained_length=64, tokenizer=None):
    """Write a model; returns the path."""
    from contextready.infer.ggml.file import write_gguf

    path = folder / f"{type}.gguf"
    write_gguf(model, path, trained_length, type, tokenizer)
    return path


def single(**changes):
    """A random model whose recurrence does not enlarge what float32 rounds: its embeddings are large."""
    model = small_model(dtype=torch.float32, gain=0.6, **changes)
    with torch.no_grad():
        model.backbone.embedding.weight.mul_(5.0)
    return model


def streamed(model, ids, state=None):
    """Logits (T, V) of the eager model, and its state after them."""
    with torch.no_grad():
        logits, state = model.stream(torch.tensor([ids]), model.init_state(1) if state is None else state)
    return logits[0].numpy(), state


def stepped(engine, ids):
    return np.stack([engine.step([token])[0] for token in ids])


def ids_of(length, seed=1):
    return random_tokens(1, length, seed=seed)[0].tolist()


def far(a, b):
    return float(np.abs(a - b).max())


def same_state(a, b, tolerance=TOLERANCE):
    assert (a.position, a.history) == (b.position, b.history)
    assert (a.cache.window, a.cache.keep) == (b.cache.window, b.cache.keep)
    assert a.carried_BRC.shape == b.carried_BRC.shape
    assert far(a.carried_BRC.numpy(), b.carried_BRC.numpy()) < tolerance
    for ours, theirs in zip(a.cache.layers, b.cache.layers, strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            assert mine.shape == other.shape
            assert mine.numel() == 0 or far(mine.numpy(), other.numpy()) < tolerance
