"""How all benchmarks time: calls that take turns, so that noise hits all alike."""

import statistics
import time
from collections.abc import Callable


def interleaved_medians(calls: list[Callable[[], object]], rounds: int, warmups: int = 2) -> list[float]:
    """Seconds of each call: the median over rounds in which all take turns, after the warm-ups."""
    for call in calls:
        for _ in range(warmups):
            call()
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for times, call in zip(seconds, calls, strict=True):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in seconds]
