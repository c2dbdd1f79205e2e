"""The number of threads with which ggml steps a model fastest."""

import ctypes
from functools import lru_cache
from typing import Any

import numpy as np

from contextready.infer.ggml.tensors import new_context, new_tensor, point
from contextready.infer.threads import available_cores, fastest_threads, matrices


@lru_cache
def ggml_threads(ggml: Any, width: int) -> int:
    """The number of threads for a model of this width; measured once per process, on products of this size."""
    most = available_cores()
    if most == 1:
        return 1
    count, size = matrices(width)
    weights = np.full((count, size, size), 1.0 / size, np.float32)
    outputs = np.ones((count + 1, size), np.float32)
    context = new_context(ggml, 3 * count, ggml.ggml_graph_overhead_custom(4 * count, False))
    try:
        graph = ggml.ggml_new_graph_custom(context, 4 * count, False)
        y = point(new_tensor(ggml, context, ggml.GGML_TYPE_F32, (1, size)), outputs[0].ctypes.data)
        for i in range(count):
            weight = point(new_tensor(ggml, context, ggml.GGML_TYPE_F32, (size, size)), weights[i].ctypes.data)
            y = point(ggml.ggml_mul_mat(context, weight, y), outputs[i + 1].ctypes.data)
        ggml.ggml_build_forward_expand(graph, y)

        def run(threads: int) -> None:
            plan = ggml.ggml_graph_plan(graph, threads, None)
            work = np.empty(max(1, plan.work_size), np.uint8)
            plan.work_data = ctypes.cast(work.ctypes.data, ctypes.POINTER(ctypes.c_uint8))
            ggml.ggml_graph_compute(graph, ctypes.byref(plan))

        return fastest_threads(run, most)
    finally:
        ggml.ggml_free(context)
