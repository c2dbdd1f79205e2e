"""The state of a stream: everything that a context-ready model remembers between tokens, as an immutable value."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from contextready.errors import ContextReadyError
from contextready.files import staged_file
from contextready.model.cache import Cache, KVCache

FORMAT = "contextready-state-1"


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
        from safetensors.torch import save_file

        tensors, meta = self.cache.to_tensors()
        tensors = {f"cache.{name}": tensor.contiguous() for name, tensor in tensors.items()}
        tensors["carried"] = self.carried_BRC.contiguous()
        header = {"format": FORMAT, "history": str(self.history), "cache": json.dumps(meta), "note": note}
        with staged_file(Path(path)) as staging:
            save_file(tensors, staging, metadata=header)

    @classmethod
    def load(cls, path: str | Path, device: str | torch.device = "cpu") -> "State":
        """Load a state that `save` wrote."""
        return cls.load_with_note(path, device)[0]

    @classmethod
    def load_with_note(cls, path: str | Path, device: str | torch.device = "cpu") -> tuple["State", str]:
        """Load a state and the note that was saved with it."""
        from safetensors import SafetensorError, safe_open

        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            raise ContextReadyError(f"The device '{device}' is not available: {error}.") from None
        try:
            with safe_open(path, framework="pt") as file:
                header = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except FileNotFoundError:
            raise ContextReadyError(f"There is no state file at {path}.") from None
        except (SafetensorError, OSError) as error:
            raise ContextReadyError(
                f"{path} is not a complete safetensors file ({error}); save the state again."
            ) from None
        if header.get("format") != FORMAT:
            raise ContextReadyError(
                f"{path} is not a saved state: its format is {header.get('format', 'unknown')} instead of {FORMAT}."
            )
        try:
            kv = {name.removeprefix("cache."): t for name, t in tensors.items() if name.startswith("cache.")}
            cache, carried_BRC = KVCache.from_tensors(kv, json.loads(header["cache"])), tensors["carried"]
            history = int(header["history"])
            B, R, _ = carried_BRC.shape
            if cache.batch_size != B or not 1 <= R <= history + 1:
                raise ValueError("its parts do not match")
        except (KeyError, ValueError, TypeError, IndexError) as error:
            raise ContextReadyError(f"The state at {path} is damaged ({error}); save it again.") from None
        state = cls(cache.to(torch.device(device)), carried_BRC.to(device), history)
        return state, header.get("note", "")
