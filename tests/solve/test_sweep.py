"""Sweeps over segments: what they make exact, when they stop, and when they give up."""

from math import ceil, inf, isnan, nan

import pytest
import torch
from helpers import contractive_model, gap, random_tokens, small_model
from prefill_helpers import STEP, assert_same_state, chunk_of, largest_error, read, settling_model, state_after

from contextready.solve.prefill import FEWEST_SEGMENTS, SHORTEST_SEGMENT, WIDTH, prefill, segment_length
from contextready.solve.reading import estimated_error
from contextready.solve.sweeping import break_even_sweeps, solve_by_sweeps, sweeps_left


@pytest.fixture(autouse=True)
def _known_hardware(monkeypatch):
    """Fix the hardware figure, so that the load of this machine does not matter and converging sweeps pay off."""
    monkeypatch.setattr("contextready.solve.prefill.free_tokens", lambda model: 1000.0)


@pytest.mark.parametrize("window", [None, 6])
def test_m_sweeps_make_the_first_m_segments_exact_and_no_more(window):
    model = small_model(window=window)
    tokens = random_tokens(length=5 * STEP + 3)
    with torch.inference_mode():
        for before in (0, 9):
            state = read(model, tokens[:, :before])[1] if before else model.init_state(2)
            e = model.backbone.embed(tokens)
            z, _ = model.read(e, state)
            chunk = chunk_of(model, e, state)
            chunk.plain_pass()
            assert gap(chunk.z_BTC, next(model.passes(e, state.cache, state.z_prev_B1C)).z_BTC) < 1e-10
            for m in range(1, 7):
                old = chunk.z_BTC.clone()
                change = chunk.sweep(m - 1, STEP)
                assert change == pytest.approx(largest_error(old, chunk.z_BTC))
                wrong_T = (chunk.z_BTC - z).abs().amax(dim=(0, 2))
                assert wrong_T[: m * STEP].max() < 1e-9
                assert m == 6 or wrong_T[m * STEP :].min() > 1e-6
            assert_same_state(model, state_after(chunk, state), model.read(e, state)[1], 1e-9)


@pytest.mark.parametrize("segment", [3, 4, 24])
def test_as_many_sweeps_as_segments_are_the_stream(monkeypatch, segment):
    model = small_model()
    tokens, recur, widths = random_tokens(length=24), model.recur, []

    def counted(e, carried, cache=None):
        widths.append(e.shape[1])
        return recur(e, carried, cache)

    monkeypatch.setattr(model, "recur", counted)
    with torch.inference_mode():
        e = model.backbone.embed(tokens)
        state = model.init_state(2)
        chunk = chunk_of(model, e, state)
        found = solve_by_sweeps(chunk, 0.0, segment, inf)
    segments = 24 // segment
    assert (found.exact, found.alone_from, len(found.changes)) == (True, None, segments)
    assert found.runs == tuple((m * segment, 24) for m in range(segments))
    # The plain pass, then steps without the segments that are already exact.
    assert widths == [24] + [segments - m for m in range(segments) for _ in range(segment)]
    z, expected = read(model, tokens)
    assert gap(chunk.z_BTC, z) < 1e-9
    assert_same_state(model, state_after(chunk, state), expected, 1e-9)


def test_a_contracting_model_stops_at_the_first_sweep_within_the_tolerance():
    model = contractive_model(scale=0.05)
    tokens = random_tokens(length=120)
    z, _ = read(model, tokens)
    with torch.inference_mode():
        e = model.backbone.embed(tokens)
        for tolerance in (1e-2, 1e-5):
            chunk = chunk_of(model, e, model.init_state(2))
            found = solve_by_sweeps(chunk, tolerance, 8, 8.0)
            assert estimated_error(found.changes) <= tolerance < estimated_error(found.changes[:-1])
            assert not found.exact
            assert largest_error(chunk.z_BTC, z) <= tolerance
            info = prefill(model, tokens, segment=8, tolerance=tolerance).info
            assert info.certificate == estimated_error(found.changes)
            assert info.passes < 8
            assert info.note == ""


