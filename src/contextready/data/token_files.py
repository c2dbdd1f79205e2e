"""Reads existing token files as documents of ids: nanoGPT's .bin, and Megatron's .bin with .idx."""

import struct
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np

from contextready.data.shards import Ids
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
    header = struct.Struct("<QBQQ")
    with index.open("rb") as file:
        head = file.read(len(MEGATRON_MAGIC) + header.size)
        if not head.startswith(MEGATRON_MAGIC) or len(head) < len(MEGATRON_MAGIC) + header.size:
            raise ContextReadyError(f"{index} is not a Megatron index (its first bytes are wrong).")
        version, code, sequences, documents = header.unpack(head[len(MEGATRON_MAGIC) :])
        if version != 1 or code not in MEGATRON_TYPES:
            raise ContextReadyError(f"{index} is not supported: it has version {version} and type {code}.")
        lengths = np.fromfile(file, "<i4", sequences)
        offsets = np.fromfile(file, "<i8", sequences)
        bounds = np.fromfile(file, "<i8", documents)
    dtype = np.dtype(MEGATRON_TYPES[code])
    ids = _mapped(path, dtype.str)
    if len(bounds) < documents or (sequences and offsets[-1] // dtype.itemsize + lengths[-1] > len(ids)):
        raise ContextReadyError(f"{path} and {index} do not match: one of them is truncated. Copy both again.")
    for first, last in pairwise(bounds):
        if first == last:
            continue
        start, stop = offsets[first] // dtype.itemsize, offsets[last - 1] // dtype.itemsize + lengths[last - 1]
        yield ids[start:stop], int(stop - start) * dtype.itemsize


def _mapped(path: Path, dtype: str) -> Ids:
    size, width = path.stat().st_size, np.dtype(dtype).itemsize
    if size % width:
        raise ContextReadyError(
            f"{path} has {size:,} bytes, which is not a multiple of {width} (the size of an id); copy it again."
        )
    if size == 0:
        return np.empty(0, dtype)
    return np.memmap(path, dtype, "r")
