"""Buffers of keys and values: stepping in one equals the stream, and caches go in and out unchanged."""

from itertools import chain

import pytest
import torch
from helpers import KINDS, gap, random_tokens, small_model

from contextready import ContextReadyError
from contextready.model.buffer import NEVER, KVBuffer
from contextready.model.cache import KVCache

TOLERANCE = 1e-10


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.inference_mode():
        yield


def stepped(model, tokens, buffer, positions=None, carried=None, sees="held", visible=None):
    """Logits of tokens read one at a time in a buffer, starting at each row's own position."""
    B, T = tokens.shape
    e = model.backbone.embed(tokens)
    carried = torch.zeros_like(e[:, :1]) if carried is None else carried
    at = torch.zeros(B, 1, dtype=torch.int64) if positions is None else torch.tensor(positions)[:, None]
    logits = []
    for t in range(T):
        seen = None if visible is None else visible(t)
        result = model.recur(e[:, t : t + 1], carried, buffer.at(at + t, sees, seen))
        carried = result.carried_BTC
        logits.append(model.backbone.head(result.z_BTC))
    return torch.cat(logits, dim=1)


def streamed(model, tokens, history=1):
    return model.stream(tokens, model.init_state(len(tokens), history))


def assert_same_cache(found, expected, tolerance=0.0):
    assert (found.position, found.window, found.keep) == (expected.position, expected.window, expected.keep)
    assert len(found.layers) == len(expected.layers)
    for kv, wanted in zip(found.layers, expected.layers, strict=True):
        for a, b in zip(kv, wanted, strict=True):
            assert a.shape == b.shape
            assert a.numel() == 0 or gap(a, b) <= tolerance


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("layers", "window", "bias"), [(1, None, True), (3, None, False), (1, 1, False), (3, 4, True)])
def test_stepping_in_a_buffer_is_the_stream(kind, layers, window, bias):
    model = small_model(correction=kind, layers=layers, window=window, bias=bias)
    tokens = random_tokens(length=11)
    exact, state = streamed(model, tokens)
    buffer = model.backbone.init_buffer(2, 11 if window is None else window)
    assert gap(stepped(model, tokens, buffer), exact) < TOLERANCE
    for row in range(2):
        assert_same_cache(buffer.cache(row, 11, 1), state.cache.select(torch.tensor([row])), TOLERANCE)


@pytest.mark.parametrize("slots", [4, 5, 7, 64])
def test_a_ring_goes_round_many_times(slots):
    model = small_model(window=4)
    tokens = random_tokens(length=40)
    exact, _ = streamed(model, tokens)
    assert gap(stepped(model, tokens, model.backbone.init_buffer(2, slots)), exact) < TOLERANCE


def test_one_slot_less_than_the_window_is_too_few():
    """This shows that the ring tests would notice a position that was overwritten too early."""
    model = small_model(window=4)
    tokens = random_tokens(length=12)
    difference_T = (stepped(model, tokens, model.backbone.init_buffer(2, 3)) - streamed(model, tokens)[0]).abs()
    assert difference_T[:, :3].max() < TOLERANCE
    assert difference_T[:, 3].max() > 1e-6


@pytest.mark.parametrize(("window", "slots"), [(None, 20), (1, 1), (4, 4), (4, 6)])
def test_rows_of_one_buffer_are_at_positions_of_their_own(window, slots):
    model = small_model(window=window)
    tokens, more = random_tokens(batch=3, length=12), random_tokens(batch=3, length=7, seed=4)
    buffer, positions, carried, expected = model.backbone.init_buffer(3, slots), [0, 5, 12], [], []
    for row, position in enumerate(positions):
        state = model.init_state(1)
        if position:
            state = streamed(model, tokens[row : row + 1, :position])[1]
        buffer.load(row, state.cache)
        carried.append(state.z_prev_B1C)
        expected.append(model.stream(more[row : row + 1], state)[0])
    found = stepped(model, more, buffer, positions, torch.cat(carried))
    assert gap(found, torch.cat(expected)) < TOLERANCE
    assert buffer.held_BN.amax(dim=1).tolist() == [6, 11, 18]


