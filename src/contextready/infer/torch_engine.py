"""PyTorch engines: `eager` and `compiled` step in static buffers; other backbones are stepped by `StateEngine`."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from contextready.errors import ContextReadyError, nearest
from contextready.infer.captured import captured
from contextready.infer.engine import Engine, check_capacity, check_row
from contextready.infer.state_engine import StateEngine
from contextready.infer.torch_base import TorchEngine
from contextready.model.buffer import Places
from contextready.model.cache import KVCache
from contextready.model.context_ready import ContextReady
from contextready.model.some_rows import SomeRows, runs_of
from contextready.model.state import State
from contextready.model.transformer import Transformer
from contextready.solve.prefill import buffer_capacity, read_into
from contextready.solve.prompt_reader import PromptReader
from contextready.solve.reading import ReadInfo

CAPACITY_STEP = 256
"""Buffer sizes are multiples of this, so that engines of similar capacity share a compiled graph."""
RUNS = 64
"""Runs of neighbouring rows whose views of the buffer are kept."""


def torch_engine(
    model: ContextReady, name: str = "eager", *, rows: int = 1, capacity: int, history: int = 1, **reading: Any
) -> Engine:
    """Create an engine by name. A backbone without static buffers is stepped with its own cache.

    Every row can hold `capacity` tokens and be rolled back by `history` tokens. `reading` holds settings of
    `PromptReader`.
    """
    if name not in ("eager", "compiled"):
        raise ContextReadyError(f"Unknown torch engine '{name}'; {nearest(name, ('eager', 'compiled'))}")
    if rows < 1 or capacity < 1:
        raise ContextReadyError(f"rows and capacity must be at least 1, but got rows={rows} and capacity={capacity}.")
    reader, model = PromptReader(**reading), model.eval()
    if isinstance(model.backbone, Transformer):
        return BufferEngine(model, rows, capacity, history, reader, compiled=name == "compiled")
    if name == "compiled":
        raise ContextReadyError("This backbone has no static buffers to compile for; use the engine eager.")
    return StateEngine(model, rows, capacity, history, reader)


class BufferEngine(TorchEngine):
    """All rows in one static buffer, each at its own position, so shapes never change."""

    def __init__(
        self, model: ContextReady, rows: int, capacity: int, history: int, reader: PromptReader, compiled: bool = False
    ) -> None:
        super().__init__(model, rows, capacity, history, reader)
        assert isinstance(model.backbone, Transformer)
        self.backbone, window = model.backbone, model.backbone.config.window
        slots = -(-capacity // CAPACITY_STEP) * CAPACITY_STEP if window is None else window - 1 + max(history, 1)
        # A window overwrites its oldest positions, so such rows never fill up.
        self.capacity = None if window is not None else capacity
        with torch.no_grad():
            self.buffer = self.backbone.init_buffer(rows, slots)
            self.carried_BRC = next(model.backbone.parameters()).new_zeros(rows, history + 1, model.backbone.width)
            self.positions_B1 = torch.zeros(rows, 1, dtype=torch.int64, device=self.device)
        self.read_tokens = [0] * rows
        self.known = [1] * rows
        """How many of a row's newest carried vectors are valid; fewer after a rollback."""
        self.name = "compiled" if compiled else "eager"
        self._compiled = captured(self._step_active) if compiled else None
        self._run_of_rows = lru_cache(maxsize=RUNS)(self.buffer.run)

    def position(self, row: int) -> int:
        """Number of tokens that this row has read."""
        return self.read_tokens[row]

    def _step(self, rows: list[int], tokens: list[int]) -> Tensor:
        if self._compiled is not None:
            at_B1 = [[-1] for _ in range(self.rows)]
            for row, token in zip(rows, tokens, strict=True):
                at_B1[row] = [token]
            logits_RV = self._compiled(torch.tensor(at_B1, device=self.device))
            logits_RV = logits_RV if len(rows) == self.rows else logits_RV[rows]
        else:
            logits_RV = self._step_rows(rows, torch.tensor(tokens, device=self.device)[:, None])
        for row in rows:
            self.read_tokens[row] += 1
            self.known[row] = min(self.known[row], self.history) + 1
        return logits_RV

    @torch.no_grad()
    def state(self, row: int) -> State:
        """The state of a row, as a value that shares no memory with the engine."""
        check_row(row, self.rows)
        cache = self.buffer.cache(row, self.read_tokens[row], self.history)
        return State(cache, self.carried_BRC[row : row + 1, -self.known[row] :].clone(), self.history)

    @torch.no_grad()
    def load(self, row: int, state: State | None) -> None:
        """Continue a row from a state with one row; None starts before the first token."""
        state = self.checked(row, state)
        assert isinstance(state.cache, KVCache)
        check_capacity(self.capacity, state.position)
        self.buffer.load(row, state.cache)
        self._set(row, state.position, state.carried_BRC[0])

    def _set(self, row: int, position: int, carried_RC: Tensor) -> None:
        """Record the position of a row and the vectors that its newest positions carry over."""
        self.known[row] = known = min(len(carried_RC), self.history + 1)
        self.carried_BRC[row, -known:] = carried_RC[-known:]
        self.positions_B1[row] = position
        self.read_tokens[row] = position

    def _read(self, row: int, tokens_1T: Tensor) -> tuple[Tensor, ReadInfo]:
        """Solve the prompt inside the row's own part of the buffer, where its keys and values belong."""
        start, T, window = self.read_tokens[row], tokens_1T.shape[1], self.buffer.window
        end, place = start + T, self.buffer.row(row)
        if window is not None:
            # The ring of a window may be shorter than the prompt, so solve in a second buffer and copy the window.
            capacity = buffer_capacity(self.backbone, end, min(T, self.reader.chunk), self.history)
            place = self.backbone.init_buffer(1, capacity)
            place.copy_row(0, self.buffer, row, self.buffer.held(row, start, self.buffer.capacity))
        before_11C = self.carried_BRC[row : row + 1, -1:].clone()
        solved = read_into(
            self.model,
            tokens_1T,
            place,
            start,
            before_11C,
            reader=self.reader,
            early=self._early,
            keep=self.history + 1,
        )
        if window is not None:
            self.buffer.copy_row(row, place, 0, place.held(0, end, self.buffer.capacity))
        known_RC = self.carried_BRC[row, -self.known[row] :]
        self._set(row, end, torch.cat((known_RC, solved.carried_BTC[0])))
        return solved.z_BTC, solved.info

    def _step_rows(self, rows: list[int], tokens_R1: Tensor) -> Tensor:
        """Step some rows; every run of neighbouring rows attends to no more slots than the longest of them has used."""
        places = [self._places(first, end) for first, end in runs_of(rows)]
        if len(rows) == self.rows:
            chosen: Any = slice(None)
        else:
            chosen = torch.tensor(rows, device=self.device)
        carried_RKC = self.carried_BRC[chosen]
        logits_RV, newest_R1C = self._recur(
            tokens_R1, carried_RKC, places[0] if len(places) == 1 else SomeRows(tuple(places))
        )
        self.carried_BRC[chosen] = torch.cat((carried_RKC[:, 1:], newest_R1C), dim=1)
        self.positions_B1[chosen] += 1
        return logits_RV

    def _places(self, first: int, end: int) -> Places:
        """The places of the next token in each of these neighbouring rows."""
        longest = max(self.read_tokens[first:end]) + 1
        alone = end - first == 1 and self.buffer.window is None
        run = self._run_of_rows(first, end)
        return run.at(self.positions_B1[first:end], "all" if alone else "held", min(longest, run.capacity))

    def _step_active(self, tokens_B1: Tensor) -> Tensor:
        """Step the rows whose token is not -1, with the same shapes whichever they are."""
        active_B1 = tokens_B1 >= 0
        places = self.buffer.at(self.positions_B1, active_B1=active_B1)
        logits_BV, newest_B1C = self._recur(tokens_B1.clamp(min=0), self.carried_BRC, places)
        moved_BRC = torch.cat((self.carried_BRC[:, 1:], newest_B1C), dim=1)
        self.carried_BRC.copy_(torch.where(active_B1[:, :, None], moved_BRC, self.carried_BRC))
        self.positions_B1.add_(active_B1)
        return logits_BV

    def _recur(self, tokens_R1: Tensor, carried_RKC: Tensor, places: Places | SomeRows) -> tuple[Tensor, Tensor]:
        """Logits after these tokens, and the vectors that they carry over."""
        result = self.model.recur(self.model.embed(tokens_R1), carried_RKC[:, -1:], places)
        return self.model.backbone.head(result.z_BTC)[:, 0], result.carried_BTC
