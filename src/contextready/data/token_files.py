"""Reads existing token files as documents of ids: nanoGPT's .bin, and Megatron's .bin with .idx."""

import os
import struct
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from contextready.data.shards import Ids, map_ids
from contextready.errors import ContextReadyError

MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
MEGATRON_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
IDS_AT_ONCE = 1 << 22
"""How many ids are searched for end tokens at a time."""


def read_token_file(path: Path, end_id: int, advance: Callable[[int], None]) -> Iterator[Ids]:
    """Yield the documents of one .bin file, without their end tokens."""
    index = path.with_suffix(".idx")
    documents = _megatron(path, index) if index.is_file() else _nanogpt(path, end_id)
    for ids, size in documents:
        advance(size)
        yield ids[:-1] if len(ids) and ids[-1] == end_id else ids


def _nanogpt(path: Path, end_id: int) -> Iterator[tuple[Ids, int]]:
    """Read an array of little-endian uint16 in which end tokens separate the documents."""
    ids = _mapped(path, "<u2")
    start = 0
    for first in range(0, len(ids), IDS_AT_ONCE):
        for end in np.flatnonzero(ids[first : first + IDS_AT_ONCE] == end_id) + first:
            yield ids[start:end], 2 * (int(end) + 1 - start)
            start = int(end) + 1
    yield ids[start:], 2 * (len(ids) - start)


def _megatron(path: Path, index: Path) -> Iterator[tuple[Ids, int]]:
    """Read sequences of any integer type; the index holds lengths, byte offsets and document boundaries."""
    dtype, ends, bounds = _read_index(index)
    ids = _mapped(path, dtype.str)
    if ends[-1] > len(ids):
        raise _mismatch(path, index)
    for first, last in pairwise(bounds):
        start, stop = int(ends[first]), int(ends[last])
        if start < stop:
            yield ids[start:stop], (stop - start) * dtype.itemsize


def _read_index(index: Path) -> tuple[np.dtype[Any], Ids, Ids]:
    """The type of the ids, where each sequence ends (after a 0), and the sequence with which each document starts."""
    header = struct.Struct("<QBQQ")
    with index.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(len(MEGATRON_MAGIC) + header.size)
        if not head.startswith(MEGATRON_MAGIC) or len(head) < len(MEGATRON_MAGIC) + header.size:
            raise ContextReadyError(f"{index} is not a Megatron index (its first bytes are wrong).")
        version, code, sequences, documents = header.unpack(head[len(MEGATRON_MAGIC) :])
        if version != 1 or code not in MEGATRON_TYPES:
            raise ContextReadyError(f"{index} is not supported: it has version {version} and type {code}.")
        if len(head) + sequences * (4 + 8) + documents * 8 > size:
            raise _mismatch(index.with_suffix(".bin"), index)
        lengths = np.fromfile(file, "<i4", sequences)
        offsets = np.fromfile(file, "<i8", sequences)
        bounds = np.fromfile(file, "<i8", documents)
    dtype = np.dtype(MEGATRON_TYPES[code])
    ends = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, dtype=np.int64, out=ends[1:])
    # Megatron writes the sequences one after the other, without gaps, and every document is a range of them.
    if (lengths < 0).any() or not np.array_equal(offsets, ends[:-1] * dtype.itemsize):
        raise ContextReadyError(f"{index} is damaged: its sequences do not follow each other. Copy it again.")
    if len(bounds) and (bounds[0] < 0 or bounds[-1] > sequences or (bounds[1:] < bounds[:-1]).any()):
        raise ContextReadyError(f"{index} is damaged: its documents are not ranges of its sequences. Copy it again.")
    return dtype, ends, bounds


def _mismatch(path: Path, index: Path) -> ContextReadyError:
    return ContextReadyError(f"{path} and {index} do not match: one of them is truncated. Copy both again.")


def _mapped(path: Path, dtype: str) -> Ids:
    size, width = path.stat().st_size, np.dtype(dtype).itemsize
    if size % width:
        raise ContextReadyError(
            f"{path} has {size:,} bytes, which is not a multiple of {width} (the size of an id); copy it again."
        )
    if size == 0:
        return np.empty(0, dtype)
    return map_ids(path, np.dtype(dtype))
