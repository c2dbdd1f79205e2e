"""Sequences and batches: what they contain, how often, and that their index alone determines them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contextready.data.batches import Batches, Sequences, shuffled
from contextready.data.shards import TokenArray
from contextready.errors import ContextReadyError


def tokens_of(length, shards=1):
    """An array in which every token is its own position."""
    return TokenArray(np.array_split(np.arange(length, dtype=np.uint16), shards))


lengths = st.integers(2, 400)
block_sizes = st.integers(1, 60)


@settings(deadline=None)
@given(lengths, block_sizes, st.integers(1, 7))
def test_every_token_but_the_first_is_a_target_once(length, block_size, shards):
    tokens = tokens_of(length, min(shards, length))
    if length <= block_size:
        with pytest.raises(ContextReadyError):
            Sequences(tokens, block_size)
        return
    sequences = Sequences(tokens, block_size)
    x_BT, y_BT = sequences.read(np.arange(sequences.count))
    assert x_BT.shape == y_BT.shape == (sequences.count, block_size)
    assert x_BT.dtype == y_BT.dtype == torch.int64
    assert torch.equal(y_BT, x_BT + 1)
    # All targets in whole sequences; fewer than block_size are left over at the end.
    assert y_BT.flatten().tolist() == list(range(1, sequences.count * block_size + 1))
    assert 0 <= length - 1 - sequences.count * block_size < block_size


def test_sequences_can_be_shifted():
    sequences = Sequences(tokens_of(101, shards=9), 10)
    x_BT, y_BT = sequences.read(np.array([3, 0]), offset=7)
    assert x_BT[:, 0].tolist() == [37, 7]
    assert torch.equal(y_BT, x_BT + 1)


@settings(deadline=None)
@given(st.integers(1, 5000), st.integers(0, 2**32), st.integers(0, 100))
def test_shuffled_is_a_permutation(size, seed, epoch):
    places = shuffled(np.arange(size), size, (seed, epoch))
    assert sorted(places.tolist()) == list(range(size))


@settings(deadline=None)
@given(st.integers(1, 2**40), st.lists(st.integers(0, 2**40), min_size=1, max_size=50, unique=True))
def test_shuffled_places_of_huge_arrays_stay_apart_and_inside(size, numbers):
    places = np.unique(np.array(numbers) % size)
    found = shuffled(places, size, (0, 0))
    assert len(set(found.tolist())) == len(places)
    assert found.min() >= 0
    assert found.max() < size


def test_shuffled_one_by_one_is_shuffled_at_once():
    at_once = shuffled(np.arange(1000), 1000, (5, 0))
    assert [int(shuffled(np.array([i]), 1000, (5, 0))[0]) for i in range(1000)] == at_once.tolist()


def test_orders_of_epochs_and_seeds_differ_and_look_random():
    size = 1000
    orders = [shuffled(np.arange(size), size, seed) for seed in [(0, 0), (0, 1), (1, 0), (1, 1)]]
    for i, order in enumerate(orders):
        for other in [np.arange(size), *orders[:i]]:
            assert (order == other).sum() < 20  # by chance, one in a thousand stays in place
            assert abs(np.corrcoef(order, other)[0, 1]) < 0.15


def starts_of_epoch(batches, epoch):
    x_BT, y_BT = batches.read(epoch * batches.per_epoch, batches.per_epoch)
    assert torch.equal(y_BT, x_BT + 1)
    return x_BT[:, 0]


@settings(deadline=None)
@given(lengths, block_sizes, st.integers(0, 1000))
def test_each_epoch_visits_every_sequence_once(length, block_size, seed):
    if length <= block_size:
        return
    batches = Batches(tokens_of(length, min(3, length)), block_size, seed)
    assert batches.per_epoch >= max(1, (length - 1) // block_size - 1)
    for epoch in (0, 1, 7):
        starts = starts_of_epoch(batches, epoch).sort().values
        offset = int(starts[0])
        assert 0 <= offset < block_size
        assert starts.tolist() == [offset + i * block_size for i in range(batches.per_epoch)]


def test_epochs_have_their_own_order_and_offset():
    batches = Batches(tokens_of(2001), 20, seed=3)
    epochs = [starts_of_epoch(batches, epoch) for epoch in range(12)]
    assert len({int(starts.min()) for starts in epochs}) > 6
    orders = {tuple(((starts - starts.min()) // 20).tolist()) for starts in epochs}
    assert len(orders) == 12
    assert not torch.equal(epochs[0], starts_of_epoch(Batches(tokens_of(2001), 20, seed=4), 0))


@settings(deadline=None)
@given(st.integers(0, 300), st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 9))
def test_reading_in_parts_is_reading_at_once(first, counts, shards):
    whole = Batches(tokens_of(500), 13, seed=1).read(first, sum(counts))
    other = Batches(tokens_of(500, shards), 13, seed=1)
    parts = []
    for count in counts:
        parts.append(other.read(first, count))
        first += count
    for i in range(2):
        assert torch.equal(torch.cat([part[i] for part in parts]), whole[i])


def test_batches_depend_on_their_number_alone():
    batches = Batches(tokens_of(500), 13, seed=1)
    later = batches.read(100, 8)
    batches.read(0, 50)
    np.random.seed(0)
    torch.manual_seed(0)
    assert all(torch.equal(a, b) for a, b in zip(batches.read(100, 8), later, strict=True))


def test_far_steps_of_long_runs_can_be_read():
    x_BT, y_BT = Batches(tokens_of(500), 13, seed=1).read(10**12, 5)
    assert torch.equal(y_BT, x_BT + 1)


def test_the_smallest_array_that_fits():
    batches = Batches(tokens_of(9), 8, seed=0)
    x_BT, y_BT = batches.read(0, 3)
    assert x_BT.tolist() == [list(range(8))] * 3
    assert y_BT.tolist() == [list(range(1, 9))] * 3


@pytest.mark.parametrize("length", [0, 1, 8])
def test_a_block_longer_than_the_data_is_refused(length):
    tokens = TokenArray([]) if length == 0 else tokens_of(length)
    with pytest.raises(ContextReadyError, match=rf"block_size=8 is longer than the val data \({length} tokens\); use"):
        Sequences(tokens, 8, "val")
    with pytest.raises(ContextReadyError, match="block_size=8 is longer than the train data"):
        Batches(tokens, 8, seed=0)
