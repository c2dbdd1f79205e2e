"""The engine for exported models: runs them with ggml on the CPU, without torch."""

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from contextready.errors import ContextReadyError
from contextready.extras import require
from contextready.formats.limits import MOST_ROWS, check_count, check_memory
from contextready.infer.engine import Logits, check_capacity, check_ids, check_row, check_step, check_threads
from contextready.infer.ggml.buffers import Buffers, state_bytes
from contextready.infer.ggml.config import LONGEST
from contextready.infer.ggml.file import Exported, read_gguf
from contextready.infer.ggml.graph import StepGraph
from contextready.infer.ggml.prompt import WIDTH, PromptChunk, solve
from contextready.infer.ggml.rotation import frequencies, inverse_angles
from contextready.infer.ggml.tensors import Array, Weights
from contextready.infer.ggml.threads import ggml_threads
from contextready.solve.prompt_reader import PromptReader
from contextready.solve.reading import ReadInfo, joined

if TYPE_CHECKING:
    from contextready.model.state import State

BUCKET = 256
"""The number of slots that attention covers is rounded up to a multiple of this, so a graph serves many steps."""
GRAPHS = 16
"""Number of graphs kept for reuse."""
TRIALS = 3


class GgmlEngine:
    """Runs an exported model with several rows; one step processes a token per row and reads the weights once.

    `capacity` is the number of tokens that a row can hold (default: the length of the training sequences). A model with
    an attention window holds only the window and has no limit. `threads` defaults to the number that a measurement of
    milliseconds finds fastest. `reading` holds settings of `PromptReader`; prompts are read one token at a time unless
    they name another solver, and always in a model with a window.
    """

    name = "ggml"

    def __init__(
        self,
        path: str | Path,
        rows: int = 1,
        capacity: int | None = None,
        threads: int | None = None,
        **reading: Any,
    ) -> None:
        for name, value, most in (("rows", rows, MOST_ROWS), ("capacity", capacity, LONGEST)):
            if value is not None:
                check_count(name, value, 1, most)
        check_threads("threads", threads)
        self.reader = PromptReader(**{"solver": "sequential"} | reading)
        if self.reader.bf16_passes == "on":
            raise ContextReadyError("An exported file computes in its own precision; leave bf16_passes=on out.")
        self.exported: Exported = read_gguf(path)
        self.config = c = self.exported.config
        self.rows, self.vocab_size = rows, c.vocab_size
        self.capacity = None if c.window is not None else capacity or self.exported.trained_length
        self._ggml = require("ggml", "ggml")
        self._ggml.ggml_cpu_init()
        self.threads = threads or ggml_threads(self._ggml, c.width)
        self._slots = self.capacity or c.window or 1
        what = f"{rows} {'rows' if rows > 1 else 'row'} of {self._slots:,} tokens"
        places = rows if self.reader.solver == "sequential" else max(rows, WIDTH)
        check_memory(state_bytes(c, rows, self._slots, places), what, "use a smaller --context or fewer --samples.")
        try:
            self._buffers = Buffers.empty(c, rows, self._slots, places)
        except MemoryError:
            raise ContextReadyError(
                f"There is not enough memory for {what}; use a smaller --context or fewer --samples."
            ) from None
        self._carried_RC, self._before_RC = (np.zeros((rows, c.width), np.float32) for _ in range(2))
        self._frequencies_E = frequencies(c)
        self._known = [1] * rows
        self._positions = [0] * rows
        self._held = [0] * rows
        self._graphs: dict[tuple[int, int, bool, bool], StepGraph] = {}
        self._free: float | None = None
        self._weights: Weights | None = Weights(self._ggml, self.exported)

    def position(self, row: int) -> int:
        """Number of tokens that this row has read."""
        return self._positions[row]

    def read(self, row: int, tokens: Sequence[int]) -> tuple[Logits, ReadInfo]:
        """Append a prompt to a row; returns logits (V,) after its last token."""
        check_row(row, self.rows)
        check_ids(tokens, self.vocab_size)
        check_capacity(self.capacity, self.position(row) + len(tokens))
        begun, infos = time.perf_counter(), self._read(row, tokens[:-1])
        # The last token is a step, because the head is in its graph.
        infos.append(self._solved(row, tokens[-1:], head=True))
        return self._buffers.logits_PV[0].copy(), joined(infos, time.perf_counter() - begun)

    def append(self, row: int, tokens: Sequence[int]) -> ReadInfo:
        """Read tokens into a row as `read` does, without computing logits."""
        check_row(row, self.rows)
        check_ids(tokens, self.vocab_size)
        check_capacity(self.capacity, self.position(row) + len(tokens))
        begun = time.perf_counter()
        return joined(self._read(row, tokens), time.perf_counter() - begun)

    def _read(self, row: int, tokens: Sequence[int]) -> list[ReadInfo]:
        """Read tokens chunk by chunk."""
        # The slots of a window hold no more than one token needs, so its tokens are read one at a time.
        chunk = 1 if self.config.window is not None else self.reader.chunk
        return [self._solved(row, tokens[begin : begin + chunk]) for begin in range(0, len(tokens), chunk)]

    def _solved(self, row: int, tokens: Sequence[int], head: bool = False) -> ReadInfo:
        """Solve a chunk of a prompt in the row's own keys and values."""
        start, before_C = self._positions[row], self._carried_RC[row].copy()

        def compute(tokens: Sequence[int], positions: Sequence[int], carried_PC: Array | None) -> tuple[Array, Array]:
            self._run([row] * len(tokens), positions, tokens, carried_PC, head=head)
            return self._buffers.z_PC[: len(tokens)], self._buffers.carried_PC[: len(tokens)]

        def free() -> float:
            # What this writes is overwritten when the chunk is solved, so it must not be longer.
            most = min(WIDTH, len(tokens))
            return self._free_tokens(lambda count: compute(tokens[:count], range(start, start + count), None), most)

        chunk = PromptChunk(compute, tokens, start, before_C)
        info = solve(chunk, self.config, start, self.reader, free)
        newest = np.concatenate((before_C[None], chunk.carried_TC))[-2:]
        self._before_RC[row], self._carried_RC[row] = newest
        self._positions[row], self._known[row] = start + len(tokens), 2
        self._held[row] = min(self._held[row] + len(tokens), self._slots)
        return info

    def step(self, tokens: Sequence[int], rows: Sequence[int] | None = None) -> Logits:
        """Read one token in each of these rows, by default in all; returns logits (tokens, V)."""
        stepping = check_step(tokens, rows, self.rows, self.vocab_size)
        check_capacity(self.capacity, max(self._positions[row] for row in stepping) + 1)
        chosen = list(stepping)
        self._run(chosen, [self._positions[row] for row in chosen], tokens, self._carried_RC[chosen], head=True)
        self._before_RC[chosen] = self._carried_RC[chosen]
        self._carried_RC[chosen] = self._buffers.carried_PC[: len(chosen)]
        for row in chosen:
            self._positions[row] += 1
            self._held[row] = min(self._held[row] + 1, self._slots)
            self._known[row] = 2
        return self._buffers.logits_PV[: len(stepping)].copy()

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

        check_row(row, self.rows)
        c, position, held = self.config, self._positions[row], self._held[row]
        order_S = np.arange(position - held, position) % self._slots
        # Indexing with an array copies, so the state shares no memory with this engine.
        kv = [torch.from_numpy(kv[row][:, order_S]) for kv in self._buffers.kv]
        layers = tuple((both[None, : c.shared_heads].clone(), both[None, c.shared_heads :].clone()) for both in kv)
        newest = np.stack((self._before_RC[row], self._carried_RC[row]))[-self._known[row] :]
        return State(KVCache(layers, position, c.window, c.window), torch.from_numpy(newest)[None], history=1)

    def load(self, row: int, state: "State | None") -> None:
        """Continue a row from a state with one row; None resets it to before the first token."""
        check_row(row, self.rows)
        if state is None:
            self._positions[row] = self._held[row] = 0
            self._carried_RC[row] = 0.0
            self._known[row] = 1
            return
        self._check_state(state)
        from contextready.model.cache import KVCache

        assert isinstance(state.cache, KVCache)
        position, held, G = state.position, min(state.cache.length, self._slots), self.config.shared_heads
        order_S = np.arange(position - held, position) % self._slots
        for (k_BHSE, v_BHSE), kv in zip(state.cache.layers, self._buffers.kv, strict=True):
            both = (k_BHSE[0], v_BHSE[0])
            for part, heads in zip(both, (slice(G), slice(G, None)), strict=True):
                kv[row][heads, order_S] = part[:, part.shape[1] - held :].detach().float().cpu().numpy()
        carried_RC = state.carried_BRC[0, -2:].detach().float().cpu().numpy()
        self._carried_RC[row], self._before_RC[row] = carried_RC[-1], carried_RC[0]
        self._known[row] = carried_RC.shape[0]
        self._positions[row], self._held[row] = position, held

    def free(self, row: int) -> None:
        """Forget what a row has read."""
        self.load(row, None)

    def copy_row(self, source: int, target: int) -> None:
        """Make one row continue from where another is."""
        check_row(source, self.rows)
        check_row(target, self.rows)
        for array in (*self._buffers.kv, self._carried_RC, self._before_RC):
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

    def _run(
        self,
        rows: Sequence[int],
        positions: Sequence[int],
        tokens: Sequence[int],
        carried_PC: Array | None,
        *,
        head: bool,
    ) -> None:
        """Run the blocks on tokens at these positions of these rows; a row may occur more than once."""
        buffers, count = self._buffers, len(tokens)
        seen = [min(position + 1, self._slots) for position in positions]
        graph = self._graph(count, max(seen), head, carried_PC is not None)
        for place, (row, position) in enumerate(zip(rows, positions, strict=True)):
            buffers.slots_P[place] = position % self._slots
            buffers.inverse_angles_PE[place] = inverse_angles(self._frequencies_E, position)
            graph.point(place, row)
            graph.reveal(place, seen[place])
        buffers.tokens_P[:count] = tokens
        if carried_PC is not None:
            buffers.carried_PC[:count] = carried_PC
        graph.run()

    def _free_tokens(self, run: Callable[[int], object], most: int) -> float:
        """The number of tokens whose arithmetic takes as long as the fixed cost of a product, measured once."""
        if self._free is None:
            single, wide = (_seconds(run, count) for count in (1, most))
            self._free = max(1.0, single / max((wide - single) / (most - 1), 1e-9) - 1.0)
        return self._free

    def _graph(self, places: int, slots: int, head: bool, corrected: bool) -> StepGraph:
        """The graph of such a step, built when it is first needed."""
        if self._weights is None:
            raise ContextReadyError("This engine was closed; create a new one.")
        slots = min(-(-slots // BUCKET) * BUCKET, self._slots)
        key = (places, slots, head, corrected)
        # The graphs that were used last are kept.
        graph = self._graphs.pop(key, None)
        if graph is None:
            if len(self._graphs) >= GRAPHS:
                self._graphs.pop(next(iter(self._graphs))).close()
            graph = StepGraph(
                self._ggml,
                self.config,
                self._weights,
                self._buffers,
                places=places,
                slots=slots,
                head=head,
                corrected=corrected,
                threads=self.threads,
            )
        self._graphs[key] = graph
        return graph

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
        ours = (c.layers, c.shared_heads, c.head_size, c.window, c.width)
        if theirs != ours:
            raise ContextReadyError(
                f"This state belongs to another model (layers, heads, head size, window, width: {theirs} instead of "
                f"{ours})."
            )
        if state.batch_size != 1:
            raise ContextReadyError(f"This state has {state.batch_size} rows; select one of them.")
        check_capacity(self.capacity, state.position)


def _seconds(run: Callable[[int], object], count: int) -> float:
    """The median time of a few runs, without the first."""
    run(count)
    times = []
    for _ in range(TRIALS):
        begun = time.perf_counter()
        run(count)
        times.append(time.perf_counter() - begun)
    return statistics.median(times)
