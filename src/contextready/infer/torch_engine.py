"""Engines on PyTorch: `eager` and `compiled` step in static buffers, `StateEngine` serves any other backbone."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from contextready.errors import ContextReadyError, nearest
from contextready.infer.engine import Engine, Logits, check_capacity, check_ids, check_step
from contextready.model.cache import KVCache
from contextready.model.context_ready import ContextReady
from contextready.model.state import State
from contextready.model.transformer import Transformer
from contextready.solve.prefill import PromptReader, buffer_capacity, prefill, read_into
from contextready.solve.reading import ReadInfo

CAPACITY_STEP = 256
"""Buffers are made for a multiple of this many positions, so that engines of nearly the same length compile alike."""

COMPILED_SHAPES = 1024
"""Shapes for which steps may be compiled in one process."""


def torch_engine(
    model: ContextReady, name: str = "eager", *, rows: int = 1, capacity: int, history: int = 1, **reading: Any
) -> Engine:
    """The engine of this name; a backbone without fixed places for keys and values is stepped by its own cache.

    Every row can hold `capacity` tokens and be rolled back by `history`; `reading` are settings of `PromptReader`.
    """
    if name not in ("eager", "compiled"):
        raise ContextReadyError(f"'{name}' is no engine on torch; {nearest(name, ('eager', 'compiled'))}")
    if rows < 1 or capacity < 1:
        raise ContextReadyError(f"An engine needs at least 1 row and capacity for 1 token, not {rows} and {capacity}.")
    reader, model = PromptReader(**reading), model.eval()
    if isinstance(model.backbone, Transformer):
        return BufferEngine(model, rows, capacity, history, reader, compiled=name == "compiled")
    if name == "compiled":
        raise ContextReadyError("This backbone has no fixed places for keys and values to compile for; use eager.")
    return StateEngine(model, rows, capacity, history, reader)


class _TorchEngine(ABC):
    """What both have in common: one state in and out of each row, and how a prompt is read into it."""

    name = "eager"

    def __init__(self, model: ContextReady, rows: int, capacity: int, history: int, reader: PromptReader) -> None:
        self.model, self.rows, self.history, self.reader = model, rows, history, reader
        weight = next(model.backbone.parameters())
        self.device = weight.device
        self.capacity: int | None = capacity
        with torch.no_grad():
            z_11C = weight.new_zeros(1, 1, model.backbone.width)
            self.vocab_size: int = model.backbone.head(z_11C).shape[-1]

    @torch.no_grad()
    def read(self, row: int, tokens: Sequence[int]) -> tuple[Logits, ReadInfo]:
        """Read a prompt into a row, after what it has read already; logits (V,) after its last token."""
        check_ids(tokens, self.vocab_size)
        check_capacity(self.capacity, self.position(row) + len(tokens))
        z_11C, info = self._read(row, torch.tensor([list(tokens)], device=self.device))
        return _numpy(self.model.backbone.head(z_11C)[0, 0]), info

    @abstractmethod
    def _read(self, row: int, tokens_1T: Tensor) -> tuple[Tensor, ReadInfo]:
        """Read tokens into a row; the last one's z."""

    @abstractmethod
    def position(self, row: int) -> int:
        """Tokens this row has read."""

    @abstractmethod
    def state(self, row: int) -> State:
        """The state of a row, as a value that shares no memory with the engine."""

    @abstractmethod
    def load(self, row: int, state: State | None) -> None:
        """Continue a row from a state of one row; none: from before the first token."""

    def _checked(self, state: State | None) -> State:
        if state is None:
            return self.model.init_state(1, self.history)
        width, weight = self.model.backbone.width, next(self.model.backbone.parameters())
        self.model.check_state(state, weight.new_empty(1, 1, width))
        return state


