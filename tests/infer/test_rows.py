"""Any rows step, read in pieces, fork and are freed at any time, and every row is its solo run."""

import numpy as np
import pytest
import torch
from helpers import KINDS, random_tokens, small_model
from prefill_helpers import settling_model, wrapped
from schedule_helpers import check_schedule

from contextready import ContextReadyError
from contextready.infer.prompt import PromptInPieces
from contextready.infer.torch_engine import torch_engine
from contextready.model.some_rows import runs_of

ENGINES = ("eager", "compiled", "wrapped")


@pytest.fixture(autouse=True)
def _graphs_run_as_they_are(monkeypatch):
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda step, **settings: compile_(step, backend="eager", **settings))


def make(model, engine="eager", rows=4, capacity=64, **settings):
    if engine == "wrapped":
        model, engine = wrapped(model), "eager"
    return torch_engine(model, engine, rows=rows, capacity=capacity, **({"solver": "sequential"} | settings))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("engine", ENGINES)
def test_every_row_of_a_random_schedule_is_its_solo_run(engine, window, seed):
    model = small_model(window=window, bias=True)
    check_schedule(make(model, engine, history=2), model, seed, turns=80, history=2)


@pytest.mark.parametrize("kind", [None, *KINDS])
@pytest.mark.parametrize("engine", ["eager", "compiled"])
def test_every_correction_steps_some_rows(engine, kind):
    model = small_model(correction=kind)
    check_schedule(make(model, engine), model, seed=5, turns=60)


@pytest.mark.parametrize("window", [None, 5])
def test_rows_in_single_precision_are_their_solo_runs(window):
    model = small_model(window=window, dtype=torch.float32, gain=0.6)
    check_schedule(make(model, rows=6), model, seed=1)


@pytest.mark.parametrize(
    ("rows", "runs"),
    [([0], [(0, 1)]), ([0, 1, 2], [(0, 3)]), ([1, 3, 4, 7], [(1, 2), (3, 5), (7, 8)]), ([2, 4], [(2, 3), (4, 5)])],
)
def test_neighbouring_rows_are_one_run(rows, runs):
    assert runs_of(rows) == runs


@pytest.mark.parametrize("engine", ENGINES)
def test_the_other_rows_stay_bit_for_bit_as_they_are(engine):
    model = small_model(window=5 if engine == "compiled" else None)
    running = make(model, engine, history=2)
    for row in range(4):
        running.read(row, [row + 1, 2, 3][: row + 1])
    running.step([1, 2, 3, 4])
    before = [running.state(row).clone() for row in range(4)]
    running.step([7, 8], rows=[2, 0])
    assert [running.position(row) for row in range(4)] == [3, 3, 5, 4]
    for row in (1, 3):
        after = running.state(row)
        assert torch.equal(after.carried_BRC, before[row].carried_BRC)
        for kv, wanted in zip(after.cache.layers, before[row].cache.layers, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(kv, wanted, strict=True))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_full_row_does_not_stop_the_others(engine):
    model = small_model()
    running = make(model, engine, rows=2, capacity=3)
    running.read(0, [1, 2, 3])
    before = running.state(0).clone()
    for token in (4, 5, 6):
        running.step([token], rows=[1])
    assert torch.equal(running.state(0).cache.layers[1][0], before.cache.layers[1][0])
    with pytest.raises(ContextReadyError, match="4 tokens do not fit"):
        running.step([1], rows=[0])
    running.free(1)
    assert running.position(1) == 0


