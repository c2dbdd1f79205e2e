"""ggml tensors whose data is elsewhere: in the memory map of a file, or in plain arrays."""

import ctypes
from typing import Any
from weakref import finalize

import numpy.typing as npt

from contextready.errors import ContextReadyError
from contextready.infer.ggml.file import Exported

Array = npt.NDArray[Any]

FLOAT = 4
"""Bytes of a float32."""


class Weights:
    """The tensors of a file as ggml tensors that point into the memory map."""

    def __init__(self, ggml: Any, exported: Exported) -> None:
        # The arrays own the memory map, so they are kept as long as ggml may read them.
        self._arrays = {name: _aligned(weight.data) for name, weight in exported.weights.items()}
        context = new_context(ggml, len(self._arrays))
        self.close = finalize(self, ggml.ggml_free, context)
        """Free ggml's memory; this also happens when the object is garbage-collected."""
        self._tensors = {}
        for name, weight in exported.weights.items():
            number = getattr(ggml, f"GGML_TYPE_{weight.type.upper()}")
            self._tensors[name] = point(new_tensor(ggml, context, number, weight.shape), self._arrays[name].ctypes.data)
        if exported.config.tied_embeddings:
            self._tensors["unembedding.weight"] = self._tensors["embedding.weight"]

    def __getitem__(self, name: str) -> Any:
        return self._tensors[name]

    def __contains__(self, name: str) -> bool:
        return name in self._tensors


def new_context(ggml: Any, tensors: int, more: int = 0) -> Any:
    """Create a ggml context that describes tensors but contains none of their data."""
    size = (tensors + 8) * ggml.ggml_tensor_overhead() + more
    context = ggml.ggml_init(ggml.ggml_init_params(mem_size=size, mem_buffer=None, no_alloc=True))
    if context is None:
        raise ContextReadyError("ggml could not start because there is not enough memory; free some memory.")
    return context


def new_tensor(ggml: Any, context: Any, type: int, shape: tuple[int, ...]) -> Any:
    """Describe a tensor, whose data is elsewhere."""
    sizes = (ctypes.c_int64 * len(shape))(*reversed(shape))
    return ggml.ggml_new_tensor(context, type, len(shape), sizes)


def point(tensor: Any, address: int) -> Any:
    """Let a tensor use the data at this address."""
    tensor.contents.data = ctypes.c_void_p(address)
    return tensor


def wrap(ggml: Any, context: Any, type: int, array: Array) -> Any:
    """Create a tensor over a numpy array, which the caller must keep alive."""
    return point(new_tensor(ggml, context, type, array.shape), array.ctypes.data)


def _aligned(array: Array) -> Array:
    """The array itself if ggml can read it in place, otherwise a copy."""
    return array if array.ctypes.data % 16 == 0 else array.copy()


def new_allocator(ggml: Any) -> Any:
    """Create the allocator that gives a graph's intermediate results memory and reuses it."""
    # The buffer type comes from a backend, because the binding of ggml_backend_cpu_buffer_type truncates its pointer.
    backend = ggml.ggml_backend_cpu_init()
    allocator = ggml.ggml_gallocr_new(ggml.ggml_backend_get_default_buffer_type(backend))
    ggml.ggml_backend_free(backend)
    return allocator


def free(ggml: Any, allocator: Any, context: Any) -> None:
    """Free a context and its allocator."""
    ggml.ggml_gallocr_free(allocator)
    ggml.ggml_free(context)
