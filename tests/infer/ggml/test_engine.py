import json
import subprocess
import sys
from itertools import product

import numpy as np
import pytest
import torch
from ggml_helpers import TOLERANCE, exported, far, ids_of, same_state, single, stepped, streamed
from helpers import KINDS, small_config
from schedule_helpers import check_schedule

from contextready import ContextReady, ContextReadyError, State, Transformer, account, build_correction
from contextready.data.batches import Sequences
from contextready.data.shards import TokenArray
from contextready.data.tokenizer import Tokenizer
from contextready.formats.gguf_file import read_gguf_file
from contextready.measure.perplexity import sequential_score
from contextready.model.correction import CORRECTIONS

pytest.importorskip("ggml")
pytest.importorskip("gguf")

from contextready.infer.ggml.engine import BUCKET, GRAPHS, GgmlEngine
from contextready.infer.ggml.export import engine_score
from contextready.infer.ggml.file import read_gguf


@pytest.mark.parametrize(
    ("correction", "window", "shape"),
    [
        (correction, window, (layers, bias, extra))
        for correction, window in product((None, *KINDS, "memoryless"), (None, 1, 7))
        for layers, bias, extra in ((1, False, True), (1, True, False), (3, False, False), (3, True, True))
        if window != 1 or layers == 1
    ],
)
def test_every_model_steps_as_the_eager_one(correction, window, shape, tmp_path):
    layers, bias, extra = shape
    model = single(correction=correction, window=window, layers=layers, bias=bias, extra_ffn=extra)
    engine, ids = GgmlEngine(exported(model, tmp_path), threads=1), ids_of(45)
    expected, state = streamed(model, ids)
    assert far(stepped(engine, ids), expected) < TOLERANCE
    same_state(engine.state(0), state)
    assert engine.position(0) == 45
    assert engine.capacity == (64 if window is None else None)


@pytest.mark.parametrize("heads", [1, 2, 6])
@pytest.mark.parametrize("correction", [None, "add", "concat_z", "tied_norm"])
def test_neighbouring_channels_that_rotate_together_and_a_bias_of_the_head(correction, heads, tmp_path):
    model, ids = single(correction=correction, heads=heads, bias=True, rope="integer", head_bias=True), ids_of(45)
    path = exported(model, tmp_path)
    engine = GgmlEngine(path, threads=1)
    assert (engine.config.rope, engine.config.head_bias) == ("integer", True)
    assert far(stepped(engine, ids), streamed(model, ids)[0]) < TOLERANCE
    # Programs that know only the other rotation must refuse the file.
    assert read_gguf_file(path).fields["contextready.format"] == 2
    assert read_gguf_file(exported(single(), tmp_path)).fields["contextready.format"] == 1


@pytest.mark.parametrize("window", [None, BUCKET + 20])
def test_attention_over_several_buckets_and_round_the_ring(window, tmp_path):
    model, ids = single(window=window, layers=1), ids_of(BUCKET + 60)
    path = exported(model, tmp_path, trained_length=3 * BUCKET)
    engine = GgmlEngine(path, threads=1)
    expected, state = streamed(model, ids)
    assert far(stepped(engine, ids), expected) < TOLERANCE
    same_state(engine.state(0), state)
    # Two threads share out the slots where there are many.
    both = GgmlEngine(path, threads=2)
    both.load(0, streamed(model, ids[:-9])[1])
    assert far(stepped(both, ids[-9:]), expected[-9:]) < TOLERANCE


@pytest.mark.parametrize("gain", [None, "scalar", "channel"])
@pytest.mark.parametrize("bias", [False, True])
def test_the_size_of_a_correction_is_exported_with_its_weights(gain, bias, tmp_path):
    model = single(correction="add", correction_scale=0.3, correction_gain=gain, bias=bias)
    ids = ids_of(12)
    engine = GgmlEngine(exported(model, tmp_path), threads=1)
    assert far(stepped(engine, ids), streamed(model, ids)[0]) < TOLERANCE
    model.correction.scale, model.correction.gain = 1.0, None
    assert far(stepped(GgmlEngine(exported(model, tmp_path), threads=1), ids), streamed(model, ids)[0]) < TOLERANCE


def test_a_correction_may_have_biases_where_its_backbone_has_none(tmp_path):
    backbone = Transformer(small_config())
    model = ContextReady(backbone, build_correction("add", backbone, bias=True))
    torch.nn.init.normal_(model.correction.ffn.up.bias)
    ids = ids_of(10)
    engine = GgmlEngine(exported(model, tmp_path), threads=1)
    assert far(stepped(engine, ids), streamed(model, ids)[0]) < TOLERANCE


