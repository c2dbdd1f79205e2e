"""The engine for exported models: ggml on the CPU, without torch."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from contextready.errors import ContextReadyError
from contextready.extras import require
from contextready.infer.engine import Logits, check_capacity, check_ids, check_step
from contextready.infer.ggml.file import Exported, read_gguf
from contextready.infer.ggml.graph import Buffers, StepGraph, Weights, frequencies, inverse_angles
from contextready.model.macs import attention_macs_of, block_macs, correction_macs
from contextready.solve.reading import ReadInfo

if TYPE_CHECKING:
    from contextready.model.state import State

BUCKET = 256
"""Attention looks at the slots in use, rounded up to this many, so a graph serves this many steps."""
GRAPHS = 16
"""Graphs kept for use again."""


class GgmlEngine:
    """Rows of an exported model; all read their tokens in one step, for which the weights are read once.

    `capacity` is how many tokens a row can hold, by default as many as the model was trained on; a model with an
    attention window holds the window and has no limit. `threads` is by default all that this process may use.
    """

    name = "ggml"

    def __init__(
        self, path: str | Path, rows: int = 1, capacity: int | None = None, threads: int | None = None
    ) -> None:
        for name, value in (("rows", rows), ("capacity", capacity), ("threads", threads)):
            if value is not None and value < 1:
                raise ContextReadyError(f"{name}={value} is too small; give at least 1.")
        self.exported: Exported = read_gguf(path)
        self.config = c = self.exported.config
        self.rows, self.vocab_size = rows, c.vocab_size
        self.threads = threads or _cores()
        self.capacity = None if c.window is not None else capacity or self.exported.trained_length
        self._ggml = require("ggml", "ggml")
        self._ggml.ggml_cpu_init()
        self._slots = self.capacity or c.window or 1
        try:
            self._buffers = Buffers.empty(c, rows, self._slots)
        except MemoryError:
            raise ContextReadyError(
                f"There is not enough memory for {rows} rows of {self._slots:,} tokens; give a smaller --context."
            ) from None
        self._before_RC = np.zeros((rows, c.width), np.float32)
        self._frequencies_E = frequencies(c)
        self._known = [1] * rows
        self._positions = [0] * rows
        self._held = [0] * rows
        self._graphs: dict[tuple[int, int, int, bool], StepGraph] = {}
        self._weights: Weights | None = Weights(self._ggml, self.exported)

    def position(self, row: int) -> int:
        """Tokens this row has read."""
        return self._positions[row]

    def read(self, row: int, tokens: Sequence[int]) -> tuple[Logits, ReadInfo]:
        """Read a prompt into a row one by one, which is exact; logits (V,) after its last token."""
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
        """Read one token in every row; logits (rows, V)."""
        check_step(tokens, self.rows, self.vocab_size)
        check_capacity(self.capacity, max(self._positions) + 1)
        self._run(0, tokens, head=True)
        return self._buffers.logits_RV.copy()

    def state(self, row: int) -> "State":
        """The state of a row, as `stream` with a history of 1 gives it."""
        import torch

        from contextready.model.cache import KVCache
        from contextready.model.state import State

        c, position, held = self.config, self._positions[row], self._held[row]
        order_S = np.arange(position - held, position) % self._slots
        # Indexing with an array copies, so nothing of this engine is shared.
        kv = [torch.from_numpy(kv[row][:, order_S]) for kv in self._buffers.kv]
        layers = tuple((both[None, : c.heads].clone(), both[None, c.heads :].clone()) for both in kv)
        newest = np.stack((self._before_RC[row], self._buffers.carried_RC[row]))[-self._known[row] :]
        return State(KVCache(layers, position, c.window, c.window), torch.from_numpy(newest)[None], history=1)

    def load(self, row: int, state: "State | None") -> None:
        """Continue a row from a state of one row; none: from before the first token."""
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

    def close(self) -> None:
        """Free what ggml holds; the engine cannot be used after it."""
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()
        if self._weights is not None:
            self._weights.close()
            self._weights = None

    def _run(self, first: int, tokens: Sequence[int], head: bool) -> None:
        """One step of the rows from `first` on, one for each token."""
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
        """The graph of such a step, made when it is first needed."""
        if self._weights is None:
            raise ContextReadyError("This engine was closed; make a new one.")
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
        """Refuse a row that is not there, whose memory ggml would write to all the same."""
        if not 0 <= row < self.rows:
            raise ContextReadyError(f"There is no row {row}; this engine has rows 0 to {self.rows - 1}.")

    def _check_state(self, state: "State") -> None:
        """Refuse a state that this model cannot continue."""
        from contextready.model.cache import KVCache
        from contextready.model.state import State

        c = self.config
        if not isinstance(state, State) or not isinstance(state.cache, KVCache):
            raise ContextReadyError("This is not a state of this kind of model; take one from an engine or init_state.")
        theirs = (*state.cache.shape, state.carried_BRC.shape[2])
        ours = (c.layers, c.heads, c.head_size, c.window, c.width)
        if theirs != ours:
            raise ContextReadyError(
                f"This state is of another model (layers, heads, head size, window, width: {theirs} instead of {ours})."
            )
        if state.batch_size != 1:
            raise ContextReadyError(f"This state holds {state.batch_size} rows; select one of them.")
        check_capacity(self.capacity, state.position)


def _cores() -> int:
    """Cores this process may use, where the system can tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