class BufferEngine(_TorchEngine):
    """Every row in fixed places of one buffer, each at a position of its own: shapes never change."""

    def __init__(
        self, model: ContextReady, rows: int, capacity: int, history: int, reader: PromptReader, compiled: bool = False
    ) -> None:
        super().__init__(model, rows, capacity, history, reader)
        assert isinstance(model.backbone, Transformer)
        self.backbone, window = model.backbone, model.backbone.config.window
        slots = -(-capacity // CAPACITY_STEP) * CAPACITY_STEP if window is None else window - 1 + max(history, 1)
        # Old positions of a window are overwritten, so such rows never fill up.
        self.capacity = None if window is not None else capacity
        with torch.no_grad():
            self.buffer = self.backbone.init_buffer(rows, slots)
            self.carried_BRC = next(model.backbone.parameters()).new_zeros(rows, history + 1, model.backbone.width)
            self.positions_B1 = torch.zeros(rows, 1, dtype=torch.int64, device=self.device)
        self.read_tokens = [0] * rows
        self.known = [1] * rows
        """How many of a row's newest carried vectors are known: one that was rolled back has fewer."""
        self.name = "compiled" if compiled else "eager"
        self._step: Callable[[Tensor], Tensor] = _captured(self._next) if compiled else self._next_over_used_slots

    def position(self, row: int) -> int:
        """Tokens this row has read."""
        return self.read_tokens[row]

    @torch.no_grad()
    def step(self, tokens: Sequence[int]) -> Logits:
        """Read one token in every row; logits (rows, V)."""
        check_step(tokens, self.rows, self.vocab_size)
        check_capacity(self.capacity, max(self.read_tokens) + 1)
        logits_BV = self._step(torch.tensor(tokens, device=self.device)[:, None])
        self.read_tokens = [position + 1 for position in self.read_tokens]
        self.known = [min(known, self.history) + 1 for known in self.known]
        return _numpy(logits_BV)

    @torch.no_grad()
    def state(self, row: int) -> State:
        """The state of a row, as a value that shares no memory with the engine."""
        cache = self.buffer.cache(row, self.read_tokens[row], self.history)
        return State(cache, self.carried_BRC[row : row + 1, -self.known[row] :].clone(), self.history)

    @torch.no_grad()
    def load(self, row: int, state: State | None) -> None:
        """Continue a row from a state of one row; none: from before the first token."""
        state = self._checked(state)
        assert isinstance(state.cache, KVCache)
        check_capacity(self.capacity, state.position)
        self.buffer.load(row, state.cache)
        self._set(row, state.position, state.carried_BRC[0])

    def _set(self, row: int, position: int, carried_RC: Tensor) -> None:
        """Note where a row is and what its newest positions carry over."""
        self.known[row] = known = min(len(carried_RC), self.history + 1)
        self.carried_BRC[row, -known:] = carried_RC[-known:]
        self.positions_B1[row] = position
        self.read_tokens[row] = position

    def _read(self, row: int, tokens_1T: Tensor) -> tuple[Tensor, ReadInfo]:
        """Solve the prompt in the row's own part of the buffer, where its keys and values are to be."""
        start, T, window = self.read_tokens[row], tokens_1T.shape[1], self.buffer.window
        end, place = start + T, self.buffer.row(row)
        if window is not None:
            # A window's places are fewer than a prompt's, so it is solved beside them; only the window is copied.
            capacity = buffer_capacity(self.backbone, end, min(T, self.reader.chunk), self.history)
            place = self.backbone.init_buffer(1, capacity)
            place.copy_row(0, self.buffer, row, self.buffer.held(row, start, self.buffer.capacity))
        before_11C = self.carried_BRC[row : row + 1, -1:].clone()
        solved = read_into(self.model, tokens_1T, place, start, before_11C, reader=self.reader, keep=self.history + 1)
        if window is not None:
            self.buffer.copy_row(row, place, 0, place.held(0, end, self.buffer.capacity))
        known_RC = self.carried_BRC[row, -self.known[row] :]
        self._set(row, end, torch.cat((known_RC, solved.carried_BTC[0])))
        return solved.z_BTC, solved.info

    def _next_over_used_slots(self, tokens_B1: Tensor) -> Tensor:
        """Step without looking at slots that nothing was ever written to."""
        longest = max(self.read_tokens) + 1
        alone = self.rows == 1 and self.buffer.window is None
        return self._next(tokens_B1, "all" if alone else "held", min(longest, self.buffer.capacity))

    def _next(self, tokens_B1: Tensor, sees: Any = "held", visible: int | None = None) -> Tensor:
        e_B1C = self.model.backbone.embed(tokens_B1)
        places = self.buffer.at(self.positions_B1, sees, visible)
        result = self.model.recur(e_B1C, self.carried_BRC[:, -1:], places)
        self.carried_BRC.copy_(torch.cat((self.carried_BRC[:, 1:], result.carried_BTC), dim=1))
        self.positions_B1.add_(1)
        return self.model.backbone.head(result.z_BTC)[:, 0]


class StateEngine(_TorchEngine):
    """Any backbone, by its own cache: one state a row, rows one after the other."""

    def __init__(self, model: ContextReady, rows: int, capacity: int, history: int, reader: PromptReader) -> None:
        super().__init__(model, rows, capacity, history, reader)
        with torch.no_grad():
            self.states = [model.init_state(1, history) for _ in range(rows)]

    def position(self, row: int) -> int:
        """Tokens this row has read."""
        return self.states[row].position

    @torch.no_grad()
    def step(self, tokens: Sequence[int]) -> Logits:
        """Read one token in every row; logits (rows, V)."""
        check_step(tokens, self.rows, self.vocab_size)
        check_capacity(self.capacity, max(state.position for state in self.states) + 1)
        logits = []
        for row, token in enumerate(tokens):
            logits_11V, self.states[row] = self.model.stream(
                torch.tensor([[token]], device=self.device), self.states[row]
            )
            logits.append(_numpy(logits_11V[0, 0]))
        return np.stack(logits)

    def state(self, row: int) -> State:
        """The state of a row; states are values, so it is the engine's own."""
        return self.states[row]

    def load(self, row: int, state: State | None) -> None:
        """Continue a row from a state of one row; none: from before the first token."""
        self.states[row] = self._checked(state)

    def _read(self, row: int, tokens_1T: Tensor) -> tuple[Tensor, ReadInfo]:
        result = prefill(self.model, tokens_1T, self.states[row], **asdict(self.reader))
        self.states[row] = result.state
        return result.z_B1C, result.info


def _captured(step: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The step as one compiled graph; on CUDA recorded as well, so that a token is one launch."""
    compiled: Callable[[Tensor], Tensor] = torch.compile(step, fullgraph=True, dynamic=False)

    def run(tokens_B1: Tensor) -> Tensor:
        # Engines of one shape share a graph; of how many shapes there may be engines, PyTorch's usual 8 is no limit.
        with torch._dynamo.config.patch(recompile_limit=COMPILED_SHAPES):
            return compiled(tokens_B1)

    return run if not torch.cuda.is_available() else _Recorded(run)


class _Recorded:
    """A step recorded as a CUDA graph at its second call: the first compiles it."""

    def __init__(self, step: Callable[[Tensor], Tensor]) -> None:
        self.step, self.calls = step, 0

    def __call__(self, tokens_B1: Tensor) -> Tensor:
        self.calls += 1
        if tokens_B1.device.type != "cuda" or self.calls == 1:
            return self.step(tokens_B1)
        if self.calls == 2:
            self.tokens_B1, self.graph = tokens_B1.clone(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.logits_BV = self.step(self.tokens_B1)
        self.tokens_B1.copy_(tokens_B1)
        self.graph.replay()
        return self.logits_BV


def _numpy(logits: Tensor) -> Logits:
    values: Logits = logits.float().cpu().numpy()
    return values