@pytest.mark.parametrize("position", [0, 1, 3, 9])
@pytest.mark.parametrize("history", [0, 1, 3])
@pytest.mark.parametrize("window", [None, 1, 4])
def test_what_is_loaded_comes_out_again(window, history, position):
    model = small_model(window=window)
    state = model.init_state(1, history)
    if position:
        state = streamed(model, random_tokens(batch=1, length=position), history)[1]
    buffer = model.backbone.init_buffer(3, 12 if window is None else window - 1 + max(history, 1))
    others = streamed(model, random_tokens(batch=1, length=8, seed=9), history)[1].cache
    buffer.load(0, others)
    buffer.load(2, others)
    buffer.load(1, others)  # what a row held before is forgotten
    buffer.load(1, state.cache)
    assert_same_cache(buffer.cache(1, position, history), state.cache)
    for row in (0, 2):
        assert_same_cache(buffer.cache(row, 8, history), others)
    held = buffer.held_BN[1]
    assert sorted(held[held != NEVER].tolist()) == list(range(position - state.cache.length, position))


@pytest.mark.parametrize("window", [None, 4])
def test_a_cache_taken_from_a_buffer_shares_no_memory_with_it(window):
    model = small_model(window=window)
    buffer = model.backbone.init_buffer(2, 9)
    state = streamed(model, random_tokens(batch=1, length=6))[1]
    buffer.load(1, state.cache)
    taken = buffer.cache(1, 6, 1)
    for store in chain(*buffer.layers):
        store.fill_(7.0)
    assert_same_cache(taken, state.cache)


def test_a_state_that_was_rolled_back_can_be_loaded():
    model = small_model(window=4)
    tokens = random_tokens(batch=1, length=12)
    rolled = streamed(model, tokens, history=3)[1].rollback(10)
    buffer = model.backbone.init_buffer(1, 6)
    buffer.load(0, rolled.cache)
    found = stepped(model, tokens[:, 10:], buffer, [10], rolled.z_prev_B1C)
    assert gap(found, streamed(model, tokens)[0][:, 10:]) < TOLERANCE


def test_a_cache_never_claims_positions_that_the_buffer_does_not_hold():
    model = small_model(window=4)
    rolled = streamed(model, random_tokens(batch=1, length=12), history=3)[1].rollback(10)
    buffer = model.backbone.init_buffer(1, 6)
    buffer.load(0, rolled.cache)
    assert rolled.cache.length == 4
    assert_same_cache(buffer.cache(0, 10, 3), rolled.cache)


@pytest.mark.parametrize("window", [None, 1, 4])
def test_a_cleared_row_starts_anew(window):
    model = small_model(window=window)
    tokens = random_tokens(length=8)
    buffer = model.backbone.init_buffer(2, 8)
    stepped(model, random_tokens(length=8, seed=7), buffer)
    buffer.clear(0)
    assert (buffer.held_BN[0] == NEVER).all()
    assert (buffer.held_BN[1] != NEVER).all()
    buffer.clear(1)
    assert gap(stepped(model, tokens, buffer), streamed(model, tokens)[0]) < TOLERANCE


@pytest.mark.parametrize("sees", ["held", "causal"])
@pytest.mark.parametrize("window", [None, 1, 4, 9, 20])
def test_a_whole_sequence_at_once_is_a_plain_pass(window, sees):
    model = small_model(window=window, layers=3)
    e = model.backbone.embed(random_tokens())
    buffer = model.backbone.init_buffer(2, 9)
    z = model.recur(e, None, buffer.at(torch.arange(9).expand(2, 9), sees)).z_BTC
    assert gap(z, model.recur(e, None).z_BTC) < TOLERANCE
    assert buffer.held_BN.tolist() == [list(range(9))] * 2  # so that later calls can rely on it


def test_one_token_may_see_all_instead_of_what_is_held():
    model = small_model()
    tokens = random_tokens(length=10)
    exact, state = streamed(model, tokens)
    buffer = model.backbone.init_buffer(2, 30)
    assert gap(stepped(model, tokens, buffer, sees="all", visible=lambda t: t + 1), exact) < TOLERANCE
    assert_same_cache(buffer.cache(0, 10, 1), state.cache.select(torch.tensor([0])), TOLERANCE)
    late = stepped(model, tokens, model.backbone.init_buffer(2, 30), sees="all")
    assert gap(late, exact) > 1e-3  # slots that hold nothing are not hidden: `all` means all


def test_only_visible_slots_are_read():
    model = small_model()
    tokens = random_tokens(length=10)
    buffer = model.backbone.init_buffer(2, 16)
    for store in chain(*buffer.layers):
        store[:, 10:] = float("nan")
    logits = stepped(model, tokens, buffer, visible=lambda t: t + 1)
    assert gap(logits, streamed(model, tokens)[0]) < TOLERANCE


