"""Limits: sentences that state the range, sizes compared with the memory, and wrong values on one short line."""

import resource
import subprocess
import sys
from math import inf, nan

import pytest

from contextready.errors import ContextReadyError
from contextready.formats import limits
from contextready.formats.limits import check_count, check_memory, check_range, gigabytes, shown, total_memory


@pytest.mark.parametrize("value", [1, 1.0, 5, 9.99, 10])
def test_values_within_the_range_pass(value):
    check_range("x", value, 1, 10)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (11, "11"),
        (10.5, "10.5"),
        (nan, "nan"),
        (inf, "inf"),
        (-inf, "-inf"),
        (10**400, "a number with more than 15 digits"),
        pytest.param(-(10**5000), "a number with more than 15 digits", id="5000 digits"),
    ],
)
def test_values_outside_the_range_are_refused(value, text):
    with pytest.raises(ContextReadyError) as error:
        check_range("x", value, 1, 10)
    assert str(error.value) == f"x must be between 1 and 10, but got {text}."


def test_counts_name_the_limit_that_is_broken():
    check_count("steps", 1, 1, 1000)
    check_count("steps", 1000, 1, 1000)
    with pytest.raises(ContextReadyError, match=r"^steps must be at least 1, but got 0\.$"):
        check_count("steps", 0, 1, 1000)
    with pytest.raises(ContextReadyError, match=r"^steps must be at most 1,000, but got 1001\.$"):
        check_count("steps", 1001, 1, 1000)
    with pytest.raises(ContextReadyError, match="but got a number with more than 15 digits"):
        check_count("steps", 10**5000, 1, 1000)


def test_memory_is_compared_before_anything_is_allocated(monkeypatch):
    monkeypatch.setattr(limits, "total_memory", lambda: 8 * 10**9)
    check_memory(8 * 10**9, "The model", "make it smaller.")
    with pytest.raises(ContextReadyError) as error:
        check_memory(8 * 10**9 + 10**8, "The model", "make it smaller.")
    assert str(error.value) == ("The model would take 8.1 GB, but this machine has 8.0 GB of memory; make it smaller.")
    with pytest.raises(ContextReadyError, match="more than a billion GB"):
        check_memory(10**400, "The model", "make it smaller.")
    monkeypatch.setattr(limits, "total_memory", lambda: None)
    check_memory(10**400, "The model", "make it smaller.")


def test_the_memory_of_this_machine_is_known():
    assert 2**28 < total_memory() < 2**50


def test_the_limit_of_the_process_counts():
    program = "from contextready.formats.limits import total_memory; print(total_memory())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30)),
    )
    assert int(done.stdout) == 2**30


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (5, "5"),
        (-5, "-5"),
        (True, "True"),
        (None, "None"),
        (4.5, "4.5"),
        ("word", "word"),
        ([1, 2], "[1, 2]"),
        (10**15, "a number with more than 15 digits"),
        ("x" * 100, "x" * 59 + "…"),
        ([10**5000], "a list with a very long number"),
        (list(range(1000)), str(list(range(1000)))[:59] + "…"),
    ],
)
def test_a_wrong_value_is_shown_shortly(value, text):
    assert shown(value) == text


@pytest.mark.parametrize(("size", "text"), [(0, "0.0 GB"), (1_550_000_000, "1.5 GB"), (10**13, "10,000.0 GB")])
def test_sizes_are_shown_in_gigabytes(size, text):
    assert gigabytes(size) == text
