"""The state of a stream: everything that a context-ready model remembers between tokens, as an immutable value."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
from torch import Tensor

from contextready.errors import ContextReadyError
from contextready.files import staged_file
from contextready.formats.json_file import parse_json
from contextready.formats.limits import shown
from contextready.formats.record import Matches, read_record
from contextready.formats.safetensors_file import FLOATS, Header, load_tensors, read_header, save_tensors
from contextready.model.cache import Cache, CacheRecord, KVCache

FORMAT = "contextready-state-1"


@dataclass(frozen=True)
class StateRecord:
    """The metadata of a saved state; safetensors stores text only."""

    format: str
    history: Annotated[str, Matches("[0-9]{1,14}", "a whole number")]
    cache: str
    """JSON with the fields of a `CacheRecord`."""
    note: str = ""


@dataclass(frozen=True, eq=False)
class State:
    """The key-value cache and the vectors carried over from the newest positions. Never changed in place."""

    cache: Cache
    carried_BRC: Tensor
    """The vectors carried over from the newest 1 to history + 1 positions, newest last; starts as z_{-1} = 0."""
    history: int
    """How many positions the state can be rolled back after reading. Rolling back uses them up."""

    @property
    def position(self) -> int:
        """The number of tokens read so far."""
        return self.cache.position

    @property
    def batch_size(self) -> int:
        """The number of rows."""
        return self.carried_BRC.shape[0]

    @property
    def z_prev_B1C(self) -> Tensor:
        """z_{t-1}, from which the next token's correction is computed."""
        return self.carried_BRC[:, -1:]

    @property
    def nbytes(self) -> int:
        """The size of all tensors in bytes."""
        return self.cache.nbytes + self.carried_BRC.nbytes

    def advanced(self, carried_BTC: Tensor, cache: Cache) -> "State":
        """Return the state after T more tokens."""
        most = self.history + 1
        carried = torch.cat((self.carried_BRC, carried_BTC[:, -most:]), dim=1)[:, -most:]
        return replace(self, cache=cache, carried_BRC=carried)

    def clone(self) -> "State":
        """Return a copy that shares no memory."""
        return replace(self, cache=self.cache.clone(), carried_BRC=self.carried_BRC.clone())

    def select(self, rows: Sequence[int] | Tensor) -> "State":
        """Return the rows at these indices, in this order. Rows may be left out, reordered or repeated."""
        index = torch.as_tensor(rows, device=self.carried_BRC.device)
        if index.dim() != 1 or index.numel() == 0 or index.dtype not in (torch.int64, torch.int32):
            raise ContextReadyError("The rows to select must be a non-empty list of row indices.")
        if not bool(((index >= 0) & (index < self.batch_size)).all()):
            raise ContextReadyError(
                f"Row indices must be between 0 and {self.batch_size - 1}, but got {index.tolist()}."
            )
        return replace(self, cache=self.cache.select(index), carried_BRC=self.carried_BRC.index_select(0, index))

    def repeat(self, times: int) -> "State":
        """Return every row `times` times, with copies next to each other: 0, 0, 1, 1, …"""
        if times < 1:
            raise ContextReadyError(f"times must be at least 1, but got {times}.")
        return self.select(torch.arange(self.batch_size).repeat_interleave(times))

    def rollback(self, position: int) -> "State":
        """Return exactly the state after the first `position` tokens."""
        cache = self.cache.rollback(position)
        back, kept = self.position - position, self.carried_BRC.shape[1]
        if position == 0:
            carried = torch.zeros_like(self.carried_BRC[:, :1])
        elif back < kept:
            carried = self.carried_BRC[:, : kept - back]
        else:
            raise ContextReadyError(
                f"Cannot roll back {back} tokens, from position {self.position} to {position}: this state keeps "
                f"a history of {self.history}. Create it with a larger history."
            )
        return replace(self, cache=cache, carried_BRC=carried)

    def save(self, path: str | Path, note: str = "") -> None:
        """Save the state and a note to a safetensors file; an existing file is replaced only by a complete one."""
        tensors, meta = self.cache.to_tensors()
        tensors = {f"cache.{name}": tensor for name, tensor in tensors.items()} | {"carried": self.carried_BRC}
        header = {"format": FORMAT, "history": str(self.history), "cache": json.dumps(meta), "note": note}
        with staged_file(Path(path)) as staging:
            save_tensors(staging, tensors, header)

    @classmethod
    def load(cls, path: str | Path, device: str | torch.device = "cpu") -> "State":
        """Load a state that `save` wrote."""
        return cls.load_with_note(path, device)[0]

    @classmethod
    def load_with_note(cls, path: str | Path, device: str | torch.device = "cpu") -> tuple["State", str]:
        """Load a state and the note that was saved with it."""
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            raise ContextReadyError(f"The device '{device}' is not available: {error}.") from None
        path = Path(path)
        if not path.exists():
            raise ContextReadyError(f"There is no state file at {path}.")
        header = read_header(path)
        found = header.metadata.get("format", "unknown")
        if found != FORMAT:
            raise ContextReadyError(f"{path} is not a saved state: its format is {shown(found)} instead of {FORMAT}.")
        try:
            record, of_cache = _read_record(header)
        except ContextReadyError as error:
            reason = str(error).rstrip(".")
            raise ContextReadyError(f"The state at {path} is damaged ({reason}); save it again.") from None
        tensors = load_tensors(path, {name: info.shape for name, info in header.tensors.items()})
        kv = {name.removeprefix("cache."): tensor for name, tensor in tensors.items() if name != "carried"}
        cache = KVCache.from_tensors(kv, of_cache)
        state = cls(cache.to(torch.device(device)), tensors["carried"].to(device), int(record.history))
        return state, record.note


def _read_record(header: Header) -> tuple[StateRecord, CacheRecord]:
    """Check everything that a file says about a state, before its tensors are loaded."""
    record = read_record(StateRecord, header.metadata, "its header")
    shapes = {name: info.shape for name, info in header.tensors.items()}
    carried = shapes.pop("carried", ())
    if not all(name.startswith("cache.") for name in shapes):
        raise ContextReadyError("it holds tensors that are not part of a state")
    kv = {name.removeprefix("cache."): shape for name, shape in shapes.items()}
    of_cache = KVCache.read_record(parse_json(record.cache, "its cache"), kv, "its cache")
    rows = kv["0.k"][0]
    if len(carried) != 3 or carried[0] != rows or not 1 <= carried[1] <= int(record.history) + 1 or carried[2] < 1:
        raise ContextReadyError("its parts do not match")
    types = {info.dtype for info in header.tensors.values()}
    if len(types) != 1 or not types <= set(FLOATS):
        raise ContextReadyError("its tensors do not have one floating-point type")
    return record, of_cache
