"""Engines on PyTorch: every row is the stream, whatever the other rows do, and states go in and out unchanged."""

import shutil

import numpy as np
import pytest
import torch
from helpers import KINDS, random_tokens, small_model
from prefill_helpers import assert_same_state, settling_model
from torch._dynamo.utils import counters

from contextready import ContextReady, ContextReadyError
from contextready.infer.torch_engine import CAPACITY_STEP, BufferEngine, StateEngine, torch_engine

PROMPTS = [row[:length].tolist() for row, length in zip(random_tokens(3, 20, seed=2), (20, 1, 7), strict=True)]
MORE = random_tokens(3, 12, seed=3)
SOLVERS = ("sweep", "jacobi", "sequential")
CLOSE = 1e-5
"""Logits are handed out in float32."""


class Wrapped:
    """Some other backbone: a transformer whose inside no one knows."""

    def __init__(self, inner):
        for name in ("width", "embed", "blocks", "head", "init_cache", "parameters"):
            setattr(self, name, getattr(inner, name))


def wrapped(model):
    return ContextReady(Wrapped(model.backbone), model.correction).eval()


def make(model, rows=1, capacity=64, name="eager", **settings):
    return torch_engine(model, name, rows=rows, capacity=capacity, **({"tolerance": 0.0} | settings))


@torch.inference_mode()
def streamed(model, tokens, state=None):
    """Logits (T, V) of one row in float64, and the state after it."""
    logits, state = model.stream(torch.tensor([list(tokens)]), state or model.init_state(1, 8))
    return logits[0].numpy(), state


def assert_close(found, expected, tolerance=CLOSE):
    assert found.dtype == np.float32
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= tolerance * max(1.0, np.abs(expected).max())
    assert (found.argmax(axis=-1) == expected.argmax(axis=-1)).all()


def run(engine, prompts=PROMPTS, more=MORE):
    """Logits (rows, 1 + steps, V): of each prompt's last token and of every step after it."""
    logits = [np.stack([engine.read(row, prompt)[0] for row, prompt in enumerate(prompts)])]
    logits += [engine.step(tokens).copy() for tokens in more[: len(prompts)].T.tolist()]
    return np.stack(logits, axis=1)


def expected_run(model, prompts=PROMPTS, more=MORE):
    rows = [streamed(model, p + m.tolist())[0][len(p) - 1 :] for p, m in zip(prompts, more, strict=False)]
    return np.stack(rows)


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_different_prompts_are_each_the_stream(kind, window):
    model = small_model(correction=kind, window=window, bias=True)
    engine = make(model, rows=3)
    found = run(engine)
    assert_close(found, expected_run(model))
    assert [engine.position(row) for row in range(3)] == [32, 13, 19]
    assert isinstance(engine, BufferEngine)
    for row in range(3):
        alone = make(model)
        assert_close(run(alone, PROMPTS[row : row + 1], MORE[row : row + 1])[0], found[row])


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kind", ["add", "concat", "blind", "block_head"])
def test_a_backbone_without_fixed_places_is_stepped_by_its_own_cache(kind, window):
    model = small_model(correction=kind, window=window)
    engine = make(wrapped(model), rows=3)
    assert isinstance(engine, StateEngine)
    assert (engine.name, engine.rows, engine.vocab_size) == ("eager", 3, 23)
    assert_close(run(engine), run(make(model, rows=3)))
    assert_close(run(make(wrapped(model), rows=3)), expected_run(model))
    taken = engine.state(1)
    engine.step([1, 2, 3])
    assert (taken.position, engine.position(1)) == (13, 14)
    engine.load(1, taken)
    assert engine.position(1) == 13


@pytest.mark.parametrize("window", [None, 1, 5])
def test_a_plain_transformer_is_an_engine_too(window):
    model = small_model(correction=None, window=window)
    assert not model.is_recurrent
    found = run(make(model, rows=2), PROMPTS[:2])
    for row in range(2):
        with torch.inference_mode():
            tokens = torch.tensor([PROMPTS[row] + MORE[row].tolist()])
            whole, (streams, _) = model(tokens), model.stream(tokens, model.init_state(1))
        for logits_1TV in (whole, streams):
            assert_close(found[row], logits_1TV[0, len(PROMPTS[row]) - 1 :].numpy())
    # The backbone alone makes the same model.
    assert np.array_equal(run(make(ContextReady(model.backbone), rows=2), PROMPTS[:2]), found)


