"""Pointer chasing: the paper's example, a brute-force solver that reads the sequences, and disjoint splits."""

import itertools

import numpy as np
import pytest
import torch

from contextready.errors import ContextReadyError
from contextready.pointer.task import IGNORED, PointerTask

TASKS = [
    PointerTask(hops=2, keys=3, values=10, answers=answers, queries=queries)
    for answers in ("masked", "visible")
    for queries in ("level", "all")
]
MANY_LETTERS = PointerTask(hops=6, keys=3, values=3)
"""Enough keys to reach the letter Q, which marks queries."""
AUTHORS = PointerTask(hops=9, keys=5, values=10, answers="absent")
"""The author's "n_hops = 10": ten tables, a query section after each, and a final query."""
WAVE = PointerTask(hops=9, keys=10, values=20, answers="absent")
TWENTY = PointerTask(hops=19, keys=8, values=16, answers="absent", queries="none")
SMALL_ABSENT = [PointerTask(2, 3, 10, answers="absent", queries=queries) for queries in ("level", "all", "none")]
ABSENT = [AUTHORS, WAVE, TWENTY, *SMALL_ABSENT, PointerTask(1, 1, 3, answers="absent")]


def example(task):
    """The paper's tables: A→v3, B→v0, C→v8; D→A, E→B, F→C; G→D, H→E, I→F. The final query asks for G."""
    return task.written(np.array([[3, 0, 8]]), np.arange(3).reshape(1, 1, 3).repeat(2, axis=1), np.array([0]))


def spelled(task, tokens):
    return " ".join("_" if token == IGNORED else task.spelled(token) for token in tokens.tolist())


def test_the_papers_example():
    task = PointerTask(hops=2, keys=3, values=10, answers="visible")
    batch = example(task)
    assert spelled(task, batch.inputs_BT[0]) == (
        "v3 = A v0 = B v8 = C | Q A v3 Q B v0 Q C v8 | "
        "A = D B = E C = F | Q D v3 Q E v0 Q F v8 | "
        "D = G E = H F = I | Q G"
    )
    asked = "_ v3 _ _ v0 _ _ v8 _ _"
    nothing = " ".join("_" * 10)
    assert spelled(task, batch.targets_BT[0]) == f"{nothing} {asked} {nothing} {asked} {nothing} _ v3"


def test_masked_answers_are_a_placeholder_and_nothing_else_changes():
    visible, masked = (example(PointerTask(2, 3, 10, answers=answers)) for answers in ("visible", "masked"))
    differs_T = (visible.inputs_BT != masked.inputs_BT)[0]
    # An answer follows the key of its query; the final query has no answer.
    expected_T = torch.zeros_like(differs_T)
    expected_T[1:] = visible.targets_BT[0, :-1] != IGNORED
    assert torch.equal(differs_T, expected_T)
    assert (masked.inputs_BT[0][differs_T] == PointerTask(2, 3, 10).placeholder).all()
    assert torch.equal(visible.targets_BT, masked.targets_BT)


def test_absent_answers_leave_pairs_and_the_last_level_is_asked_twice():
    task = PointerTask(2, 3, 10, answers="absent")
    batch = example(task)
    assert spelled(task, batch.inputs_BT[0]) == (
        "v3 = A v0 = B v8 = C | Q A Q B Q C | A = D B = E C = F | Q D Q E Q F | D = G E = H F = I | Q G Q H Q I | Q G"
    )
    table, asked = " ".join("_" * 10), "_ v3 _ v0 _ v8 _"
    assert spelled(task, batch.targets_BT[0]) == " ".join([table, asked] * 3 + ["_ v3"])
    assert batch.levels_T.max() == 3 == task.levels - 1


def test_without_queries_the_targets_are_at_the_tables_keys():
    task = PointerTask(2, 3, 10, answers="absent", queries="none")
    batch = example(task)
    assert spelled(task, batch.inputs_BT[0]) == ("v3 = A v0 = B v8 = C | A = D B = E C = F | D = G E = H F = I | Q G")
    assert spelled(task, batch.targets_BT[0]) == " ".join(["_ _ v3 _ _ v0 _ _ v8 _"] * 3 + ["_ v3"])


def test_layouts_share_their_tables():
    """Only the way that the tables are written differs, so the layouts have the same training and test tables."""
    written = [PointerTask(2, 3, 10, answers=answers).batch("test", 1, 2, 4) for answers in ("masked", "absent")]
    for batch, size in zip(written, (10, 7), strict=True):
        for level in range(3):
            start = level * (10 + size)
            assert torch.equal(batch.inputs_BT[:, start : start + 10], written[0].inputs_BT[:, level * 20 :][:, :10])
    assert torch.equal(written[0].inputs_BT[:, -2:], written[1].inputs_BT[:, -2:])


