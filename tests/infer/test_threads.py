"""The number of threads: measured, robust against a disturbance, and never more than there are cores."""

import os

import pytest
import torch

from contextready.infer import threads as measuring
from contextready.infer.threads import available_cores, fastest_threads, matrices, torch_threads


class Machine:
    """A simulated machine: the seconds that a run with so many threads takes, and a clock that they move."""

    def __init__(self, seconds, disturbed=()):
        self.seconds, self.disturbed, self.now, self.runs = seconds, set(disturbed), 0.0, []

    def run(self, threads):
        self.runs.append(threads)
        self.now += self.seconds[threads] * (50 if len(self.runs) in self.disturbed else 1)

    def choose(self, most):
        return fastest_threads(self.run, most, lambda: self.now)


@pytest.mark.parametrize(
    ("seconds", "most", "chosen"),
    [
        ({1: 1e-3, 2: 0.6e-3}, 2, 2),
        ({1: 1e-3, 2: 0.97e-3}, 2, 1),  # not worth a core
        ({1: 1e-3, 2: 100e-3}, 2, 1),  # the second core is busy
        ({1: 1e-3, 2: 0.5e-3, 4: 0.3e-3, 6: 0.25e-3}, 6, 6),
        ({1: 1e-3, 2: 0.5e-3, 4: 0.3e-3, 6: 0.29e-3}, 6, 4),
        ({1: 1e-3, 2: 1.1e-3, 4: 0.4e-3, 8: 30e-3}, 8, 4),
        ({1: 1.0, 2: 0.5}, 2, 2),
        ({}, 1, 1),
    ],
)
def test_the_fastest_number_is_chosen_and_more_threads_must_pay(seconds, most, chosen):
    assert Machine(seconds).choose(most) == chosen


def test_a_disturbance_decides_nothing():
    for disturbed in range(1, 16):
        assert Machine({1: 1e-3, 2: 0.6e-3}, [disturbed]).choose(2) == 2
        assert Machine({1: 1e-3, 2: 1.2e-3}, [disturbed, disturbed + 1]).choose(2) == 1


def test_hopeless_numbers_are_not_tried_again_and_again():
    machine = Machine({1: 1e-3, 2: 0.2})
    assert machine.choose(2) == 1
    assert machine.runs.count(2) == 3  # once to start the threads, and twice measured
    slow = Machine({1: 1.0, 2: 1.0})
    slow.choose(2)
    assert len(slow.runs) == 2 * (1 + measuring.FEWEST_ROUNDS)


def test_cores_are_those_of_the_process(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    every = available_cores()
    assert 1 <= every <= (os.cpu_count() or 1)
    for text, most in (("1", 1), ("100000", every), ("0", 1), ("many", every)):
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        assert available_cores() == most


@pytest.mark.parametrize("width", [1, 16, 256, 1088, 10**6])
def test_a_measurement_is_small(width):
    count, size = matrices(width)
    assert size <= width
    assert 4 <= count <= 16
    assert count * size**2 * 4 <= 4 * 4 * 1024**2


def test_a_measurement_leaves_torch_as_it_was(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    monkeypatch.setattr(measuring, "_most_torch_threads", lambda: min(2, available_cores()))
    torch_threads.cache_clear()
    before = torch.get_num_threads()
    chosen = torch_threads(16)
    assert 1 <= chosen <= available_cores()
    assert torch.get_num_threads() == before
    assert torch_threads(16) == chosen
    assert torch_threads.cache_info().hits == 1
    torch_threads.cache_clear()
