"""Prompts that ggml reads with many tokens in one product: the solvers give what reading one by one gives."""

from math import ceil

import numpy as np
import pytest
import torch
from helpers import KINDS, random_tokens, randomise, small_config
from schedule_helpers import check_schedule

from contextready import ContextReadyError, account, build_model

pytest.importorskip("ggml")
pytest.importorskip("gguf")

from contextready.infer.ggml.engine import GgmlEngine
from contextready.infer.ggml.file import write_gguf
from contextready.infer.ggml.prompt import WIDTH
from contextready.infer.prompt import PromptInPieces
from contextready.solve.prefill import prefill

TOLERANCE = 2e-5
LENGTHS = (2, 33, 3 * WIDTH + 5)


def settling(**changes):
    """A model in float32 whose passes converge quickly: large embeddings, small branches."""
    model = randomise(build_model(small_config(**changes)).float()).eval()
    with torch.no_grad():
        model.backbone.embedding.weight.mul_(6.0)
        for name, weight in model.named_parameters():
            if name.endswith(("out.weight", "down.weight")):
                weight.mul_(0.12)
    return model


def exported(model, folder):
    path = folder / "f32.gguf"
    write_gguf(model, path, 300, "f32", None)
    return path


def tokens_of(length):
    return random_tokens(1, length, seed=length)[0].tolist()


def near(a, b, tolerance=TOLERANCE):
    return float(np.abs(a - b).max()) <= tolerance * max(1.0, float(np.abs(b).max()))


def same_rows(engine, row, other, other_row, tolerance=TOLERANCE):
    a, b = engine.state(row), other.state(other_row)
    assert (a.position, a.carried_BRC.shape) == (b.position, b.carried_BRC.shape)
    assert near(a.carried_BRC.numpy(), b.carried_BRC.numpy(), tolerance)
    for kv, wanted in zip(a.cache.layers, b.cache.layers, strict=True):
        assert all(near(mine.numpy(), theirs.numpy(), tolerance) for mine, theirs in zip(kv, wanted, strict=True))


@pytest.mark.parametrize("solver", ["sweep", "jacobi"])
@pytest.mark.parametrize("correction", [None, *KINDS, "memoryless"])
def test_every_solver_is_reading_one_by_one(correction, solver, tmp_path):
    path = exported(settling(correction=correction, bias=True), tmp_path)
    one_by_one = GgmlEngine(path, threads=1)
    solved = GgmlEngine(path, rows=3, threads=1, solver=solver, tolerance=1e-6)
    for length in LENGTHS:
        for engine, row in ((one_by_one, 0), (solved, 1)):
            engine.free(row)
            engine.read(row, [3, 4])
        expected, _ = one_by_one.read(0, tokens_of(length))
        logits, info = solved.read(1, tokens_of(length))
        assert near(logits, expected)
        assert info.tokens == length
        assert info.certificate <= 1e-6
        same_rows(solved, 1, one_by_one, 0)
        # And both go on from there.
        assert near(solved.step([7], [1]), one_by_one.step([7]))
    assert info.solver == ("plain" if correction is None else solver)
    assert [solved.position(row) for row in (0, 2)] == [0, 0]


@pytest.mark.parametrize(
    ("length", "chunk", "segment"), [(40, 4096, None), (150, 64, None), (70, 4096, 8), (64, 33, 3)]
)
@pytest.mark.parametrize("solver", ["sweep", "jacobi"])
def test_a_tolerance_of_zero_is_exact_whatever_contracts(solver, length, chunk, segment, tmp_path):
    model = randomise(build_model(small_config(layers=1)).float(), gain=0.6).eval()
    with torch.no_grad():
        model.backbone.embedding.weight.mul_(5.0)
    path = exported(model, tmp_path)
    solved = GgmlEngine(path, threads=1, solver=solver, tolerance=0.0, chunk=chunk, segment=segment)
    one_by_one = GgmlEngine(path, threads=1)
    logits, info = solved.read(0, tokens_of(length))
    assert near(logits, one_by_one.read(0, tokens_of(length))[0])
    assert info.exact
    assert info.certificate == 0.0
    same_rows(solved, 0, one_by_one, 0)


