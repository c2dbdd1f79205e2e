"""GGUF files: metadata fields and memory-mapped tensors.

Every count, length and offset is compared with the size of the file before anything is read or allocated.
"""

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from contextready.errors import ContextReadyError
from contextready.formats.regular import regular_size

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MOST_FIELDS = 1 << 16
"""Real files have about a hundred."""
MOST_TENSORS = 1 << 16
"""Large mixtures of experts have some ten thousand."""
MOST_ITEMS = 1 << 24
"""Items of all arrays together; the longest real ones are lists of merges, with some hundred thousand."""
LARGEST_HEADER = 1 << 28
"""Bytes of everything before the tensors' data; the largest real ones contain tokenizers of some ten MB."""
LONGEST_NAME = 1 << 16
"""Bytes of a key or of a tensor's name."""
MOST_DIMENSIONS = 4
ALIGNMENT_KEY = "general.alignment"
ALIGNMENT = 32
"""The default alignment of tensor data."""
ALIGNMENTS = tuple(1 << power for power in range(3, 17))

# Codes of the types of metadata values.
BOOL, STRING, ARRAY = 7, 8, 9
SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    BOOL: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}

TENSOR_TYPES = {
    0: ("f32", 1, 4),
    1: ("f16", 1, 2),
    2: ("q4_0", 32, 18),
    3: ("q4_1", 32, 20),
    6: ("q5_0", 32, 22),
    7: ("q5_1", 32, 24),
    8: ("q8_0", 32, 34),
    9: ("q8_1", 32, 40),
    10: ("q2_k", 256, 84),
    11: ("q3_k", 256, 110),
    12: ("q4_k", 256, 144),
    13: ("q5_k", 256, 176),
    14: ("q6_k", 256, 210),
    15: ("q8_k", 256, 292),
    16: ("iq2_xxs", 256, 66),
    17: ("iq2_xs", 256, 74),
    18: ("iq3_xxs", 256, 98),
    19: ("iq1_s", 256, 50),
    20: ("iq4_nl", 32, 18),
    21: ("iq3_s", 256, 110),
    22: ("iq2_s", 256, 82),
    23: ("iq4_xs", 256, 136),
    24: ("i8", 1, 1),
    25: ("i16", 1, 2),
    26: ("i32", 1, 4),
    27: ("i64", 1, 8),
    28: ("f64", 1, 8),
    29: ("iq1_m", 256, 56),
    30: ("bf16", 1, 2),
    34: ("tq1_0", 256, 54),
    35: ("tq2_0", 256, 66),
    39: ("mxfp4", 32, 17),
    40: ("nvfp4", 64, 36),
    41: ("q1_0", 128, 18),
}
"""Per code: the type's name, the number of values in a block, and the bytes of a block."""
ARRAY_TYPES = {"f32": "<f4", "f16": "<f2", "f64": "<f8", "i8": "<i1", "i16": "<i2", "i32": "<i4", "i64": "<i8"}
"""Types that numpy knows; the data of all others are bytes."""


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of a file."""

    type: str
    """Lower-case name, such as q8_0."""
    shape: tuple[int, ...]
    """Rows first; the file lists the innermost dimension first."""
    data: npt.NDArray[Any]
    """A view of the memory map: of this shape if numpy knows the type, and otherwise with a row's bytes in its last
    dimension."""


@dataclass(frozen=True)
class GgufFile:
    """The contents of a file."""

    fields: dict[str, Any]
    """Metadata: plain numbers, booleans and strings, and lists of them."""
    tensors: dict[str, GgufTensor]


def read_gguf_file(path: Path) -> GgufFile:
    """Read the fields of a file and map its tensors into memory."""
    return _Reader(path).read()


class _Reader:
    """Reads a file from front to back. `at` is the position of the next byte; the header must end before `end`."""

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, regular_size(path)
        try:
            with path.open("rb") as file:
                magic = file.read(len(MAGIC))
            if magic != MAGIC:
                raise ContextReadyError(f"{path} is not a GGUF file; export or download it again.")
            self.bytes: npt.NDArray[np.uint8] = np.memmap(path, np.uint8, "r").view(np.ndarray)
        except OSError as error:
            raise ContextReadyError(f"{path} cannot be read: {error}.") from None
        # The file may have changed since its size was read.
        self.size = len(self.bytes)
        self.view = memoryview(self.bytes)  # type: ignore[arg-type]  # numpy arrays are buffers
        self.end = min(self.size, LARGEST_HEADER)
        self.at, self.items = len(MAGIC), 0

    def read(self) -> GgufFile:
        (version,) = self.unpack("<I", "its header")
        if version not in VERSIONS:
            raise ContextReadyError(
                f"{self.path} is not a little-endian GGUF file of version 2 or 3; export or download it again."
            )
        tensors, fields = self.unpack("<QQ", "its header")
        # The shortest field has an empty key, a type and one byte; the shortest tensor has one dimension.
        self.check_count(fields, 8 + 4 + 1, "fields", MOST_FIELDS)
        self.check_count(tensors, 8 + 4 + 8 + 4 + 8, "tensors", MOST_TENSORS)
        values: dict[str, Any] = {}
        for _ in range(fields):
            key = self.name("key")
            if key in values:
                self.refuse(f"the key {key[:64]} appears twice")
            (code,) = self.unpack("<I", "its fields")
            values[key] = self.array(key) if code == ARRAY else self.values(code, 1, key)[0]
        descriptions = self.descriptions(tensors)
        return GgufFile(values, self.tensors(descriptions, self.alignment(values)))

    def descriptions(self, count: int) -> dict[str, tuple[tuple[int, ...], int, int]]:
        """Shape, type and offset of every tensor."""
        found: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(count):
            name = self.name("tensor name")
            if name in found:
                self.refuse(f"the tensor {name[:64]} appears twice")
            (dimensions,) = self.unpack("<I", "its tensors")
            if not 1 <= dimensions <= MOST_DIMENSIONS:
                self.refuse(f"the tensor {name[:64]} has {dimensions} dimensions")
            shape = tuple(reversed(self.unpack(f"<{dimensions}Q", "its tensors")))
            code, offset = self.unpack("<IQ", "its tensors")
            found[name] = shape, code, offset
        return found

    def tensors(self, descriptions: dict[str, tuple[tuple[int, ...], int, int]], alignment: int) -> dict[str, Any]:
        """Map the tensors, which must lie inside the file and not overlap."""
        start = -(-self.at // alignment) * alignment
        tensors, places = {}, []
        for name, (shape, code, offset) in descriptions.items():
            if code not in TENSOR_TYPES:
                self.refuse(f"the tensor {name[:64]} has the unknown type {code}")
            type, block, block_bytes = TENSOR_TYPES[code]
            if 0 in shape or shape[-1] % block:
                self.refuse(f"the tensor {name[:64]} of type {type} has shape {shape}")
            row = shape[-1] // block * block_bytes
            first, size = start + offset, prod(shape[:-1]) * row
            if offset % alignment or first + size > self.size:
                self.refuse(f"the data of the tensor {name[:64]} are not inside the file")
            data = self.bytes[first : first + size]
            known = ARRAY_TYPES.get(type)
            data = data.reshape(*shape[:-1], row) if known is None else data.view(known).reshape(shape)
            tensors[name] = GgufTensor(type, shape, data)
            places.append((first, first + size, name))
        end = 0
        for first, after, name in sorted(places):
            if first < end:
                self.refuse(f"the data of the tensor {name[:64]} overlap with another tensor's")
            end = after
        return tensors

    def alignment(self, fields: dict[str, Any]) -> int:
        value = fields.get(ALIGNMENT_KEY, ALIGNMENT)
        if type(value) is not int or value not in ALIGNMENTS:
            self.refuse(f"its alignment of {str(value)[:20]} is not a power of two from 8 to 65,536")
        return value

    def array(self, key: str) -> list[Any]:
        code, count = self.unpack("<IQ", f"the field {key[:64]}")
        if code == ARRAY:
            self.refuse(f"the field {key[:64]} is an array of arrays")
        return self.values(code, count, key)

    def values(self, code: int, count: int, key: str) -> list[Any]:
        """Values of one type that follow each other."""
        self.items += count
        if self.items > MOST_ITEMS:
            self.refuse(f"its fields claim to have {self.items:,} items")
        if code == STRING:
            self.check_count(count, 8, f"strings in the field {key[:64]}")
            return [self.text(f"the field {key[:64]}", LARGEST_HEADER) for _ in range(count)]
        if code not in SCALARS:
            self.refuse(f"the field {key[:64]} has the unknown type {code}")
        dtype = np.dtype(SCALARS[code])
        self.check_count(count, dtype.itemsize, f"items in the field {key[:64]}")
        taken = self.bytes[self.at : self.at + count * dtype.itemsize]
        self.at += len(taken)
        if code == BOOL and taken.max(initial=0) > 1:
            self.refuse(f"the field {key[:64]} is neither true nor false")
        values: list[Any] = taken.view(dtype).tolist()
        return values

    def name(self, what: str) -> str:
        return self.text(f"a {what}", LONGEST_NAME)

    def text(self, what: str, longest: int) -> str:
        (length,) = self.unpack("<Q", what)
        if length > min(longest, self.end - self.at):
            self.refuse(f"{what} is too long")
        self.at += length
        try:
            return str(self.view[self.at - length : self.at], "utf-8")
        except UnicodeDecodeError:
            self.refuse(f"{what} is not UTF-8 text")

    def unpack(self, format: str, what: str) -> tuple[Any, ...]:
        length = struct.calcsize(format)
        if length > self.end - self.at:
            self.refuse(f"it ends inside {what}")
        self.at += length
        return struct.unpack_from(format, self.view, self.at - length)

    def check_count(self, count: int, least_bytes: int, what: str, most: int = MOST_ITEMS) -> None:
        """Refuse a count that the rest of the file cannot hold, or that is absurd."""
        if count > most or count * least_bytes > self.end - self.at:
            self.refuse(f"it claims to have {count:,} {what}")

    def refuse(self, why: str) -> NoReturn:
        raise ContextReadyError(
            f"{self.path} is damaged or incomplete: {why.encode('unicode_escape').decode()}. Export or copy it again."
        )
