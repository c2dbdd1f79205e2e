"""The types in which the matrices of a file are written."""

import ctypes
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from contextready.errors import ContextReadyError, nearest
from contextready.extras import require

TYPES = ("f32", "f16", "q8_0", "q4_0", "q4_k")
BLOCKS = {"q8_0": 32, "q4_0": 32, "q4_k": 256}
"""The number of values in a row that are quantised together."""


def check_type(type: str) -> None:
    """Refuse an unknown type of matrices."""
    if type not in TYPES:
        raise ContextReadyError(f"Unknown type '{type}'; {nearest(type, TYPES)}")


def type_of(shape: tuple[int, ...], type: str) -> str:
    """The type in which a tensor is written if this one is requested."""
    if len(shape) == 1:
        return "f32"
    return "f16" if shape[-1] % BLOCKS.get(type, 1) else type


class Quantizer:
    """Converts tensors to the types of a file."""

    def __init__(self) -> None:
        self._gguf = require("gguf", "ggml")

    def number(self, type: str) -> Any:
        """GGUF's number of a type."""
        return self._gguf.GGMLQuantizationType[type.upper()]

    def size(self, shape: tuple[int, ...], type: str) -> int:
        """Bytes of a tensor."""
        return prod(self._gguf.quant_shape_to_byte_shape(shape, self.number(type)))

    def convert(self, values: npt.NDArray[np.float32], type: str) -> npt.NDArray[Any]:
        """Convert a tensor, whose rows must be whole blocks."""
        if type == "q4_k":
            return self._by_ggml(values, type)
        converted: npt.NDArray[Any] = self._gguf.quantize(values, self.number(type))
        return converted

    def _by_ggml(self, values: npt.NDArray[np.float32], type: str) -> npt.NDArray[np.uint8]:
        """Convert with ggml, because the package gguf can only read this type."""
        ggml, (rows, length) = require("ggml", "ggml"), values.shape
        out = np.empty(self.size(values.shape, type), np.uint8)
        source = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        ggml.ggml_quantize_chunk(int(self.number(type)), source, out.ctypes.data, 0, rows, length, None)
        return out.reshape(rows, -1)
