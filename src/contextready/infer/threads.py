"""How many threads an engine uses by default: measured in milliseconds, because other programs may keep cores busy.

With two busy cores, two threads that wait for each other generated 3 tokens a second where one generated 300.
"""

import os
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache

ROUNDS = 7
FEWEST_ROUNDS = 3
ENOUGH = 0.05
"""Seconds after which no further round begins."""
WORTH = 0.9
"""More threads are used if they take at most this fraction of the time of fewer."""
HOPELESS = 4.0
"""Numbers of threads that twice took this many times as long as the best are not tried again."""
MOST_WIDTH, MOST_WEIGHTS = 1024, 1 << 22
FEWEST_MATRICES, MOST_MATRICES = 4, 16
"""What a measurement multiplies: at most 16 MB of weights in float32."""


def available_cores() -> int:
    """Number of cores that this process may use, at most the environment's OMP_NUM_THREADS."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(ValueError):
        count = min(count, max(1, int(os.environ.get("OMP_NUM_THREADS", count))))
    return count


def matrices(width: int) -> tuple[int, int]:
    """The number and the width of the square matrices that a measurement multiplies, for a model of this width.

    They are as wide as the model's, up to a limit that keeps the measurement short.
    """
    width = min(width, MOST_WIDTH)
    return max(FEWEST_MATRICES, min(MOST_MATRICES, MOST_WEIGHTS // width**2)), width


def fastest_threads(run: Callable[[int], object], most: int, clock: Callable[[], float] = time.perf_counter) -> int:
    """Measure `run(threads)` for 1, 2, 4, … and `most` threads, and return the number to use.

    The numbers take turns and medians are compared, so that a short disturbance decides nothing.
    """
    numbers = sorted({most, *(2**i for i in range(most.bit_length()))})
    if len(numbers) < 2:
        return 1
    times: dict[int, list[float]] = {number: [] for number in numbers}
    for number in numbers:
        run(number)  # starts threads and fills caches
    begun = clock()
    for round_ in range(ROUNDS):
        if round_ >= FEWEST_ROUNDS and clock() - begun > ENOUGH:
            break
        best = min((statistics.median(seconds) for seconds in times.values() if seconds), default=0.0)
        for number, seconds in times.items():
            if len(seconds) >= 2 and min(seconds) > HOPELESS * best:
                continue
            start = clock()
            run(number)
            seconds.append(clock() - start)
    chosen = 1
    for number in numbers:
        if statistics.median(times[number]) <= WORTH * statistics.median(times[chosen]):
            chosen = number
    return chosen


@lru_cache
def torch_threads(width: int) -> int:
    """The number of threads with which PyTorch steps a model of this width fastest; measured once per process."""
    import torch

    count, size = matrices(width)
    most, before = _most_torch_threads(), torch.get_num_threads()
    with torch.inference_mode():
        weights = [torch.full((size, size), 1.0 / size) for _ in range(count)]
        x_1C = torch.ones(1, size)

        def run(threads: int) -> None:
            torch.set_num_threads(threads)
            y_1C = x_1C
            for weight_CC in weights:
                y_1C = torch.nn.functional.linear(y_1C, weight_CC)

        try:
            return fastest_threads(run, most)
        finally:
            torch.set_num_threads(before)


@lru_cache
def _most_torch_threads() -> int:
    """The number of threads that PyTorch had before any measurement, which the user may have chosen."""
    import torch

    return min(available_cores(), torch.get_num_threads())