def test_prompts_are_read_as_the_settings_say():
    model = small_model()
    prompt = random_tokens(1, 40)[0].tolist()
    for solver in SOLVERS:
        info = make(model, solver=solver, segment=4, tolerance=0.0).read(0, prompt)[1]
        assert (info.solver, info.tokens, info.exact) == (solver, 40, True)
    assert make(model, segment=4).read(0, prompt)[1].changes


@pytest.mark.parametrize("window", [None, 5])
def test_a_second_prompt_is_read_after_the_first(window):
    model = small_model(window=window)
    engine = make(model, rows=2)
    engine.read(0, [4, 4])
    engine.step([9, 3])
    logits, _ = engine.read(1, PROMPTS[0])
    assert_close(logits, streamed(model, [3, *PROMPTS[0]])[0][-1])
    assert_close(
        engine.step([5, 6]), np.stack([streamed(model, t)[0][-1] for t in ([4, 4, 9, 5], [3, *PROMPTS[0], 6])])
    )


@pytest.mark.parametrize("chunk", [11, 4096])
@pytest.mark.parametrize("history", [0, 1, 4])
@pytest.mark.parametrize("window", [None, 5, 14])
@pytest.mark.parametrize("solver", SOLVERS)
def test_a_prompt_after_steps_is_read_as_if_all_were_streamed(solver, window, history, chunk):
    steps, prompt, after = random_tokens(3, 30, seed=4).tolist()
    # Sweeps of the one settle; those of the other are given up, and the rest is read one by one.
    for model, tolerance in ((settling_model(window=window), 1e-7), (small_model(window=window), 0.0)):
        for begun in ([], [4, 4, 9]):
            engine = make(
                model, capacity=99, solver=solver, segment=2, chunk=chunk, tolerance=tolerance, history=history
            )
            if begun:
                engine.read(0, begun)
            for token in steps[:6]:
                engine.step([token])
            logits, info = engine.read(0, prompt)
            assert (info.solver, info.tokens) == (solver, 30)
            tokens = [*begun, *steps[:6], *prompt]
            expected, state = streamed(model, tokens, model.init_state(1, history))
            assert_close(logits, expected[-1])
            assert engine.position(0) == len(tokens)
            assert_same_state(model, engine.state(0), state, 10 * tolerance or 1e-9)
            # And the engine itself goes on from there, by steps and by another prompt.
            stepped = np.stack([engine.step([token])[0] for token in after[:8]])
            assert_close(stepped, streamed(model, tokens + after[:8])[0][-8:])
            assert_close(engine.read(0, after[8:])[0], streamed(model, tokens + after)[0][-1])


@pytest.mark.parametrize("chunk", [11, 4096])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("solver", SOLVERS)
def test_reading_into_one_row_leaves_the_others_as_they_are(solver, window, chunk):
    model, prompt = settling_model(window=window), random_tokens(1, 30, seed=4)[0].tolist()
    for row in range(3):
        engine = make(model, rows=3, solver=solver, segment=2, chunk=chunk, tolerance=1e-7, history=2)
        run(engine)
        before = [engine.state(other) for other in range(3)]
        assert_close(engine.read(row, prompt)[0], streamed(model, [*PROMPTS[row], *MORE[row].tolist(), *prompt])[0][-1])
        for other in {0, 1, 2} - {row}:
            now = engine.state(other)
            assert now.position == before[other].position
            assert torch.equal(now.carried_BRC, before[other].carried_BRC)
            for kv, wanted in zip(now.cache.layers, before[other].cache.layers, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(kv, wanted, strict=True))
        found = engine.step([5, 6, 7])
        for other, token in enumerate((5, 6, 7)):
            tokens = [*PROMPTS[other], *MORE[other].tolist(), *(prompt if other == row else []), token]
            assert_close(found[other], streamed(model, tokens)[0][-1])


