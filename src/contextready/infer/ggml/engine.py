"""The engine for exported models: runs them with ggml on the CPU, without torch."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from contextready.errors import ContextReadyError
from contextready.extras import require
from contextready.formats.limits import MOST_ROWS, check_count, check_memory
from contextready.infer.engine import Logits, check_capacity, check_ids, check_step, check_threads
from contextready.infer.ggml.file import LONGEST, Exported, ExportedConfig, read_gguf
from contextready.infer.ggml.graph import (
    FLOAT,
    NODE_BYTES,
    NODES_PER_ROW,
    Buffers,
    StepGraph,
    Weights,
    frequencies,
    inverse_angles,
)
from contextready.model.macs import attention_macs_of, block_macs, correction_macs
from contextready.solve.reading import ReadInfo

if TYPE_CHECKING:
    from contextready.model.state import State

BUCKET = 256
"""The number of slots that attention covers is rounded up to a multiple of this, so a graph serves many steps."""
GRAPHS = 16
"""Number of graphs kept for reuse."""


class GgmlEngine:
    """Runs an exported model with several rows; one step processes a token per row and reads the weights once.

    `capacity` is the number of tokens that a row can hold (default: the length of the training sequences). A model with
    an attention window holds only the window and has no limit. `threads` defaults to all cores available to this
    process.
    """

    name = "ggml"

    def __init__(
        self, path: str | Path, rows: int = 1, capacity: int | None = None, threads: int | None = None
    ) -> None:
        for name, value, most in (("rows", rows, MOST_ROWS), ("capacity", capacity, LONGEST)):
            if value is not None:
                check_count(name, value, 1, most)
        check_threads("threads", threads)
        self.exported: Exported = read_gguf(path)
        self.config = c = self.exported.config
        self.rows, self.vocab_size = rows, c.vocab_size
        self.threads = threads or _cores()
        self.capacity = None if c.window is not None else capacity or self.exported.trained_length
        self._ggml = require("ggml", "ggml")
        self._ggml.ggml_cpu_init()
        self._slots = self.capacity or c.window or 1
        what = f"{rows} {'rows' if rows > 1 else 'row'} of {self._slots:,} tokens"
        check_memory(state_bytes(c, rows, self._slots), what, "use a smaller --context or fewer --samples.")
        try:
            self._buffers = Buffers.empty(c, rows, self._slots)
        except MemoryError:
            raise ContextReadyError(
                f"There is not enough memory for {what}; use a smaller --context or fewer --samples."
            ) from None
        self._before_RC = np.zeros((rows, c.width), np.float32)
        self._frequencies_E = frequencies(c)
        self._known = [1] * rows
        self._positions = [0] * rows
        self._held = [0] * rows
        self._graphs: dict[tuple[int, int, int, bool], StepGraph] = {}
        self._weights: Weights | None = Weights(self._ggml, self.exported)

    def position(self, row: int) -> int:
        """Number of tokens that this row has read."""
        return self._positions[row]

    def read(self, row: int, tokens: Sequence[int]) -> tuple[Logits, ReadInfo]:
        """Read a prompt into a row, one token at a time, which is exact; returns logits (V,) after its last token."""
        self._check_row(row)
        check_ids(tokens, self.vocab_size)
        check_capacity(self.capacity, self.position(row) + len(tokens))
        c, start, begun = self.config, self._positions[row], time.perf_counter()
        for token in tokens[:-1]:
            self._run(row, [token], head=False)
        self._run(row, tokens[-1:], head=True)
        plain = len(tokens) * block_macs(c) + attention_macs_of(c, start, start + len(tokens))
        info = ReadInfo(
            solver="sequential",
            tokens=len(tokens),
            seconds=time.perf_counter() - begun,
            passes=1.0,
            macs=plain + len(tokens) * correction_macs(c.correction, c.width),
            plain_macs=plain,
            changes=(),
            exact=True,
        )
        return self._buffers.logits_RV[row].copy(), info

    def step(self, tokens: Sequence[int]) -> Logits:
        """Read one token per row; returns logits (rows, V)."""
        check_step(tokens, self.rows, self.vocab_size)
        check_capacity(self.capacity, max(self._positions) + 1)
        self._run(0, tokens, head=True)
        return self._buffers.logits_RV.copy()

    def state(self, row: int) -> "State":
        """The state of a row, as `stream` with a history of 1 returns it; needs torch."""
        try:
            import torch
        except ImportError:
            raise ContextReadyError(
                "The state of a row is made of torch tensors, and torch is not installed; install it with: pip install "
                "torch"
            ) from None
        from contextready.model.cache import KVCache
        from contextready.model.state import State

        c, position, held = self.config, self._positions[row], self._held[row]
        order_S = np.arange(position - held, position) % self._slots
        # Indexing with an array copies, so the state shares no memory with this engine.
        kv = [torch.from_numpy(kv[row][:, order_S]) for kv in self._buffers.kv]
        layers = tuple((both[None, : c.heads].clone(), both[None, c.heads :].clone()) for both in kv)
        newest = np.stack((self._before_RC[row], self._buffers.carried_RC[row]))[-self._known[row] :]
        return State(KVCache(layers, position, c.window, c.window), torch.from_numpy(newest)[None], history=1)

    def load(self, row: int, state: "State | None") -> None:
        """Continue a row from a state with one row; None resets it to before the first token."""
        self._check_row(row)
        if state is None:
            self._positions[row] = self._held[row] = 0
            self._buffers.carried_RC[row] = 0.0
            self._known[row] = 1
            return
        self._check_state(state)
        from contextready.model.cache import KVCache

        assert isinstance(state.cache, KVCache)
        position, held = state.position, min(state.cache.length, self._slots)
        order_S = np.arange(position - held, position) % self._slots
        for (k_BHSE, v_BHSE), kv in zip(state.cache.layers, self._buffers.kv, strict=True):
            both = (k_BHSE[0], v_BHSE[0])
            for part, heads in zip(both, (slice(self.config.heads), slice(self.config.heads, None)), strict=True):
                kv[row][heads, order_S] = part[:, part.shape[1] - held :].detach().float().cpu().numpy()
        carried_RC = state.carried_BRC[0, -2:].detach().float().cpu().numpy()
        self._buffers.carried_RC[row], self._before_RC[row] = carried_RC[-1], carried_RC[0]
        self._known[row] = carried_RC.shape[0]
        self._positions[row], self._held[row] = position, held

    def copy_row(self, source: int, target: int) -> None:
        """Make one row continue from where another is."""
        self._check_row(source)
        self._check_row(target)
        for array in (*self._buffers.kv, self._buffers.carried_RC, self._before_RC):
            array[target] = array[source]
        for counts in (self._known, self._positions, self._held):
            counts[target] = counts[source]

    def close(self) -> None:
        """Free ggml's memory; the engine cannot be used afterwards."""
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()
        if self._weights is not None:
            self._weights.close()
            self._weights = None

    def _run(self, first: int, tokens: Sequence[int], head: bool) -> None:
        """Run one step of the rows starting at `first`, one row per token."""
        buffers, rows = self._buffers, range(first, first + len(tokens))
        for row, token in zip(rows, tokens, strict=True):
            position = self._positions[row]
            buffers.tokens_R[row] = token
            buffers.slots_R[row] = position % self._slots
            buffers.inverse_angles_RE[row] = inverse_angles(self._frequencies_E, position)
        seen = [min(self._positions[row] + 1, self._slots) for row in rows]
        graph = self._graph(first, len(tokens), max(seen), head)
        for r, slots in enumerate(seen):
            graph.reveal(r, slots)
        self._before_RC[first : first + len(tokens)] = buffers.carried_RC[first : first + len(tokens)]
        graph.run()
        for row, slots in zip(rows, seen, strict=True):
            self._positions[row] += 1
            self._held[row] = min(self._held[row] + 1, slots)
            self._known[row] = 2

    def _graph(self, first: int, rows: int, slots: int, head: bool) -> StepGraph:
        """The graph of such a step, built when it is first needed."""
        if self._weights is None:
            raise ContextReadyError("This engine was closed; create a new one.")
        slots = min(-(-slots // BUCKET) * BUCKET, self._slots)
        key = (first, rows, slots, head)
        if key not in self._graphs:
            if len(self._graphs) >= GRAPHS:
                self._graphs.pop(next(iter(self._graphs))).close()
            self._graphs[key] = StepGraph(
                self._ggml,
                self.config,
                self._weights,
                self._buffers,
                first=first,
                rows=rows,
                slots=slots,
                head=head,
                threads=self.threads,
            )
        return self._graphs[key]

    def _check_row(self, row: int) -> None:
        """Refuse a row that does not exist, because ggml would write to its memory without a check."""
        if not 0 <= row < self.rows:
            raise ContextReadyError(f"There is no row {row}; this engine has rows 0 to {self.rows - 1}.")

    def _check_state(self, state: "State") -> None:
        """Refuse a state that this model cannot continue."""
        from contextready.model.cache import KVCache
        from contextready.model.state import State

        c = self.config
        if not isinstance(state, State) or not isinstance(state.cache, KVCache):
            raise ContextReadyError(
                "This is not a state of this kind of model; use one returned by an engine or by init_state."
            )
        theirs = (*state.cache.shape, state.carried_BRC.shape[2])
        ours = (c.layers, c.heads, c.head_size, c.window, c.width)
        if theirs != ours:
            raise ContextReadyError(
                f"This state belongs to another model (layers, heads, head size, window, width: {theirs} instead of "
                f"{ours})."
            )
        if state.batch_size != 1:
            raise ContextReadyError(f"This state has {state.batch_size} rows; select one of them.")
        check_capacity(self.capacity, state.position)


def state_bytes(config: ExportedConfig, rows: int, slots: int) -> int:
    """Bytes of memory for the rows of an engine: keys, values and masks, logits, and what describes a graph."""
    c = config
    row = FLOAT * (2 * c.layers * c.width + 1) * slots + FLOAT * c.vocab_size
    return rows * (row + NODE_BYTES * NODES_PER_ROW * (c.layers + 2))


def _cores() -> int:
    """Number of cores that this process may use, or of all cores if the system does not report that."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