def test_the_score_of_a_file_counts_what_the_score_of_the_model_counts(tmp_path):
    ids = np.random.default_rng(0).integers(23, size=41).astype("<u2")
    mask = (np.arange(41) % 3 == 0).astype(np.uint8)
    mask[:11] = 0
    model = single(correction="add")
    for counted in (None, TokenArray([mask])):
        sequences = Sequences(TokenArray([ids], counted=counted), 10)
        found = engine_score(GgmlEngine(exported(model, tmp_path), rows=3, threads=1), sequences, 4)
        assert found.loss == pytest.approx(sequential_score(model, sequences, 4).loss, rel=1e-4)


def test_a_far_position_is_rotated_as_exactly_as_a_near_one(tmp_path):
    model, ids = single(window=8, layers=1), ids_of(20)
    engine = GgmlEngine(exported(model, tmp_path), threads=1)
    _, state = streamed(model, ids)
    cache = type(state.cache)(state.cache.layers, 1_000_003, state.cache.window, state.cache.keep)
    far_state = State(cache, state.carried_BRC, state.history)
    engine.load(0, far_state)
    expected, after = streamed(model, ids, far_state)
    assert far(stepped(engine, ids), expected) < TOLERANCE
    same_state(engine.state(0), after)


@pytest.mark.parametrize(("type", "least", "most"), [("f16", 1e-7, 0.01), ("q8_0", 1e-4, 0.03), ("q4_0", 1e-2, 0.3)])
def test_narrow_types_stay_near(type, least, most, tmp_path):
    model, ids = single(width=64, heads=2, layers=1), ids_of(30)
    expected, _ = streamed(model, ids)
    path = exported(model, tmp_path, type)
    assert read_gguf(path).type == type
    error = np.linalg.norm(stepped(GgmlEngine(path, threads=1), ids) - expected) / np.linalg.norm(expected)
    assert least < error < most


def test_rows_of_a_matrix_that_no_block_divides_stay_f16(tmp_path):
    types = {name: weight.type for name, weight in read_gguf(exported(single(), tmp_path, "q8_0")).weights.items()}
    assert types["layers.0.attn.qkv.weight"] == "f16"  # rows of 12
    assert types["final_norm.weight"] == "f32"
    engine, ids = GgmlEngine(tmp_path / "q8_0.gguf", threads=1), ids_of(10)
    assert far(stepped(engine, ids), streamed(single(), ids)[0]) < 0.1


@pytest.mark.parametrize("window", [None, 5])
def test_rows_are_independent_and_equal_to_one_alone(window, tmp_path):
    path = exported(single(window=window), tmp_path)
    engine, prompts = GgmlEngine(path, rows=3, threads=1), [ids_of(n, seed=n) for n in (3, 11, 7)]
    alone = [GgmlEngine(path, threads=1) for _ in prompts]
    for row in (2, 0, 1):
        logits, _ = engine.read(row, prompts[row])
        assert np.array_equal(logits, alone[row].read(0, prompts[row])[0])
    for tokens in zip(*(ids_of(12, seed=s) for s in (7, 8, 9)), strict=True):
        expected = np.concatenate([one.step([token]) for one, token in zip(alone, tokens, strict=True)])
        assert far(engine.step(tokens), expected) < 1e-5
    for row in range(3):
        same_state(engine.state(row), alone[row].state(0), 1e-5)
    engine.load(1, None)
    assert [engine.position(row) for row in range(3)] == [15, 0, 19]
    assert np.array_equal(engine.read(1, prompts[1])[0], GgmlEngine(path, threads=1).read(0, prompts[1])[0])


@pytest.mark.parametrize(("correction", "window"), [("add", None), ("add", 5), ("block_head", None), (None, 6)])
def test_every_row_of_a_random_schedule_is_its_solo_run(correction, window, tmp_path):
    model = single(correction=correction, window=window)
    engine = GgmlEngine(exported(model, tmp_path), rows=5, threads=1)
    check_schedule(engine, model, seed=2, turns=100, tolerance=TOLERANCE)
    # Graphs belong to a number of rows, not to a choice of them.
    assert len(engine._graphs) <= 2 * engine.rows


def test_a_step_of_some_rows_leaves_the_others_bit_for_bit(tmp_path):
    engine = GgmlEngine(exported(single(), tmp_path), rows=4, threads=1)
    for row in range(4):
        engine.read(row, ids_of(row + 3, seed=row))
    before = [engine.state(row) for row in range(4)]
    engine.step([7, 8], rows=[3, 1])
    assert [engine.position(row) for row in range(4)] == [3, 5, 5, 7]
    for row in (0, 2):
        same_state(engine.state(row), before[row], 1e-30)
    for call, sentence in (
        (lambda: engine.step([1], rows=[4]), "There is no row 4; this engine has rows 0 to 3"),
        (lambda: engine.step([1, 1], rows=[2, 2]), "rows are repeated"),
        (lambda: engine.append(0, []), "pass at least one token"),
        (lambda: engine.free(-1), "There is no row -1"),
        (lambda: engine.state(4), "There is no row 4"),
    ):
        with pytest.raises(ContextReadyError, match=sentence):
            call()