def test_a_loose_tolerance_is_kept_and_costs_what_torch_says(tmp_path):
    model, tokens = settling(), tokens_of(120)
    path = exported(model, tmp_path)
    engine = GgmlEngine(path, threads=1, solver="jacobi", tolerance=0.01)
    info = engine.append(0, tokens)
    expected = prefill(model, torch.tensor([tokens]), solver="jacobi", tolerance=0.01, bf16_passes="off").info
    assert (info.solver, info.tokens, info.passes, info.exact) == ("jacobi", 120, expected.passes, False)
    assert (info.macs, info.plain_macs) == (expected.macs, expected.plain_macs)
    assert info.changes == pytest.approx(expected.changes, rel=1e-2, abs=1e-6)
    assert info.plain_macs == 120 * account(small_config()).macs_blocks + sum(
        account(small_config()).macs_attention(t + 1) for t in range(120)
    )


def test_numbers_that_overflow_fall_back_to_one_by_one(tmp_path, monkeypatch):
    from contextready.infer.ggml import prompt

    path, tokens = exported(settling(), tmp_path), tokens_of(80)
    engine = GgmlEngine(path, threads=1, solver="sweep", tolerance=1e-6)
    monkeypatch.setattr(prompt, "_largest_change", lambda before, after: float("nan"))
    logits, info = engine.read(0, tokens)
    assert info.exact
    assert near(logits, GgmlEngine(path, threads=1).read(0, tokens)[0])


def test_what_overflowed_is_not_seen_before_it_is_overwritten(tmp_path):
    engine, tokens = GgmlEngine(exported(settling(), tmp_path), threads=1), tokens_of(20)
    expected, _ = engine.read(0, tokens)
    engine.free(0)
    for kv in engine._buffers.kv:
        kv[0] = np.nan
    assert np.array_equal(engine.read(0, tokens)[0], expected)


def test_short_segments_fit_into_a_full_context(tmp_path):
    path, tokens = exported(settling(), tmp_path), tokens_of(14)
    engine = GgmlEngine(path, capacity=14, threads=1, solver="sweep", segment=2, tolerance=1e-6)
    logits, info = engine.read(0, tokens)
    assert info.solver == "sweep"
    assert near(logits, GgmlEngine(path, threads=1).read(0, tokens)[0])


def test_a_window_is_read_one_by_one(tmp_path):
    path, tokens = exported(settling(window=6), tmp_path), tokens_of(60)
    engine = GgmlEngine(path, threads=1, solver="sweep")
    logits, info = engine.read(0, tokens)
    assert (info.solver, info.exact) == ("sequential", True)
    assert np.array_equal(logits, GgmlEngine(path, threads=1).read(0, tokens)[0])


@pytest.mark.parametrize("solver", ["sequential", "sweep"])
def test_pieces_are_the_whole(solver, tmp_path):
    path, tokens = exported(settling(), tmp_path), tokens_of(130)
    whole, parts = (GgmlEngine(path, rows=2, threads=1, solver=solver, tolerance=1e-6) for _ in range(2))
    expected, _ = whole.read(0, tokens)
    reading = PromptInPieces(parts, 0, tokens, piece=48)
    while not reading.advance():
        parts.step([5], rows=[1])
    assert parts.position(1) == ceil(130 / 48) - 1
    assert near(reading.logits, expected)
    same_rows(parts, 0, whole, 0)


def test_rows_that_are_read_by_sweeps_follow_a_random_schedule(tmp_path):
    model = settling()
    engine = GgmlEngine(exported(model, tmp_path), rows=4, threads=1, solver="jacobi", tolerance=1e-6)
    check_schedule(engine, model, seed=3, tolerance=1e-4)


def test_bad_settings_are_refused(tmp_path):
    path = exported(settling(), tmp_path)
    with pytest.raises(ContextReadyError, match="Unknown solver 'sweeps'; did you mean 'sweep'"):
        GgmlEngine(path, solver="sweeps")
    with pytest.raises(ContextReadyError, match="tolerance must be at least 0"):
        GgmlEngine(path, solver="sweep", tolerance=-1.0)