def test_empty_slots_do_no_harm():
    """With deterministic algorithms PyTorch fills new memory with NaN, and 0 × NaN is NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        for window in (None, 4):
            model = small_model(window=window)
            tokens = random_tokens(length=6)
            logits = stepped(model, tokens, model.backbone.init_buffer(2, 50))
            assert gap(logits, streamed(model, tokens)[0]) < TOLERANCE
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("window", [None, 4])
def test_tokens_may_be_written_again_at_any_positions(window):
    """With one layer, keys depend only on their own input, so rewriting two positions equals changing the sequence."""
    model = small_model(layers=1, window=window)
    tokens, chosen = random_tokens(), [2, 6]
    e = model.backbone.embed(tokens)
    buffer = model.backbone.init_buffer(2, 9)
    model.recur(e, None, buffer.at(torch.arange(9).expand(2, 9)))
    changed = e.clone()
    changed[:, chosen] = model.backbone.embed(random_tokens(length=2, seed=8))
    z = model.recur(changed[:, chosen], None, buffer.at(torch.tensor([chosen, chosen]))).z_BTC
    assert gap(z, model.recur(changed, None).z_BTC[:, chosen]) < TOLERANCE
    assert gap(z, model.recur(e, None).z_BTC[:, chosen]) > 1e-3


def test_positions_far_from_zero_lie_in_their_slots():
    model = small_model(window=4)
    positions, N = torch.tensor([[9, 10, 11], [102, 103, 104]]), 5
    buffer = model.backbone.init_buffer(2, N)
    e = model.backbone.embed(random_tokens(length=3))
    model.recur(e, None, buffer.at(positions))
    assert buffer.held_BN.tolist() == [[10, 11, NEVER, NEVER, 9], [NEVER, NEVER, 102, 103, 104]]


def test_size_and_type_of_a_buffer():
    model = small_model(layers=3, dtype=torch.float32)
    buffer = model.backbone.init_buffer(2, 7)
    assert (buffer.batch_size, buffer.capacity, buffer.window) == (2, 7, None)
    assert buffer.nbytes == 2 * 3 * 2 * 7 * 12 * 4
    assert [(store.shape, store.dtype) for store in chain(*buffer.layers)] == [((2, 7, 3, 4), torch.float32)] * 6
    assert small_model(window=5).backbone.init_buffer(1, 5).window == 5


@pytest.mark.parametrize("window", [None, 4])
def test_stacked_rows_are_the_batch_they_came_from(window):
    model = small_model(window=window)
    cache = streamed(model, random_tokens(batch=3, length=7), history=2)[1].cache
    rows = [cache.select(torch.tensor([row])) for row in range(3)]
    assert_same_cache(KVCache.stacked(rows), cache)
    assert_same_cache(KVCache.stacked(rows[::-1]), cache.select(torch.tensor([2, 1, 0])))
    assert_same_cache(KVCache.stacked([rows[0], cache]), cache.select(torch.tensor([0, 0, 1, 2])))
    assert KVCache.stacked(rows).layers[0][0].data_ptr() != rows[0].layers[0][0].data_ptr()


def test_bad_buffers_say_what_is_wrong():
    model, windowed = small_model(), small_model(window=4)
    like = torch.zeros(1)
    cache = streamed(model, random_tokens(length=6))[1].cache
    one, narrow = cache.select(torch.tensor([0])), streamed(windowed, random_tokens(batch=1, length=6), 3)[1].cache
    cases = [
        (
            lambda: KVBuffer.empty(0, 4, 1, 1, 2, window=None, like=like),
            "batch_size and capacity must be at least 1, but got 0 and 4",
        ),
        (lambda: model.backbone.init_buffer(1, 0), "must be at least 1, but got 1 and 0"),
        (lambda: model.backbone.init_buffer(1, 9).load(0, cache), "must have one row, but has 2; select one"),
        (
            lambda: model.backbone.init_buffer(1, 5).load(0, one),
            "needs 6 positions, but .* capacity is 5; .* larger capacity",
        ),
        (lambda: windowed.backbone.init_buffer(1, 2).load(0, narrow), "needs 3 positions, but .* capacity is 2"),
    ]
    for call, sentence in cases:
        with pytest.raises(ContextReadyError, match=sentence):
            call()
    windowed.backbone.init_buffer(1, 3).load(
        0, narrow
    )  # the positions of the window are enough; history may be dropped
    refused = model.backbone.init_buffer(1, 5)
    refused.held_BN[0] = 3
    with pytest.raises(ContextReadyError):
        refused.load(0, one)
    assert (refused.held_BN == 3).all()  # a refused state changes nothing
