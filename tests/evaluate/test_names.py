"""Names of runs in tables and legends."""

import pytest

from contextready.evaluate.names import common_name, short_names


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["runs/a", "runs/b"], ["a", "b"]),
        (["x/runs/a", "y/runs/a", "runs/c"], ["x/runs/a", "y/runs/a", "c"]),
        (["one/a", "two/a"], ["one/a", "two/a"]),
        (["a", "x/a"], ["a", "x/a"]),
        (["/data/runs/a"], ["a"]),
        (["runs/a", "runs/a/"], ["a", "a"]),
        (["."], ["."]),
        (["HuggingFaceTB/SmolLM2-135M", "smollm2-crt"], ["SmolLM2-135M", "smollm2-crt"]),
    ],
)
def test_names_are_as_short_as_they_are_unique(paths, names):
    assert short_names(paths) == names


@pytest.mark.parametrize(
    ("names", "name"),
    [
        (["stories-add-0", "stories-add-1", "stories-add-2"], "stories-add"),
        (["d1-seed0", "d1-seed1"], "d1"),
        (["d1_s8", "d1_s9", "d1_s10"], "d1"),
        (["d1-seed=10", "d1-seed=11"], "d1"),
        (["d1", "d1-1"], "d1"),
        (["first/d1", "second/d1"], "first/d1, second/d1"),
        (["seed0", "seed1"], "seed0, seed1"),
        (["classes-0", "classes-1"], "classes"),
        (["alone"], "alone"),
    ],
)
def test_seeds_share_a_name(names, name):
    assert common_name(names) == name