def solve(words):
    """Answer for every key from the spelled sequence alone: read the tables in order, follow pointers one by one."""
    table, found = {}, []
    for i, word in enumerate(words):
        if word == "=":
            table[words[i + 1]] = words[i - 1]
        if word in ("Q", "="):
            pointed = words[i + 1]
            hops = -1
            while pointed in table:
                pointed, hops = table[pointed], hops + 1
            found.append((i + 1, pointed, hops, word == "Q"))
    return found


@pytest.mark.parametrize(
    "task",
    [*TASKS, MANY_LETTERS, PointerTask(), PointerTask(hops=20, keys=2, values=3), AUTHORS, WAVE, TWENTY, *SMALL_ABSENT],
    ids=str,
)
@pytest.mark.parametrize("split", ["train", "test"])
def test_targets_are_what_a_solver_reads(task, split):
    batch = task.batch(split, seed=1, step=2, rows=5)
    for inputs_T, targets_T in zip(batch.inputs_BT, batch.targets_BT, strict=True):
        found = solve([task.spelled(token) for token in inputs_T.tolist()])
        expected = torch.full_like(targets_T, IGNORED)
        levels = torch.full_like(targets_T, -1)
        for place, answer, hops, is_query in found:
            if is_query or task.queries == "none":
                expected[place] = int(answer.removeprefix("v"))
                levels[place] = hops
        assert levels[-1] == task.hops
        if task.answers == "absent":
            # A level of its own, although the chain is as long as that of the level before.
            levels[-1] += 1
        assert torch.equal(targets_T, expected)
        assert torch.equal(batch.levels_T, levels)
    asked = batch.levels_T[batch.levels_T >= 0].bincount()
    tables = task.hops + (task.answers == "absent")
    often = [task.hops + 1 - level if task.queries == "all" else 1 for level in range(tables)]
    assert asked.tolist() == [*(task.keys * times for times in often), 1]


def test_the_window_of_the_paper():
    assert PointerTask(keys=5).window == 38
    assert PointerTask(keys=3).window == 26
    assert AUTHORS.window == 38
    assert TWENTY.window is None


def test_a_query_sees_its_own_level_and_not_the_base_table():
    task = PointerTask(hops=3, keys=3)
    batch = task.batch("train", 0, 0, 1)
    base_ends = 3 * task.keys
    for place in (batch.levels_T >= 2).nonzero()[:, 0].tolist():
        first_seen = place - task.window + 1
        assert first_seen > base_ends
        level = int(batch.levels_T[place])
        table = [i for i in range(place) if batch.inputs_BT[0, i] in [task.key(level, n) for n in range(task.keys)]]
        assert min(table) - 2 >= first_seen


def test_sequences_are_a_function_of_seed_split_and_step():
    task = PointerTask()
    first = task.batch("train", 3, 7, 6)
    assert all(torch.equal(a, b) for a, b in zip(first, task.batch("train", 3, 7, 6), strict=True))
    for other in (("train", 3, 8, 6), ("train", 4, 7, 6), ("test", 3, 7, 6)):
        assert not torch.equal(first.inputs_BT, task.batch(*other).inputs_BT)


def test_no_sequence_is_in_both_splits():
    """The task is so small that draws repeat, and every possible table appears in exactly one split."""
    task = PointerTask(hops=2, keys=2, values=3)
    end = -2  # without the final query, which is drawn separately
    sides = {
        split: {tuple(row) for step in range(20) for row in task.batch(split, 0, step, 100).inputs_BT[:, :end].tolist()}
        for split in ("train", "test")
    }
    assert not sides["train"] & sides["test"]
    assert len(sides["train"]) + len(sides["test"]) == 3**2 * 2**2
    assert len(sides["test"]) > 0


def test_everything_is_drawn_uniformly():
    """Values, permutations and final keys are uniform within sampling error, in both splits."""
    task = PointerTask(hops=4, keys=3, values=4)
    for split in ("train", "test"):
        batch = task.batch(split, 0, 0, 20_000)
        words = batch.inputs_BT
        for place in (0, 3, 6):
            share = words[:, place].bincount(minlength=4)[:4] / len(words)
            assert (share - 1 / 4).abs().max() < 0.03
        pointers = words[:, [20, 23, 26]] - task.key(0, 0)
        for order in itertools.permutations(range(3)):
            share = (pointers == torch.tensor(order)).all(dim=1).double().mean()
            assert abs(float(share) - 1 / 6) < 0.03
        last = (words[:, -1] - task.key(task.hops, 0)).bincount(minlength=3) / len(words)
        assert (last - 1 / 3).abs().max() < 0.03


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"hops": 0}, "hops must be at least 1, but got 0"),
        ({"keys": 0}, "keys must be at least 1, but got 0"),
        ({"answers": "hidden"}, "answers=hidden is unknown; choose one of: masked, visible, absent"),
        ({"queries": "levels"}, "queries=levels is unknown; did you mean 'level'"),
        ({"keys": 1, "values": 1}, "nothing to ask"),
        ({"queries": "none"}, "queries=none has no queries that answers=masked could follow; set answers=absent"),
        ({"queries": "none", "answers": "visible"}, "answers=visible could follow; set answers=absent"),
    ],
)
def test_bad_settings_are_rejected(changes, sentence):
    with pytest.raises(ContextReadyError, match=sentence):
        PointerTask(**changes)