@pytest.mark.parametrize("engine", ENGINES)
def test_bad_rows_are_refused_and_move_nothing(engine):
    running = make(small_model(), engine, rows=3)
    for call, sentence in (
        (lambda: running.step([1, 2], rows=[0]), "2 tokens were passed for 1 rows; pass one per row"),
        (lambda: running.step([1], rows=[3]), "There is no row 3; this engine has rows 0 to 2"),
        (lambda: running.step([1], rows=[-1]), "There is no row -1"),
        (lambda: running.step([1, 1], rows=[2, 2]), r"rows are repeated in \[2, 2\]"),
        (lambda: running.step([], rows=[]), "pass at least one token"),
        (lambda: running.step([1, 99], rows=[0, 2]), "Token id 99 is out of range"),
        (lambda: running.read(3, [1]), "There is no row 3"),
        (lambda: running.append(-1, [1]), "There is no row -1"),
        (lambda: running.append(0, []), "pass at least one token"),
        (lambda: running.free(5), "There is no row 5"),
        (lambda: running.state(4), "There is no row 4"),
        (lambda: PromptInPieces(running, 0, [1], piece=0), "piece must be at least 1, but got 0"),
        (lambda: PromptInPieces(running, 0, [1] * 65), "65 tokens do not fit into a context of 64"),
        (lambda: PromptInPieces(running, 7, [1]), "There is no row 7"),
        (lambda: PromptInPieces(running, 0, [1]).info, "Nothing of this prompt has been read yet"),
    ):
        with pytest.raises(ContextReadyError, match=sentence):
            call()
    assert [running.position(row) for row in range(3)] == [0, 0, 0]


@pytest.mark.parametrize("piece", [1, 7, 16, 64, 1000])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("solver", ["sequential", "sweep", "jacobi"])
def test_a_prompt_in_pieces_is_the_whole_prompt(solver, window, piece):
    model, prompt = settling_model(window=window), random_tokens(1, 120)[0].tolist()
    exact = solver == "sequential"
    settings = {"solver": solver, "tolerance": 0.0 if exact else 1e-6, "capacity": 200, "rows": 2}
    whole, parts = make(model, **settings), make(model, **settings)
    for engine in (whole, parts):
        engine.read(1, [5, 6, 7])
    logits, info = whole.read(1, prompt)
    reading, turns = PromptInPieces(parts, 1, prompt, piece), 0
    while not reading.advance():
        parts.step([turns % 23], rows=[0])
        turns += 1
        assert parts.position(1) % piece == 0
    assert turns == (123 - 1) // piece - 3 // piece
    assert reading.advance()
    assert (reading.info.tokens, info.tokens, reading.read) == (120, 120, 120)
    assert reading.info.exact or not exact
    assert reading.info.certificate <= settings["tolerance"]
    near = 1e-6 if exact else 1e-4
    assert np.abs(reading.logits - logits).max() <= near * np.abs(logits).max()
    found, expected = parts.state(1), whole.state(1)
    assert found.position == expected.position == 123
    scale = float(expected.carried_BRC.abs().max())
    assert float((found.carried_BRC - expected.carried_BRC).abs().max()) <= near * scale


def test_pieces_end_at_the_same_positions_wherever_reading_begins():
    model, prompt = settling_model(), random_tokens(1, 100)[0].tolist()
    cold, warm = (make(model, rows=1, capacity=100, solver="sweep", tolerance=1e-6, segment=4) for _ in range(2))
    for engine, pieces in ((cold, 1), (warm, 2)):
        reading = PromptInPieces(engine, 0, prompt if pieces == 1 else prompt[:64], piece=32)
        while not reading.advance():
            pass
    rest = PromptInPieces(warm, 0, prompt[64:], piece=32)
    while not rest.advance():
        pass
    # So a prompt whose beginning was read before gives the very same numbers.
    assert torch.equal(cold.state(0).carried_BRC, warm.state(0).carried_BRC)


def test_a_row_that_moves_under_its_prompt_is_noticed():
    running = make(small_model(), rows=2)
    reading = PromptInPieces(running, 0, [1] * 10, piece=4)
    reading.advance()
    running.step([1, 1])
    with pytest.raises(ContextReadyError, match=r"Row 0 was at position 4 .* and is now at 5"):
        reading.advance()
