"""The settings of other families of models in exported files: compared with the eager model, and read and refused."""

from dataclasses import asdict, fields

import numpy as np
import pytest
import torch
from ggml_helpers import TOLERANCE, exported, far, ids_of, same_state, single, stepped, streamed
from helpers import LLAMA, OPTIONS, every_option, small_config
from schedule_helpers import check_schedule
from torch import nn

from contextready import ContextReadyError, TransformerConfig, account
from contextready.formats.gguf_file import read_gguf_file

pytest.importorskip("ggml")
pytest.importorskip("gguf")

from contextready.infer.ggml.config import FIELDS, IN_TRAINING, OF_FAMILIES, key_of
from contextready.infer.ggml.engine import GgmlEngine
from contextready.infer.ggml.file import read_gguf, write_gguf

WIDE = {**LLAMA, "width": 256, "head_width": 32, "heads": 8, "ffn_width": 512, "layers": 1}
"""A Llama whose rows are whole blocks of every type."""


@every_option
@pytest.mark.parametrize("correction", [None, "add", "balanced", "block_head", "tied", "tied_norm"])
def test_every_setting_steps_as_the_eager_model(correction, changes, tmp_path):
    model, ids = single(correction=correction, **changes), ids_of(30)
    engine = GgmlEngine(exported(model, tmp_path), threads=1)
    expected, state = streamed(model, ids)
    assert far(stepped(engine, ids), expected) < TOLERANCE
    same_state(engine.state(0), state)


@every_option
def test_a_file_describes_every_setting(changes, tmp_path):
    model = single(**changes)
    read = read_gguf(exported(model, tmp_path))
    ours, described = asdict(model.backbone.config), asdict(read.config)
    assert {name: described[name] for name in FIELDS | OF_FAMILIES if name in ours} == {
        name: ours[name] for name in FIELDS | OF_FAMILIES if name in ours
    }
    # Programs that do not know these settings must refuse the file.
    assert read.fields["contextready.format"] == 3
    assert read.parameters == account(small_config(**changes)).parameters
    stated = {name for name in OF_FAMILIES if key_of(name, read.config.norm) in read.fields}
    assert stated == changes.keys() & OF_FAMILIES.keys()


def test_every_setting_of_a_model_is_in_a_file_or_for_training_only():
    assert {field.name for field in fields(TransformerConfig)} | {"correction", "correction_bias"} == {
        *FIELDS,
        *OF_FAMILIES,
        *IN_TRAINING,
    }


def test_fields_have_the_names_that_other_programs_use(tmp_path):
    changes = OPTIONS["everything"] | {"rope": "linear", "rope_factor": 2.0}
    found = read_gguf_file(exported(single(**changes), tmp_path)).fields
    for name, value in {
        "attention.head_count_kv": 2,
        "attention.key_length": 4,
        "attention.layer_norm_rms_epsilon": 1e-2,
        "feed_forward_length": 10,
        "rope.scaling.factor": 2.0,
    }.items():
        assert found[f"contextready.{name}"] == value
    assert "contextready.attention.layer_norm_epsilon" not in found


@every_option
@pytest.mark.parametrize("correction", [None, "add"])
@pytest.mark.parametrize("solver", ["sweep", "jacobi"])
def test_prompts_in_wide_products(solver, correction, changes, tmp_path):
    model, ids = single(correction=correction, **changes), ids_of(40)
    engine = GgmlEngine(exported(model, tmp_path), rows=2, threads=1, solver=solver, tolerance=0.0, segment=8)
    logits, info = engine.read(1, ids)
    expected, state = streamed(model, ids)
    assert far(logits, expected[-1]) < TOLERANCE
    same_state(engine.state(1), state)
    assert (info.exact, info.tokens) == (True, 40)
    sequential = "window" in changes
    assert info.solver == ("sequential" if sequential else "plain" if correction is None else solver)
    if sequential or correction is None:
        assert info.plain_macs == account(small_config(correction=None, **changes)).macs_sequence(40) - 40 * 23 * 12


@pytest.mark.parametrize("name", ["like Llama", "like Qwen3", "like SmolLM3", "everything"])
@pytest.mark.parametrize("correction", [None, "balanced"])
def test_every_row_of_a_random_schedule_is_its_solo_run(correction, name, tmp_path):
    model = single(correction=correction, **OPTIONS[name])
    engine = GgmlEngine(exported(model, tmp_path), rows=4, threads=1)
    check_schedule(engine, model, seed=3, turns=60, tolerance=TOLERANCE)