@pytest.mark.parametrize(("correction", "window"), [("add", None), ("block_head", 6), (None, 6)])
def test_streams_change_between_torch_and_ggml(correction, window, tmp_path):
    model, ids = single(correction=correction, window=window), ids_of(40)
    expected, last = streamed(model, ids)
    path = exported(model, tmp_path)
    for turn in (0, 1, 4, 17):
        engine = GgmlEngine(path, threads=1)
        if turn:
            engine.read(0, ids[:turn])
        on_in_torch, state = streamed(model, ids[turn:], engine.state(0))
        assert far(on_in_torch, expected[turn:]) < TOLERANCE
        same_state(state, last)
        other = GgmlEngine(path, rows=2, threads=1)
        other.load(1, streamed(model, ids[:turn])[1] if turn else None)
        assert far(other.read(1, ids[turn:])[0], expected[-1]) < TOLERANCE
        same_state(other.state(1), last)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("history", [0, 5])
def test_states_of_other_histories_and_rolled_back_ones(history, window, tmp_path):
    model, ids = single(window=window), ids_of(30)
    engine = GgmlEngine(exported(model, tmp_path), threads=1)
    expected, _ = streamed(model, ids)
    _, state = streamed(model, ids[:20], model.init_state(1, history))
    for back in range(history + 1):
        engine.load(0, state.rollback(20 - back))
        on_in_torch, _ = streamed(model, ids[20 - back :], engine.state(0))
        assert far(on_in_torch, expected[20 - back :]) < TOLERANCE
        assert far(stepped(engine, ids[20 - back :]), expected[20 - back :]) < TOLERANCE


def test_a_state_shares_nothing_with_the_engine(tmp_path):
    engine, ids = GgmlEngine(exported(single(), tmp_path), threads=1), ids_of(12)
    engine.read(0, ids[:6])
    state = engine.state(0)
    kept = state.clone()
    engine.read(0, ids[6:])
    same_state(state, kept, 1e-30)
    engine.load(0, None)
    assert engine.state(0).position == 0


@pytest.mark.parametrize(("correction", "window"), [("concat", 4), ("add", None), (None, None)])
def test_reading_is_stepping_and_says_what_it_cost(correction, window, tmp_path):
    path, ids = exported(single(correction=correction, window=window), tmp_path), ids_of(25)
    reader, stepper = GgmlEngine(path, threads=1), GgmlEngine(path, threads=1)
    reader.read(0, ids[:9])
    logits, info = reader.read(0, ids[9:])
    assert np.array_equal(logits, stepped(stepper, ids)[-1])
    same_state(reader.state(0), stepper.state(0), 1e-30)
    assert (info.solver, info.tokens, info.passes, info.exact, info.certificate) == ("sequential", 16, 1.0, True, 0.0)
    cost = account(small_config(correction=correction, window=window))
    attention = sum(cost.macs_attention(t + 1) for t in range(9, 25))
    assert info.plain_macs == 16 * cost.macs_blocks + attention
    assert info.macs == info.plain_macs + 16 * cost.macs_correction


def test_a_formula_costs_what_its_matrices_do():
    for name, macs in {"add": 8, "concat": 12, "blind": 8, "memoryless": 8, "block_head": 0, "tied": 8}.items():
        assert CORRECTIONS[name].parts.macs_per_width_squared == macs


def test_many_graphs_are_not_all_kept(tmp_path):
    engine = GgmlEngine(exported(single(layers=1), tmp_path), rows=GRAPHS + 2, threads=1)
    first = [engine.read(row, [1, 2, 3])[0] for row in range(engine.rows)]
    again = [engine.read(row, [4])[0] for row in range(engine.rows)]
    assert all(np.array_equal(logits, first[0]) for logits in first)
    assert all(np.array_equal(logits, again[0]) for logits in again)
    assert len(engine._graphs) <= GRAPHS