@pytest.mark.parametrize("history", [0, 1, 4])
def test_a_window_is_stepped_on_for_ever_in_the_same_memory(history):
    model = small_model(window=8, gain=0.5)
    engine = make(model, rows=2, capacity=10, history=history)
    assert engine.capacity is None
    tokens = random_tokens(2, 400)
    expected = np.stack([streamed(model, row.tolist())[0] for row in tokens])
    memory, places = engine.buffer.nbytes, engine.buffer.layers[0][0].data_ptr()
    assert engine.buffer.capacity == 7 + max(history, 1)
    found = np.stack([engine.step(column).copy() for column in tokens.T.tolist()], axis=1)
    assert_close(found, expected)
    assert (engine.buffer.nbytes, engine.buffer.layers[0][0].data_ptr()) == (memory, places)
    assert engine.state(0).cache.length == 7 + history
    assert engine.carried_BRC.shape == (2, history + 1, 12)


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("history", [0, 1, 3])
def test_a_state_goes_out_and_in_again(window, history):
    model = small_model(window=window)
    engine = make(model, rows=3, history=history)
    run(engine)
    for row in range(3):
        tokens = PROMPTS[row] + MORE[row].tolist()
        found, expected = engine.state(row), streamed(model, tokens, model.init_state(1, history))[1]
        assert (found.position, found.history) == (expected.position, history)
        assert found.cache.keep == expected.cache.keep
        assert found.carried_BRC.shape == expected.carried_BRC.shape
        torch.testing.assert_close(found.carried_BRC, expected.carried_BRC)
        for kv, wanted in zip(found.cache.layers, expected.cache.layers, strict=True):
            torch.testing.assert_close(kv, wanted)
        other = make(model, rows=2, history=history)
        other.step([7, 7])
        other.load(1, found)
        again = other.state(1)
        assert torch.equal(again.carried_BRC, found.carried_BRC)
        assert all(torch.equal(a, b) for a, b in zip(again.cache.layers[1], found.cache.layers[1], strict=True))
        assert_close(other.step([1, 2])[1], streamed(model, [*tokens, 2])[0][-1])
    engine.load(0, None)
    assert engine.position(0) == 0
    assert_close(engine.read(0, PROMPTS[2])[0], streamed(model, PROMPTS[2])[0][-1])


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("hide", [False, True])
def test_forked_rows_go_their_own_ways_and_a_taken_state_stays(window, hide):
    model = small_model(window=window)
    engine = make(wrapped(model) if hide else model, rows=3)
    engine.read(0, PROMPTS[0])
    fork = engine.state(0)
    kept = [tensor.clone() for tensor in (fork.carried_BRC, *fork.cache.layers[0], *fork.cache.layers[1])]
    for row in range(3):
        engine.load(row, fork)
    paths = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14], [1, 2, 3, 0, 0, 0, 0]]
    for tokens in zip(*paths, strict=True):
        logits = engine.step(tokens)
    assert_close(logits, np.stack([streamed(model, PROMPTS[0] + path)[0][-1] for path in paths]))
    now = (fork.carried_BRC, *fork.cache.layers[0], *fork.cache.layers[1])
    assert all(torch.equal(a, b) for a, b in zip(now, kept, strict=True))
    if not hide:
        with torch.inference_mode():
            fork.carried_BRC.fill_(9.0)  # and the engine does not notice what becomes of a state
            fork.cache.layers[0][0].fill_(9.0)
        assert_close(engine.step([5, 5, 5])[0], streamed(model, [*PROMPTS[0], *paths[0], 5])[0][-1])


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("back", [1, 3])
def test_a_row_can_be_rolled_back_and_go_on(window, back):
    model = small_model(window=window)
    engine = make(model, rows=2, history=3)
    engine.read(0, PROMPTS[0])
    for token in (4, 5, 6):
        engine.step([token, token])
    engine.load(0, engine.state(0).rollback(23 - back))
    assert (engine.position(0), engine.position(1)) == (23 - back, 3)
    kept = [4, 5, 6][: 3 - back]
    assert_close(engine.step([11, 7])[0], streamed(model, [*PROMPTS[0], *kept, 11])[0][-1])
    # Rolling back has used some of the history up, and the engine does not pretend to have it still.
    with pytest.raises(ContextReadyError, match="larger history"):
        engine.state(0).rollback(19)
    again = streamed(model, [2], engine.state(0).rollback(20))[0][-1]
    assert_close(again.astype(np.float32), streamed(model, [*PROMPTS[0], 2])[0][-1])


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("by_steps", [False, True])
@pytest.mark.parametrize("history", [1, 4])
@pytest.mark.parametrize("window", [None, 1, 5])
def test_a_short_prompt_can_be_taken_back(window, history, by_steps, count):
    model, tokens = small_model(window=window), [*PROMPTS[0], 7, 8, 9][: 20 + count]
    engine = make(model, history=history, chunk=2)
    if by_steps:
        for token in PROMPTS[0]:
            engine.step([token])
    else:
        engine.read(0, PROMPTS[0])
    engine.read(0, tokens[20:])
    taken = engine.state(0)
    assert_same_state(model, taken, streamed(model, tokens, model.init_state(1, history))[1], 1e-9)
    with pytest.raises(ContextReadyError, match="larger history"):
        taken.rollback(len(tokens) - history - 1)
    for back in range(history + 1):
        kept = tokens[: len(tokens) - back]
        engine.load(0, taken.rollback(len(kept)))
        assert engine.position(0) == len(kept)
        assert_close(engine.step([11])[0], streamed(model, [*kept, 11])[0][-1])
        # Read as a prompt, the new token can be taken back too, with what was kept before it and no more.
        engine.load(0, taken.rollback(len(kept)))
        assert_close(engine.read(0, [11])[0], streamed(model, [*kept, 11])[0][-1])
        again, oldest = engine.state(0), max(len(tokens), len(kept) + 1) - history
        logits, _ = streamed(model, [2], again.rollback(oldest))
        assert_close(logits[-1].astype(np.float32), streamed(model, [*kept[:oldest], 2])[0][-1])
        with pytest.raises(ContextReadyError, match="larger history"):
            again.rollback(oldest - 1)


