"""State-tracking tasks: generators against brute-force solvers, disjoint splits, groups, and bounds by window."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch

from contextready.data.shards import IGNORED
from contextready.errors import ContextReadyError
from contextready.state.assign import AssignTask
from contextready.state.groups import find_group
from contextready.state.score import best_score
from contextready.state.stack import StackTask
from contextready.state.task import BEGIN, HELD_OUT, checksum
from contextready.state.word import WordTask

TASKS = [
    WordTask(length=12),
    WordTask(length=12, group="S5", alphabet=2),
    WordTask(length=12, group="A5", alphabet=2),
    WordTask(length=40, group="Z60", alphabet=4),
    WordTask(length=30, group="Z2"),
    WordTask(length=9, group="A4"),
    AssignTask(length=12),
    AssignTask(length=20, variables=2, values=3, copies=0.9),
    StackTask(length=40),
    StackTask(length=40, alphabet=2, depth=2),
]
GROUPS = {"S3": 6, "S4": 24, "S5": 120, "A4": 12, "A5": 60, "A6": 360, "Z2": 2, "Z7": 7, "Z60": 60}


def words_of(task, tokens_T):
    return ["_" if token == IGNORED else task.vocabulary[token] for token in tokens_T.tolist()]


@pytest.mark.parametrize("task", TASKS, ids=str)
@pytest.mark.parametrize("split", ["train", "test"])
def test_targets_are_what_the_solver_says(task, split):
    for length in (None, 2 * task.length):
        batch = task.batch(split, seed=3, step=7, rows=40, length=length)
        N = length or task.length
        assert batch.inputs_BT.shape == batch.targets_BT.shape == (40, 1 + N * task.words_per_symbol)
        asked = 0
        for inputs_T, targets_T in zip(batch.inputs_BT, batch.targets_BT, strict=True):
            begin, *words = words_of(task, inputs_T)
            assert begin == BEGIN
            answers = ["_" if answer is None else answer for answer in task.solve(words)]
            assert words_of(task, targets_T) == ["_", *answers]
            asked += len(answers) - answers.count("_")
        # The state is asked for after every symbol, except for an empty stack.
        assert asked == 40 * N or (isinstance(task, StackTask) and asked > 20 * N)


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_the_same_arguments_give_the_same_sequences(task):
    again = [task.batch("train", 1, 2, 5).inputs_BT for _ in range(2)]
    assert torch.equal(*again)
    for other in (("train", 1, 3), ("train", 2, 2), ("test", 1, 2)):
        assert not torch.equal(again[0], task.batch(*other, 5).inputs_BT)


def test_no_test_sequence_begins_with_a_training_sequence():
    task = WordTask(length=7, group="Z2")
    seen = {split: set() for split in ("train", "test")}
    for split, length in itertools.product(seen, (7, 20)):
        for step in range(30):
            inputs_BT = task.batch(split, 0, step, 64, length).inputs_BT[:, :8]
            seen[split] |= {tuple(row) for row in inputs_BT.tolist()}
    assert not seen["train"] & seen["test"]
    # All of the 128 sequences belong to one of the two.
    assert len(seen["train"] | seen["test"]) == 2**7
    assert len(seen["test"]) == pytest.approx(2**7 / HELD_OUT, abs=12)


def test_a_split_without_sequences_is_refused():
    task = next(t for n in range(1, 5) for t in [WordTask(length=n, group="Z2")] if not _has_test(t))
    with pytest.raises(ContextReadyError, match="has too few sequences to hold some out for testing; increase length"):
        task.batch("test", 0, 0, 4)


def _has_test(task):
    every = np.array(list(itertools.product(range(2), repeat=task.length)))
    return bool((checksum(every) % HELD_OUT == 0).any())


def test_the_begin_token_is_the_last_one_of_the_vocabulary():
    for task in TASKS:
        assert task.vocabulary[-1] == BEGIN
        assert len(set(task.vocabulary)) == task.vocab_size
        assert (task.batch("train", 0, 0, 3).inputs_BT[:, 0] == task.vocab_size - 1).all()


@pytest.mark.parametrize(("name", "order"), GROUPS.items())
def test_groups(name, order):
    group = find_group(name)
    table, e = group.table, group.identity
    assert group.order == order
    every = np.arange(order)
    assert (table[e] == every).all()
    assert (table[:, e] == every).all()
    # Latin square, and associative on random triples.
    assert all((np.sort(table[i]) == every).all() and (np.sort(table[:, i]) == every).all() for i in range(order))
    a, b, c = np.random.default_rng(0).integers(order, size=(3, 500))
    assert (table[table[a, b], c] == table[a, table[b, c]]).all()
    reached = {e}
    while more := {int(table[x, s]) for x in reached for s in range(group.generators)} - reached:
        reached |= more
    assert len(reached) == order


def test_s5_and_a5_are_not_solvable_and_s4_is():
    """The derived series of a solvable group ends at the identity."""

    def derived(group, members):
        inverse = {a: b for a in members for b in members if group.table[a, b] == group.identity}
        t = group.table
        found = {int(t[t[inverse[a], inverse[b]], t[a, b]]) for a in members for b in members}
        while more := {int(t[a, b]) for a in found for b in found} - found:
            found |= more
        return found

    sizes = {}
    for name in ("S4", "S5", "A5", "Z60"):
        group = find_group(name)
        members = set(range(group.order))
        while (inner := derived(group, members)) != members:
            members = inner
        sizes[name] = len(members)
    assert sizes == {"S4": 1, "S5": 60, "A5": 60, "Z60": 1}


@pytest.mark.parametrize("name", ["S9", "S2", "A7", "Z1", "Z1001", "D4", "s5", "", "S05", "Z-3"])
def test_unknown_groups_are_refused(name):
    with pytest.raises(ContextReadyError, match=r"There is no group .* choose one of S3 to S5, A4 to A6, Z2 to Z1000"):
        WordTask(group=name)


def test_the_guess_is_the_chance_of_the_most_likely_product():
    task = WordTask(length=4, group="S3", alphabet=2)
    for unseen in range(5):
        counts = Counter()
        for symbols in itertools.product(range(2), repeat=unseen):
            written = task.write(np.array([symbols], dtype=np.int64).reshape(1, -1))
            counts[int(written.answers_BN[0, -1]) if unseen else task.elements.identity] += 1
        assert task.guess(unseen) == pytest.approx(max(counts.values()) / 2**unseen)
    assert WordTask(group="S5").guess(1) == pytest.approx(1 / 120)


def test_no_function_of_the_last_tokens_beats_the_bound():
    """The best answer for every content of the window, counted over all sequences of an alphabet of two."""
    task, reached = WordTask(length=7, group="S3", alphabet=2), 3
    every = np.array(list(itertools.product(range(2), repeat=7)))
    written = task.write(every)
    batch = task.batch("train", 0, 0, 200)
    bound = best_score(task, batch, reached)
    assert bound.asked_N.tolist() == [200] * 7
    for n in range(7):
        best = Counter()
        for symbols, answer in zip(every.tolist(), written.answers_BN[:, n].tolist(), strict=True):
            best[tuple(symbols[max(0, n - reached) : n + 1]), answer] += 1
        tops = {}
        for (window, _), count in best.items():
            tops[window] = max(tops.get(window, 0), count)
        assert sum(tops.values()) / len(every) == pytest.approx(bound.right_N[n] / 200)


def test_assignments_out_of_sight_can_only_be_guessed():
    task = AssignTask(length=30, variables=3, values=10, copies=0.5)
    batch = task.batch("test", 0, 0, 300)
    everything, little = (best_score(task, batch, n) for n in (task.tokens, 6))
    assert everything.curve == [1.0] * 30
    assert all(0.1 < accuracy < 0.9 for accuracy in little.curve[5:])


def test_a_curriculum_grows_the_length():
    task = WordTask(length=32, curriculum=0.5)
    lengths = [task.length_at(step / 100) for step in range(100)]
    assert lengths[0] == 4
    assert lengths[50:] == [32] * 50
    assert sorted(set(lengths)) == [4, 8, 12, 16, 20, 24, 28, 32]
    assert lengths == sorted(lengths)
    assert WordTask(length=32, curriculum=0.0).length_at(0.0) == 32
    assert WordTask(length=3, curriculum=1.0).length_at(0.0) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"length": 0}, "length must be at least 1"),
        ({"curriculum": 1.5}, "curriculum must be from 0 to 1"),
        ({"curriculum": float("nan")}, "curriculum must be from 0 to 1"),
        ({"until": 0.0}, "until must be greater than 0"),
        ({"alphabet": 1}, "alphabet must be at least 2"),
        ({"alphabet": 121}, "alphabet must be at most 120"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ContextReadyError, match=message):
        WordTask(**settings)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AssignTask(variables=27), "variables must be at most 26"),
        (lambda: AssignTask(values=1), "values must be at least 2"),
        (lambda: AssignTask(copies=1.0), "copies must be at least 0 and less than 1"),
        (lambda: StackTask(depth=0), "depth must be at least 1"),
        (lambda: StackTask(alphabet=30), "alphabet must be at most 26"),
        (lambda: WordTask().batch("dev", 0, 0, 1), "Unknown split 'dev'"),
        (lambda: WordTask().batch("test", 0, 0, 10**9), "sequences with 33 tokens each"),
        (lambda: WordTask().batch("test", 0, 0, 1, 2**20), "length must be at most"),
    ],
)
def test_sizes_are_checked(make, message):
    with pytest.raises(ContextReadyError, match=message):
        make()


def test_an_example_is_shown_in_words():
    task = AssignTask(length=3)
    shown = task.shown(task.batch("train", 0, 0, 1))
    inputs, targets = shown.splitlines()
    assert inputs.split()[:2] == ["Input:", "^"]
    assert targets.split().count("_") == 1 + 15
    assert len(inputs) == len(targets)
