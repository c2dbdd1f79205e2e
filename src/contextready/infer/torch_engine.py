"""PyTorch engines: `eager` and `compiled` step in static buffers; `StateEngine` works with any other backbone."""

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
"""Buffer sizes are multiples of this, so that engines of similar capacity share a compiled graph."""

COMPILED_SHAPES = 1024
"""Maximum number of shapes compiled in one process."""


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


class _TorchEngine(ABC):
    """What both engines share: a state in and out of each row, and how a prompt is read into it."""

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
        """Append a prompt to a row; returns logits (V,) after its last token."""
        check_ids(tokens, self.vocab_size)
        check_capacity(self.capacity, self.position(row) + len(tokens))
        z_11C, info = self._read(row, torch.tensor([list(tokens)], device=self.device))
        return _numpy(self.model.backbone.head(z_11C)[0, 0]), info

    @abstractmethod
    def _read(self, row: int, tokens_1T: Tensor) -> tuple[Tensor, ReadInfo]:
        """Read tokens into a row; returns z of the last one."""

    @abstractmethod
    def position(self, row: int) -> int:
        """Number of tokens that this row has read."""

    @abstractmethod
    def state(self, row: int) -> State:
        """The state of a row, as a value that shares no memory with the engine."""

    @abstractmethod
    def load(self, row: int, state: State | None) -> None:
        """Continue a row from a state with one row; None starts before the first token."""

    def copy_row(self, source: int, target: int) -> None:
        """Make one row continue from where another is."""
        self.load(target, self.state(source))

    def _checked(self, state: State | None) -> State:
        if state is None:
            return self.model.init_state(1, self.history)
        width, weight = self.model.backbone.width, next(self.model.backbone.parameters())
        self.model.check_state(state, weight.new_empty(1, 1, width))
        return state


class BufferEngine(_TorchEngine):
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
        self._step: Callable[[Tensor], Tensor] = _captured(self._next) if compiled else self._next_over_used_slots

    def position(self, row: int) -> int:
        """Number of tokens that this row has read."""
        return self.read_tokens[row]

    @torch.no_grad()
    def step(self, tokens: Sequence[int]) -> Logits:
        """Read one token in every row; returns logits (rows, V)."""
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
        """Continue a row from a state with one row; None starts before the first token."""
        state = self._checked(state)
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
        solved = read_into(self.model, tokens_1T, place, start, before_11C, reader=self.reader, keep=self.history + 1)
        if window is not None:
            self.buffer.copy_row(row, place, 0, place.held(0, end, self.buffer.capacity))
        known_RC = self.carried_BRC[row, -self.known[row] :]
        self._set(row, end, torch.cat((known_RC, solved.carried_BTC[0])))
        return solved.z_BTC, solved.info

    def _next_over_used_slots(self, tokens_B1: Tensor) -> Tensor:
        """Step without attending to slots that were never written."""
        longest = max(self.read_tokens) + 1
        alone = self.rows == 1 and self.buffer.window is None
        return self._next(tokens_B1, "all" if alone else "held", min(longest, self.buffer.capacity))

    def _next(self, tokens_B1: Tensor, sees: Any = "held", visible: int | None = None) -> Tensor:
        e_B1C = self.model.embed(tokens_B1)
        places = self.buffer.at(self.positions_B1, sees, visible)
        result = self.model.recur(e_B1C, self.carried_BRC[:, -1:], places)
        self.carried_BRC.copy_(torch.cat((self.carried_BRC[:, 1:], result.carried_BTC), dim=1))
        self.positions_B1.add_(1)
        return self.model.backbone.head(result.z_BTC)[:, 0]


class StateEngine(_TorchEngine):
    """Works with any backbone through its own cache: one state per row, and rows step one after the other."""

    def __init__(self, model: ContextReady, rows: int, capacity: int, history: int, reader: PromptReader) -> None:
        super().__init__(model, rows, capacity, history, reader)
        with torch.no_grad():
            self.states = [model.init_state(1, history) for _ in range(rows)]

    def position(self, row: int) -> int:
        """Number of tokens that this row has read."""
        return self.states[row].position

    @torch.no_grad()
    def step(self, tokens: Sequence[int]) -> Logits:
        """Read one token in every row; returns logits (rows, V)."""
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
        """The state of a row. States are immutable values, so no copy is needed."""
        return self.states[row]

    def load(self, row: int, state: State | None) -> None:
        """Continue a row from a state with one row; None starts before the first token."""
        self.states[row] = self._checked(state)

    def _read(self, row: int, tokens_1T: Tensor) -> tuple[Tensor, ReadInfo]:
        result = prefill(self.model, tokens_1T, self.states[row], **asdict(self.reader))
        self.states[row] = result.state
        return result.z_B1C, result.info


def _captured(step: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The step as one compiled graph, also recorded as a CUDA graph on CUDA, so that a token is one launch."""
    compiled: Callable[[Tensor], Tensor] = torch.compile(step, fullgraph=True, dynamic=False)

    def run(tokens_B1: Tensor) -> Tensor:
        # Engines of the same shape share a graph. PyTorch's default limit of 8 shapes is too low for many engines.
        with torch._dynamo.config.patch(recompile_limit=COMPILED_SHAPES):
            return compiled(tokens_B1)

    return run if not torch.cuda.is_available() else _Recorded(run)


class _Recorded:
    """A step that is compiled at its first call and recorded as a CUDA graph at its second."""

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