def test_full_attention_has_room_for_its_capacity_and_no_more():
    model = small_model()
    engine = make(model, rows=2, capacity=5)
    assert (engine.capacity, engine.buffer.capacity) == (5, CAPACITY_STEP)
    with pytest.raises(ContextReadyError, match="6 tokens do not fit into a context of 5"):
        engine.read(0, [1] * 6)
    engine.read(0, [1] * 4)
    engine.step([1, 1])
    with pytest.raises(ContextReadyError, match="6 tokens do not fit into a context of 5"):
        engine.step([1, 1])
    with pytest.raises(ContextReadyError, match="6 tokens do not fit into a context of 5"):
        engine.read(0, [1])
    with pytest.raises(ContextReadyError, match="7 tokens do not fit into a context of 5"):
        engine.load(1, streamed(model, [1] * 7)[1])
    assert [engine.position(row) for row in range(2)] == [5, 1]
    engine.load(0, None)
    assert_close(engine.step([1, 3])[1], streamed(model, [1, 3])[0][-1])  # what was refused changed nothing
    hidden = make(wrapped(model), capacity=2)
    hidden.read(0, [1, 2])
    for call in (lambda: hidden.step([1]), lambda: hidden.read(0, [1])):
        with pytest.raises(ContextReadyError, match="3 tokens do not fit into a context of 2"):
            call()
    assert make(model, capacity=CAPACITY_STEP + 1).buffer.capacity == 2 * CAPACITY_STEP


