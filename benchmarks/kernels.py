"""Measures the speed of ggml's matrix-vector products, from memory and from the caches: the limit of the ggml engine.

    python benchmarks/kernels.py

The product with a matrix in memory cannot be faster than memory, nor faster than the same product with a matrix in the
caches. The last line is one JSON line.
"""

import ctypes
import json
import statistics
import time

import ggml
import gguf
import numpy as np
import torch

from contextready.bench.race import BITS, bandwidth_probe

LARGE = (32_000, 2_048)
"""The head of D=1, C=2048: 262 MB in fp32."""
SMALL = (2_048, 1_024)
"""8 MB in fp32."""


def product(kind: str, shape: tuple[int, int], threads: int) -> tuple[float, float]:
    """GB/s and GMAC/s of y = W x, from the median time of many runs."""
    rows, columns = shape
    number = getattr(ggml, f"GGML_TYPE_{kind.upper()}")
    random = np.random.default_rng(0)
    weights = gguf.quantize(
        random.standard_normal(shape, dtype=np.float32), getattr(gguf.GGMLQuantizationType, kind.upper())
    )
    vector, result = random.standard_normal(columns, dtype=np.float32), np.zeros(rows, np.float32)
    params = ggml.ggml_init_params(mem_size=2**20, mem_buffer=None, no_alloc=True)
    context = ggml.ggml_init(params)
    W = ggml.ggml_new_tensor_2d(context, number, columns, rows)
    x = ggml.ggml_new_tensor_1d(context, ggml.GGML_TYPE_F32, columns)
    y = ggml.ggml_mul_mat(context, W, x)
    for tensor, array in ((W, weights), (x, vector), (y, result)):
        tensor.contents.data = ctypes.c_void_p(array.ctypes.data)
    graph = ggml.ggml_new_graph(context)
    ggml.ggml_build_forward_expand(graph, y)
    plan = ggml.ggml_graph_plan(graph, threads, None)
    work = np.empty(max(1, plan.work_size), np.uint8)
    plan.work_data = ctypes.cast(work.ctypes.data, ctypes.POINTER(ctypes.c_uint8))
    times = []
    for _ in range(5 + max(20, int(2e8 / (rows * columns)))):
        start = time.perf_counter()
        ggml.ggml_graph_compute(graph, ctypes.byref(plan))
        times.append(time.perf_counter() - start)
    ggml.ggml_free(context)
    seconds = statistics.median(times[5:])
    return rows * columns * BITS[kind] / 8e9 / seconds, rows * columns / 1e9 / seconds


def main() -> None:
    """Measure all types and print the results."""
    ggml.ggml_cpu_init()
    probe, found = bandwidth_probe(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        bandwidth = statistics.median(probe() for _ in range(5)) / 1e9
        print(f"{threads} threads: memory bandwidth {bandwidth:.1f} GB/s")
        for kind in BITS:
            (streamed, rate), (_, cached) = product(kind, LARGE, threads), product(kind, SMALL, threads)
            found.append({"threads": threads, "kind": kind, "GB/s": streamed, "GMAC/s": rate, "cached GMAC/s": cached})
            print(
                f"  {kind:5s} from memory {streamed:5.1f} GB/s = {rate:5.1f} GMAC/s; from the caches {cached:5.1f}; "
                f"limit set by memory {bandwidth * 8 / BITS[kind]:5.1f}"
            )
    print(json.dumps({"benchmark": "kernels", "products": found}))


if __name__ == "__main__":
    main()
