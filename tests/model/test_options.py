"""The settings that other families of models need: compared with the oracle, in every way to read, and counted."""

import shutil

import pytest
import reference
import torch
from helpers import (
    OPTIONS,
    every_option,
    gap,
    per_row,
    random_tokens,
    small_config,
    small_model,
    stream_in_chunks,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from contextready import ContextReadyError, account, build_model
from contextready.infer.torch_engine import torch_engine
from contextready.model.shapes import weight_shapes
from contextready.runs.checkpoint import named_weights
from contextready.solve.prefill import prefill

TOLERANCE = 1e-10


@every_option
@pytest.mark.parametrize("kind", [None, "add", "tied", "tied_norm"])
def test_passes_and_streaming_are_the_oracles(kind, changes):
    model = small_model(correction=kind, **changes)
    tokens = random_tokens(batch=1, length=7)
    streamed, _ = stream_in_chunks(model, tokens, [3, 1, 3] if kind is None else [1] * 7)
    if kind is None:
        expected = per_row(reference.transformer, model, tokens)
        assert gap(model(tokens), expected) < TOLERANCE
    else:
        for K in (1, 2, 3, 8):
            assert gap(model(tokens, K), per_row(reference.parallel, model, tokens, K)) < TOLERANCE
        expected = per_row(reference.streaming, model, tokens)
    assert gap(streamed, expected) < TOLERANCE


@every_option
def test_every_setting_makes_a_difference(changes):
    """The oracle without it, with the same weights where they have the same shapes, computes something else."""
    model, tokens = small_model(**changes), random_tokens(batch=1, length=7)
    plain = small_model(**{key: changes[key] for key in ("layers", "heads", "window", "bias") if key in changes})
    assert gap(model(tokens, 3), plain(tokens, 3)) > 1e-3


@every_option
@pytest.mark.parametrize("solver", ["sequential", "jacobi", "sweep"])
def test_prompts_are_read_as_the_stream_does(solver, changes):
    model, tokens = small_model(gain=0.5, **changes), random_tokens(batch=2, length=17)
    expected, state = model.stream(tokens, model.init_state(2))
    found = prefill(model, tokens, solver=solver, tolerance=0.0, segment=4)
    assert gap(model.backbone.head(found.z_B1C), expected[:, -1:]) < TOLERANCE
    more, again = random_tokens(batch=2, length=2, seed=9), found.state
    assert gap(model.stream(more, again)[0], model.stream(more, state)[0]) < TOLERANCE


@every_option
def test_an_engine_steps_rows_at_their_own_positions(changes):
    model, tokens = small_model(gain=0.5, **changes).float(), random_tokens(batch=2, length=9)
    engine = torch_engine(model, rows=2, capacity=16, solver="sequential")
    engine.read(0, tokens[0, :3].tolist())
    engine.read(1, tokens[1, :6].tolist())
    for t in range(3):
        logits = engine.step([int(tokens[0, 3 + t]), int(tokens[1, 6 + t])])
    for row, length in enumerate((6, 9)):
        expected = model.stream(tokens[row : row + 1, :length], model.init_state(1))[0][0, -1]
        assert gap(torch.from_numpy(logits[row]), expected) < 1e-4


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's own, while it loads its compiler
@pytest.mark.parametrize("name", ["everything", "like SmolLM3"])
def test_a_compiled_engine_steps_as_an_eager_one(name):
    model = small_model(gain=0.5, **OPTIONS[name]).float()
    eager, compiled = (torch_engine(model, kind, capacity=16) for kind in ("eager", "compiled"))
    for token in random_tokens(batch=1, length=12)[0].tolist():
        found, expected = compiled.step([token])[0], eager.step([token])[0]
    assert gap(torch.from_numpy(found), torch.from_numpy(expected)) < 1e-4


@every_option
@pytest.mark.parametrize("kind", [None, "add", "tied"])
def test_weights_are_counted_and_named(kind, changes):
    config = small_config(correction=kind, **changes)
    model = build_model(config)
    assert {name: tuple(p.shape) for name, p in named_weights(model).items()} == dict(weight_shapes(config))
    assert sum(p.numel() for p in model.parameters()) == account(config).parameters


@every_option
@pytest.mark.parametrize("kind", [None, "add", "tied"])
def test_multiply_accumulates_and_states_are_counted(kind, changes):
    config = small_config(correction=kind, **changes)
    model, tokens = build_model(config).eval(), random_tokens(batch=1, length=9)
    _, state = model.stream(tokens[:, :8], model.init_state(1))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        _, state = model.stream(tokens[:, 8:], state)
    assert account(config).macs_exact(context=9) == counter.get_total_flops() // 2
    held = state.nbytes if kind is not None else state.cache.nbytes
    assert account(config).state_bytes(9) == held


def test_a_llama_is_counted_by_hand():
    """C = 12, 6 heads of 4 channels, 2 of keys and values, a gated FFN of 10, two layers, V = 23."""
    counted = account(small_config(correction=None, **OPTIONS["like Llama"]))
    block = 12 * 24 + 2 * 12 * 8 + 24 * 12 + 3 * 12 * 10
    assert counted.macs_blocks == 2 * block
    assert counted.parameters == 23 * 12 + 2 * (block + 2 * 12) + 12
    assert counted.kv_bytes_per_token() == 2 * 2 * 8 * 4
    assert counted.macs_attention(5) == 2 * 2 * 5 * 24


def test_a_tied_head_stays_tied():
    model = small_model(tied_embeddings=True).float()
    assert model.backbone.unembedding.weight is model.backbone.embedding.weight
    assert [name for name in named_weights(model) if "embedding" in name] == ["backbone.embedding.weight"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm": "rsm"}, "did you mean 'rms'"),
        ({"norm_eps": 0.0}, "norm_eps must be greater than 0 and less than 1, but got 0"),
        ({"ffn": "swish"}, "ffn=swish is unknown"),
        ({"ffn_width": 0}, "ffn_width must be at least 1, but got 0"),
        ({"kv_heads": 2}, "heads=3 is not divisible by kv_heads=2"),
        ({"head_width": 3}, "head_width gives an odd head size of 3"),
        ({"rope_factor": 2.0}, "rope_factor=2 does not apply to rope=geometric"),
        ({"rope": "linear", "rope_low": 2.0}, "rope_low=2 does not apply to rope=linear"),
        ({"rope": "linear", "rope_factor": 0.0}, "rope_factor must be between 1e-06 and 1e\\+06, but got 0"),
        ({"rope": "llama3", "rope_low": 4.0}, "rope_low must be at least 1e-06 and less than rope_high"),
        ({"no_rope_every": 0}, "no_rope_every must be at least 1, but got 0"),
    ],
)
def test_wrong_values_are_refused(changes, message):
    with pytest.raises(ContextReadyError, match=message):
        small_config(**changes)


@every_option
def test_training_in_bfloat16_stays_close(changes):
    model, tokens = small_model(gain=0.5, **changes).float(), random_tokens()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model.train()(tokens, 3)
    logits.square().mean().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
    exact = model.eval()(tokens, 3)
    assert torch.nn.functional.cosine_similarity(logits.float().flatten(), exact.flatten(), dim=0) > 0.98


@every_option
def test_a_model_in_bfloat16_runs(changes):
    model, tokens = small_model(gain=0.5, **changes).bfloat16(), random_tokens()
    assert model(tokens, 2).dtype == torch.bfloat16
    logits, _ = model.stream(tokens, model.init_state(2))
    assert bool(logits.isfinite().all())