@pytest.mark.parametrize("hide", [False, True])
def test_bad_tokens_and_states_are_refused(hide):
    model = small_model()
    engine = make(wrapped(model) if hide else model, rows=2)
    engine.step([1, 2])
    two_rows = model.stream(random_tokens(), model.init_state(2))[1]
    cases = [
        (lambda: engine.read(0, []), "prompt is empty"),
        (lambda: engine.read(0, [1, 23]), "Token id 23 is out of range; this model has ids 0 to 22"),
        (lambda: engine.read(0, [-1]), "Token id -1 is out of range"),
        (lambda: engine.step([23, 1]), "Token id 23 is out of range"),
        (lambda: engine.load(0, two_rows), "has 2 rows, but the input has 1"),
        (lambda: engine.load(0, small_model(width=24).init_state(1)), "does not match the model"),
        (lambda: engine.load(0, small_model(dtype=torch.float32).init_state(1)), "does not match the model"),
        (lambda: make(model, rows=0), "must be at least 1, but got rows=0 and capacity=64"),
        (lambda: make(model, capacity=0), "got rows=1 and capacity=0"),
        (lambda: make(wrapped(model), name="compiled"), "no static buffers to compile for; use the engine eager"),
    ]
    for call, sentence in cases:
        with pytest.raises(ContextReadyError, match=sentence):
            call()
    assert_close(engine.step([3, 4]), np.stack([streamed(model, t)[0][-1] for t in ([1, 3], [2, 4])]))


@pytest.mark.parametrize(
    "hide",
    [False, True],
)
def test_a_step_that_is_refused_moves_no_row(hide):
    model = small_model()
    engine = make(wrapped(model) if hide else model, rows=2)
    with pytest.raises(ContextReadyError):
        engine.step([1, 23])
    assert [engine.position(row) for row in range(2)] == [0, 0]


@pytest.mark.parametrize("hide", [False, True])
def test_a_step_of_too_few_tokens_is_refused(hide):
    engine = make(wrapped(small_model()) if hide else small_model(), rows=3)
    with pytest.raises(ContextReadyError):
        engine.step([1])


@pytest.mark.parametrize("changes", [{"layers": 1}, {"window": 5}])
def test_a_state_of_a_model_of_the_same_width_only_is_refused(changes):
    other = small_model(**changes)
    with pytest.raises(ContextReadyError, match="does not match the model"):
        make(small_model()).load(0, streamed(other, PROMPTS[0])[1])


@pytest.fixture
def graphs(monkeypatch):
    """Counts what is compiled, with the graphs then run as they are: quick, and the same in every other way."""
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda step, **settings: compile_(step, backend="eager", **settings))
    torch._dynamo.reset()
    yield lambda: counters["stats"]["unique_graphs"]
    torch._dynamo.reset()


@pytest.mark.parametrize(("kind", "window", "history"), [("add", None, 1), ("concat", 5, 3), (None, 5, 0)])
def test_one_graph_serves_every_position_of_every_row(graphs, kind, window, history):
    model = small_model(correction=kind, window=window)
    engine, eager = (make(model, 3, name=name, history=history) for name in ("compiled", "eager"))
    assert (engine.name, eager.name) == ("compiled", "eager")
    engine.step([0, 1, 2])
    eager.step([0, 1, 2])
    before = graphs()
    assert before > 0
    with torch.compiler.set_stance("fail_on_recompile"):
        assert_close(run(engine), run(eager))
        engine.load(2, engine.state(0))
        eager.load(2, eager.state(0))
        assert_close(engine.step([4, 5, 6]), eager.step([4, 5, 6]))
        # Another model of the same shape, in a buffer of nearly the same capacity, needs no graph of its own.
        other = small_model(seed=9, correction=kind, window=window)
        twin = make(other, 3, capacity=99, name="compiled", history=history)
        assert_close(run(twin), run(make(other, 3)))
    assert graphs() == before


def test_any_number_of_engines_can_be_compiled(graphs):
    model = small_model(layers=1)
    for rows in range(1, 2 + torch._dynamo.config.recompile_limit):
        make(model, rows, name="compiled").step([1] * rows)


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's own, while it loads its compiler
@pytest.mark.parametrize(("kind", "window"), [("add", None), ("block_head", 5)])
def test_the_compiled_engine_is_the_eager_one(kind, window):
    model = small_model(correction=kind, window=window, layers=1, dtype=torch.float32)
    prompts, tokens = PROMPTS[:2], random_tokens(2, 40, seed=5)
    eager = run(make(model, 2, name="eager"), prompts, tokens)
    compiled = make(model, 2, name="compiled")
    compiled.step([0, 0])
    for row in range(2):
        compiled.load(row, None)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert_close(run(compiled, prompts, tokens), eager, 1e-4)
