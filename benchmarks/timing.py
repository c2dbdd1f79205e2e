"""Timing for all benchmarks: calls take turns, so that noise affects them equally."""

import statistics
import time
from collections.abc import Callable


def interleaved_medians(calls: list[Callable[[], object]], rounds: int, warmups: int = 2) -> list[float]:
    """Median seconds of each call over rounds in which all calls take turns, after the warm-ups."""
    return [statistics.median(times) for times in _take_turns(calls, rounds, warmups)]


def median_ratio(one: Callable[[], object], other: Callable[[], object], rounds: int) -> tuple[float, float, float]:
    """Median seconds of both calls, and the median over rounds of one / other, since a slow moment affects both."""
    ours, theirs = _take_turns([one, other], rounds, warmups=2)
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    return statistics.median(ours), statistics.median(theirs), ratio


def _take_turns(calls: list[Callable[[], object]], rounds: int, warmups: int) -> list[list[float]]:
    for call in calls:
        for _ in range(warmups):
            call()
    seconds: list[list[float]] = [[] for _ in calls]
    for number in range(rounds):
        # Every other round runs in reverse order, so that no call always follows the same one.
        for i in range(len(calls)) if number % 2 == 0 else reversed(range(len(calls))):
            start = time.perf_counter()
            calls[i]()
            seconds[i].append(time.perf_counter() - start)
    return seconds