@pytest.mark.parametrize("window", [None, 5])
def test_sweeps_that_are_not_finite_are_thrown_away(monkeypatch, window):
    model = settling_model(window=window)
    tokens = random_tokens(length=34)
    state = read(model, tokens[:, :9])[1]
    z, expected = read(model, tokens[:, 9:], state)
    recur = model.recur

    def overflowing(e, carried, cache=None):
        return recur(e * nan if carried is None else e, carried, cache)

    monkeypatch.setattr(model, "recur", overflowing)
    found = prefill(model, tokens[:, 9:], state, segment=STEP)
    assert found.info.note == "after sweep 1, tokens from 0 on were read one at a time, which seemed cheaper"
    assert found.info.exact
    assert isnan(found.info.changes[0])
    assert found.info.passes == 3.0  # the plain pass, the sweep, and all tokens again
    assert gap(found.z_B1C, z[:, -1:]) < 1e-10
    assert_same_state(model, found.state, expected, 1e-10)


def test_segments_get_longer_with_the_prompt_and_shorter_with_wider_hardware():
    lengths, widths = [64, 65, 100, 1000, 4096, 10_000], [1.0, 2.0, 3.0, 8.0, 30.0, 1e6]
    for rows in widths:
        segments = [segment_length(T, rows) for T in lengths]
        assert segments == sorted(segments)
        assert min(segments) >= SHORTEST_SEGMENT
        # Steps are WIDTH times the free tokens, to the nearest power of two, and have a minimum width.
        widest = max(FEWEST_SEGMENTS, WIDTH * rows * 2**0.5)
        assert all(ceil(T / L) <= widest for T, L in zip(lengths, segments, strict=True))
    for T in lengths:
        segments = [segment_length(T, rows) for rows in widths]
        assert segments == sorted(segments, reverse=True)
    assert (segment_length(4096, 8.0), segment_length(4097, 8.0), segment_length(4096, 1e6)) == (64, 65, 8)


def test_a_prompt_is_never_swept_in_fewer_segments_than_pay():
    assert all(ceil(T / segment_length(T, 1.0)) >= FEWEST_SEGMENTS for T in (64, 100, 4096))


def test_the_sweeps_left_follow_from_the_last_two_changes():
    assert sweeps_left([0.5], 1e-3, 9) == 1  # one change says nothing
    assert sweeps_left([0.5, 0.3], 1e-3, 9) == 1  # hopeful
    assert sweeps_left([0.5, 0.4], 1e-3, 90) == 27  # 0.4 · 0.8^27 is the first below
    assert (0.4 * 0.8**27 <= 1e-3, 0.4 * 0.8**26 <= 1e-3) == (True, False)
    assert sweeps_left([0.9, 0.5, 0.25], 1e-3, 90) == 8
    assert sweeps_left([0.9, 0.5, 0.25], 1e-3, 5) == 5
    assert sweeps_left([0.5, 0.5], 1e-3, 7) == sweeps_left([0.5, 0.6], 1e-3, 7) == 7
    assert sweeps_left([0.5, 0.1], 0.0, 7) == 7
    assert sweeps_left([0.5, nan], 1e-3, 7) == sweeps_left([inf], 1e-3, 7) == inf


def test_how_many_sweeps_take_as_long_as_reading_one_token_at_a_time():
    for rows in (1.0, 4.0, 100.0):
        found = [break_even_sweeps(segments, rows) for segments in range(1, 200)]
        assert found == sorted(found)
        assert found[0] == pytest.approx(1.0)
        assert all(1.0 <= some <= min(segments, rows + 1) + 1e-9 for segments, some in enumerate(found, 1))
        # A sweep has L steps of width s; reading one at a time has s · L steps of width 1. L cancels.
        assert found[9] * (1 + 10 / rows) == pytest.approx(10 * (1 + 1 / rows))
    assert break_even_sweeps(12, inf) == 12


def test_the_error_is_estimated_from_the_last_two_changes():
    assert estimated_error([]) == inf
    assert estimated_error([0.4]) == 0.4
    assert estimated_error([0.4, 0.1]) == pytest.approx(0.1 * 0.25 / 0.75)
    assert estimated_error([0.4, 0.3]) == 0.3  # 0.75 / 0.25 would say more than the change itself
    assert estimated_error([0.4, 0.5]) == 0.5
    assert estimated_error([0.0, 0.0]) == 0.0
    assert isnan(estimated_error([0.4, nan]))