@pytest.mark.parametrize("name", ["like Llama", "everything"])
def test_streams_change_between_torch_and_ggml(name, tmp_path):
    model, ids = single(**OPTIONS[name]), ids_of(24)
    path, (expected, last) = exported(model, tmp_path), streamed(model, ids)
    for turn in (1, 11):
        engine, other = GgmlEngine(path, threads=1), GgmlEngine(path, rows=2, threads=1)
        engine.read(0, ids[:turn])
        on_in_torch, state = streamed(model, ids[turn:], engine.state(0))
        assert far(on_in_torch, expected[turn:]) < TOLERANCE
        same_state(state, last)
        other.load(1, streamed(model, ids[:turn])[1])
        assert far(other.read(1, ids[turn:])[0], expected[-1]) < TOLERANCE
    with pytest.raises(ContextReadyError, match="belongs to another model"):
        engine.load(0, single().init_state(1))


@pytest.mark.parametrize("changes", [{}, {"correction_scale": 0.3}, {"correction_gain": "channel"}])
def test_the_correction_keeps_its_own_norm_and_network(changes, tmp_path):
    """Its norms are layer norms with epsilon 1e-5, and its network is as wide as ever, whatever the blocks have."""
    model, ids = single(correction="add", **OPTIONS["like Llama"], **changes), ids_of(12)
    path = exported(model, tmp_path)
    assert read_gguf(path).weights["correction.ffn.up.weight"].shape == (48, 12)
    assert far(stepped(GgmlEngine(path, threads=1), ids), streamed(model, ids)[0]) < TOLERANCE


@pytest.mark.parametrize("options", [{}, {"qk_norm": True, "tied_embeddings": True}, {"qkv_bias": True}])
@pytest.mark.parametrize(
    ("type", "least", "most"), [("f16", 1e-7, 0.01), ("q8_0", 1e-4, 0.03), ("q4_0", 1e-2, 0.35), ("q4_k", 1e-2, 0.3)]
)
def test_narrow_types_stay_near(type, least, most, options, tmp_path):
    model, ids = single(**WIDE, **options), ids_of(30)
    expected, _ = streamed(model, ids)
    path = exported(model, tmp_path, type)
    assert {weight.type for weight in read_gguf(path).weights.values() if len(weight.shape) == 2} == {type}
    found = stepped(GgmlEngine(path, threads=1), ids)
    assert least < np.linalg.norm(found - expected) / np.linalg.norm(expected) < most
    assert np.corrcoef(found.ravel(), expected.ravel())[0, 1] > 0.93


def test_a_tied_head_is_stored_once(tmp_path):
    read = read_gguf(exported(single(tied_embeddings=True, width=256, heads=2), tmp_path, "q8_0"))
    assert "unembedding.weight" not in read.weights
    assert (read.type, read.step_bytes) == ("q8_0", sum(weight.data.nbytes for weight in read.weights.values()))


def test_rows_that_are_no_whole_blocks_of_256_stay_f16(tmp_path):
    model, ids = single(**WIDE | {"width": 128}), ids_of(10)
    read = read_gguf(exported(model, tmp_path, "q4_k"))
    types = {name.split(".")[-2]: weight.type for name, weight in read.weights.items() if len(weight.shape) == 2}
    assert types == dict.fromkeys(("embedding", "unembedding", "qkv", "gate"), "f16") | {
        "out": "q4_k",
        "up": "f16",
        "down": "q4_k",
    }
    expected, _ = streamed(model, ids)
    found = stepped(GgmlEngine(tmp_path / "q4_k.gguf", threads=1), ids)
    assert np.corrcoef(found.ravel(), expected.ravel())[0, 1] > 0.95


def test_a_head_that_is_no_longer_tied_is_refused(tmp_path):
    model = single(tied_embeddings=True)
    model.backbone.unembedding.weight = nn.Parameter(model.backbone.embedding.weight.detach() + 1.0)
    with pytest.raises(ContextReadyError, match="its weights do not match its configuration"):
        write_gguf(model, tmp_path / "m.gguf", 8)
    assert list(tmp_path.iterdir()) == []


def test_a_far_position_is_rotated_exactly(tmp_path):
    model, ids = single(layers=1, **{"window": 8} | OPTIONS["llama3"]), ids_of(12)
    engine = GgmlEngine(exported(model, tmp_path), threads=1)
    _, state = streamed(model, ids)
    cache = type(state.cache)(state.cache.layers, 1_000_003, state.cache.window, state.cache.keep)
    far_state = type(state)(cache, state.carried_BRC, state.history)
    engine.load(0, far_state)
    assert far(stepped(engine, ids), streamed(model, ids, far_state)[0]) < TOLERANCE


def test_two_threads_compute_what_one_does(tmp_path):
    model, ids = single(**WIDE), ids_of(10)
    path = exported(model, tmp_path)
    one, two = (stepped(GgmlEngine(path, threads=threads), ids) for threads in (1, 2))
    assert far(one, two) < 1e-4
    with torch.no_grad():
        assert far(two, streamed(model, ids)[0]) < 1e-4