def test_threads_are_measured_unless_they_are_named(tmp_path, monkeypatch):
    from contextready.infer.ggml import engine as module
    from contextready.infer.ggml.threads import ggml_threads
    from contextready.infer.threads import available_cores

    path = exported(single(), tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    ggml_threads.cache_clear()
    engine = GgmlEngine(path)
    assert 1 <= engine.threads <= available_cores()
    assert GgmlEngine(path).threads == engine.threads
    assert ggml_threads.cache_info().misses == 1
    ggml_threads.cache_clear()
    monkeypatch.setattr(module, "ggml_threads", lambda ggml, width: pytest.fail("measured"))
    assert GgmlEngine(path, threads=3).threads == 3


WITHOUT_TORCH = """
import json, sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoTorch())
try:
    import torch
except ImportError:
    pass
else:
    raise AssertionError("torch was imported")
import contextready.infer.ggml.graph
from contextready.errors import ContextReadyError
from contextready.infer.ggml.engine import GgmlEngine
from contextready.infer.ggml.file import read_gguf

path = sys.argv[1]
tokenizer = read_gguf(path).tokenizer()
ids = tokenizer.encode_batch(["some text"])[0]
engine = GgmlEngine(path, rows=2, threads=1)
read, info = engine.read(0, ids)
for row in (0, 1):
    engine.load(row, None)
for token in ids:
    logits = engine.step([token, token])
engine.copy_row(0, 1)
first, second = engine.step([1, 1])
assert (first == second).all()
try:
    engine.state(0)
except ContextReadyError as error:
    refused = str(error)
engine.close()
assert not any(name.partition(".")[0] == "torch" for name in sys.modules)
print(json.dumps([ids, info.exact, read.tolist(), logits.tolist(), tokenizer.decode(ids), refused]))
"""


def test_an_exported_model_runs_without_torch(tmp_path):
    tokenizer = Tokenizer.train(["some text to learn from, some more of it"] * 3, 262)
    model = single(vocab_size=262)
    path = exported(model, tmp_path, tokenizer=tokenizer)
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, path], capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    ids, exact, read, logits, text, refused = json.loads(done.stdout)
    assert ids == tokenizer.encode_batch(["some text"])[0]
    assert (exact, text) == (True, "some text")
    expected = streamed(model, ids)[0][-1]
    for found in (read, *logits):
        assert far(np.array(found, np.float32), expected) < TOLERANCE
    assert "torch is not installed" in refused


def test_every_bad_call_is_a_sentence(tmp_path):
    path = exported(single(), tmp_path, trained_length=8)
    for changes, sentence in (
        ({"rows": 0}, "rows must be at least 1, but got 0"),
        ({"threads": 0}, "threads must be at least 1, but got 0"),
        ({"capacity": 0}, "capacity must be at least 1, but got 0"),
        ({"capacity": 10**15}, "capacity must be at most 2,147,483,648, but got a number with more than 15 digits"),
        ({"capacity": 2**31}, r"1 row of 2,147,483,648 tokens would take 420\.9 GB, but .*; use a smaller --context"),
        ({"rows": 10**8}, "rows must be at most 65,536, but got 100000000"),
        ({"rows": 2**16, "capacity": 2**20}, r"65536 rows of 1,048,576 tokens would take .*; use a smaller --context"),
        ({"threads": -1}, "threads must be at least 1, but got -1"),
        ({"threads": 100_000}, r"threads must be at most \d+, but got 100000"),
    ):
        with pytest.raises(ContextReadyError, match=sentence):
            GgmlEngine(path, **changes)
    engine = GgmlEngine(path, rows=2, threads=1)
    engine.read(0, ids_of(7))
    state = engine.state(0)
    other_model = single(window=3)
    for call, sentence in (
        (lambda: engine.read(0, []), "prompt is empty"),
        (lambda: engine.read(0, [1, 23]), "Token id 23 is out of range"),
        (lambda: engine.read(0, [1, 2]), "9 tokens do not fit into a context of 8"),
        (lambda: engine.read(2, [1]), "no row 2; this engine has rows 0 to 1"),
        (lambda: engine.load(-1, state), "no row -1"),
        (lambda: engine.step([1]), "1 tokens were passed for 2 rows"),
        (lambda: engine.step([1, -1]), "Token id -1 is out of range"),
        (lambda: engine.load(0, 3), "not a state of this kind"),
        (lambda: engine.load(0, state.repeat(2)), "has 2 rows; select one"),
        (lambda: engine.load(0, other_model.init_state(1)), "belongs to another model"),
        (lambda: GgmlEngine(path, capacity=6).load(0, state), "7 tokens do not fit into a context of 6"),
    ):
        with pytest.raises(ContextReadyError, match=sentence):
            call()
    same_state(engine.state(0), state, 1e-30)
    engine.step([1, 2])
    with pytest.raises(ContextReadyError, match="context of 8"):
        engine.step([1, 2])
    assert [engine.position(0), engine.position(1)] == [8, 1]
    engine.close()
    engine.close()
    with pytest.raises(ContextReadyError, match="was closed"):
        engine.read(1, [1])