def test_an_unknown_split_is_rejected():
    with pytest.raises(ContextReadyError, match="Unknown split 'val'; choose train or test"):
        PointerTask().batch("val", 0, 0, 1)


@pytest.mark.parametrize("task", [*TASKS, PointerTask(), PointerTask(hops=1, keys=1), PointerTask(20, 5, 10), *ABSENT])
def test_the_length_is_that_of_the_sequences(task):
    batch = task.batch("train", 0, 0, 2)
    assert batch.inputs_BT.shape == batch.targets_BT.shape == (2, task.tokens)
    assert int(batch.inputs_BT.max()) < task.vocab_size


def test_the_papers_sizes():
    assert (PointerTask().tokens, PointerTask().window, PointerTask().vocab_size) == (338, 38, 69)


def test_the_sizes_of_the_authors_runs():
    """Ten tables (or twenty) and a final query make the paper's 11 levels (or 21)."""
    table, queries = 3 * 5 + 1, 2 * 5 + 1
    assert AUTHORS.tokens == 10 * (table + queries) + 2 == 272
    assert WAVE.tokens == 10 * (31 + 21) + 2 == 522
    assert TWENTY.tokens == 20 * (3 * 8 + 1) + 2 == 502
    assert (AUTHORS.levels, WAVE.levels, TWENTY.levels) == (11, 11, 21)
    assert (AUTHORS.vocab_size, WAVE.vocab_size, TWENTY.vocab_size) == (64, 124, 180)
    # Of the four special tokens, the placeholder does not occur.
    assert not (AUTHORS.batch("train", 0, 0, 3).inputs_BT == AUTHORS.placeholder).any()


def test_an_example_is_shown_as_the_paper_prints_it():
    task = PointerTask(hops=2, keys=3, values=10, answers="visible")
    assert task.shown(example(task)) == "\n".join(
        [
            "Level 0 (base table and queries)",
            "  Input:  v3  =  A v0  =  B v8  =  C  |",
            "  Target:  _  _  _  _  _  _  _  _  _  _",
            "  Input:   Q  A v3  Q  B v0  Q  C v8  |",
            "  Target:  _ v3  _  _ v0  _  _ v8  _  _",
            "Level 1 (index table and queries)",
            "  Input:   A  =  D  B  =  E  C  =  F  |",
            "  Target:  _  _  _  _  _  _  _  _  _  _",
            "  Input:   Q  D v3  Q  E v0  Q  F v8  |",
            "  Target:  _ v3  _  _ v0  _  _ v8  _  _",
            "Level 2 (index table and queries)",
            "  Input:   D  =  G  E  =  H  F  =  I  |",
            "  Target:  _  _  _  _  _  _  _  _  _  _",
            "  Input:   Q  G",
            "  Target:  _ v3",
        ]
    )


def test_a_final_query_that_repeats_a_level_is_shown_as_such():
    shown = {task.queries: task.shown(example(task)).splitlines() for task in SMALL_ABSENT}
    end = ["Level 3 (final query, level 2 again)", "  Input:   Q  G", "  Target:  _ v3"]
    assert all(said[-3:] == end for said in shown.values())
    assert shown["level"][3:5] == ["  Input:   Q  A  Q  B  Q  C  |", "  Target:  _ v3  _ v0  _ v8  _"]
    assert shown["none"][:3] == [
        "Level 0 (base table)",
        "  Input:  v3  =  A v0  =  B v8  =  C  |",
        "  Target:  _  _ v3  _  _ v0  _  _ v8  _",
    ]


def test_what_is_shown_is_the_whole_sequence_in_every_variant():
    for task, seed in [*((task, 3) for task in (*TASKS, *ABSENT[:-1])), *((MANY_LETTERS, seed) for seed in range(8))]:
        assert len({task.spelled(token) for token in range(task.vocab_size)}) == task.vocab_size
        batch = task.batch("test", seed, 0, 2)
        lines = task.shown(batch, row=1).splitlines()
        assert sum(line.startswith("Level") for line in lines) == task.levels
        for name, tokens in (("Input:", batch.inputs_BT[1]), ("Target:", batch.targets_BT[1])):
            shown = [word for line in lines if line.strip().startswith(name) for word in line.split()[1:]]
            assert " ".join(shown) == spelled(task, tokens)
