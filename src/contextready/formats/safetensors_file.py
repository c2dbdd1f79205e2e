"""Safetensors files: the header is checked against the size of the file before any tensor is loaded."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from contextready.errors import ContextReadyError
from contextready.formats.json_file import parse_json
from contextready.formats.limits import check_memory
from contextready.formats.record import Count, check, one_line, read_record
from contextready.formats.regular import open_regular

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_HEADER = 100_000_000
"""Bytes; the format's own limit."""
MOST_DIMENSIONS = 32
BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
"""The size of a number of each type."""
FLOATS = ("F16", "BF16", "F32", "F64")
TORCH_TYPES = {
    **{"BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64"},
    **{"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"},
}
"""The types that are loaded; torch's names."""
METADATA = "__metadata__"


@dataclass(frozen=True)
class TensorInfo:
    """The entry of one tensor in a header."""

    dtype: str
    shape: tuple[Count, ...]
    data_offsets: tuple[Count, Count]
    """Where its numbers begin and end, counted in bytes from the end of the header."""


@dataclass(frozen=True)
class Header:
    """What a file says about its tensors: checked, and the file is exactly as long as it says."""

    path: Path
    start: int
    """Where the numbers begin, in bytes from the beginning of the file."""
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]

    @property
    def nbytes(self) -> int:
        """The size of all tensors in bytes."""
        return sum(info.data_offsets[1] - info.data_offsets[0] for info in self.tensors.values())

    def check_fits(self, expected: Mapping[str, Sequence[int]], dtypes: Iterable[str] = FLOATS) -> None:
        """Raise an error unless these are exactly the expected names and shapes, in one of these types."""
        wrong = sorted(
            name
            for name in expected.keys() | self.tensors.keys()
            if name not in expected
            or name not in self.tensors
            or self.tensors[name].shape != tuple(expected[name])
            or self.tensors[name].dtype not in dtypes
        )
        if wrong:
            raise ContextReadyError(
                f"The weights in {self.path} do not fit this model ({len(wrong):,} differ, for example "
                f"{one_line(wrong[0])})."
            )


def read_header(path: Path) -> Header:
    """Read and check the names, types, shapes and places of all tensors, without loading any."""
    with open_regular(path) as (file, size):
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8 or length > LARGEST_HEADER:
            _incomplete(path, f"its header would have {length:,} bytes" if size >= 8 else "it is too short")
        content = file.read(length)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        _incomplete(path, "its header is not UTF-8 text")
    entries = parse_json(text, f"The header of {path}", unique=True)
    if not isinstance(entries, dict):
        _incomplete(path, "its header is not a JSON object")
    metadata = check(entries.pop(METADATA, {}), dict[str, str], f"{path}, {METADATA},")
    tensors = {name: _read_info(path, name, entry) for name, entry in entries.items()}
    _check_places(path, tensors, size - 8 - length)
    return Header(path, 8 + length, tensors, metadata)


def load_tensors(
    path: Path, expected: Mapping[str, Sequence[int]] | None = None, dtypes: Iterable[str] = FLOATS
) -> "dict[str, Tensor]":
    """Load all tensors of a file on the CPU.

    If `expected` names tensors and their shapes, a file with other ones is refused before any of them is loaded. This
    does not use the reader of safetensors, because version 0.8 loses a little memory with every tensor that it reads.
    """
    header = read_header(path)
    if expected is not None:
        header.check_fits(expected, dtypes)
    check_memory(header.nbytes, f"Loading {path}", "use a machine with more memory.")
    import torch

    try:
        bytes_N = torch.from_file(str(path), shared=False, size=header.start + header.nbytes, dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        raise ContextReadyError(f"{path} could not be loaded: {one_line(error)}.") from error
    return {name: _numbers(path, name, info, bytes_N[header.start :]) for name, info in header.tensors.items()}


def save_tensors(path: Path, tensors: "Mapping[str, Tensor]", metadata: dict[str, str] | None = None) -> None:
    """Write tensors to a file. If that fails, nothing is left of it, and the error is one sentence."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata=metadata)
    except (SafetensorError, OSError) as error:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        raise ContextReadyError(f"{path} could not be written: {error}.") from error


def _numbers(path: Path, name: str, info: TensorInfo, bytes_N: "Tensor") -> "Tensor":
    """The numbers of one tensor, copied from the memory map, so that they are aligned and do not change with it."""
    import torch

    if info.dtype not in TORCH_TYPES:
        raise ContextReadyError(f"{path}, {one_line(name)}: numbers of the type {info.dtype} cannot be loaded.")
    dtype: torch.dtype = getattr(torch, TORCH_TYPES[info.dtype])
    first, end = info.data_offsets
    return bytes_N[first:end].clone().view(dtype).reshape(info.shape)


def _read_info(path: Path, name: str, entry: Any) -> TensorInfo:
    info = read_record(TensorInfo, entry, f"{path}, {one_line(name)}")
    if info.dtype not in BITS:
        _incomplete(path, f"{one_line(name)} has the unknown type {one_line(info.dtype)}")
    if len(info.shape) > MOST_DIMENSIONS:
        _incomplete(path, f"{one_line(name)} has {len(info.shape)} dimensions")
    begin, end = info.data_offsets
    if prod(info.shape) * BITS[info.dtype] != (end - begin) * 8:
        _incomplete(path, f"the size of {one_line(name)} does not match its shape")
    return info


def _check_places(path: Path, tensors: Mapping[str, TensorInfo], size: int) -> None:
    """The tensors follow each other without gaps or overlaps, and fill the file."""
    position = 0
    for name, info in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        begin, end = info.data_offsets
        if begin != position:
            _incomplete(path, f"{one_line(name)} does not begin where the tensor before it ends")
        position = end
    if position != size:
        _incomplete(path, f"its tensors take {position:,} bytes, but {size:,} follow the header")


def _incomplete(path: Path, why: str) -> NoReturn:
    raise ContextReadyError(f"{path} is not a complete safetensors file ({why}); save or copy it again.")
