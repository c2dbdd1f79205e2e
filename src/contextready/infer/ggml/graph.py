"""One streaming step as a ggml graph: the recurrence for some tokens, each in its own place.

A place is one token's input and output. It is pointed at the keys and values of any row, so one graph serves every
choice of as many rows. The products with weights see the tokens of all places at once.

This, `nodes.py` and `attention.py` implement `ContextReady.recur` and the blocks a second time, because ggml is not
torch. Every change there must be repeated here; `tests/infer/ggml/test_engine.py` compares the two. The correction is
not implemented again: its formula is evaluated over `Formula`. Shape suffixes list the outermost dimension first, as in
numpy: R rows, P places, S slots, C width, H heads, E head size, V vocabulary. ggml lists the innermost dimension first.
"""

import ctypes
from typing import Any
from weakref import finalize

import numpy as np

from contextready.errors import ContextReadyError
from contextready.infer.ggml.attention import Attention, Places, Store
from contextready.infer.ggml.buffers import NODES_PER_PLACE, Buffers, carries_residual
from contextready.infer.ggml.config import ExportedConfig
from contextready.infer.ggml.formula import Formula
from contextready.infer.ggml.nodes import Nodes
from contextready.infer.ggml.tensors import Array, Weights, free, new_allocator, new_context, point, wrap
from contextready.model.correction import find_correction


class StepGraph:
    """One step of some places over the first `slots` slots of their rows, with or without head and correction."""

    def __init__(
        self,
        ggml: Any,
        config: ExportedConfig,
        weights: Weights,
        buffers: Buffers,
        *,
        places: int,
        slots: int,
        head: bool,
        corrected: bool,
        threads: int,
    ) -> None:
        self._ggml, self._config, self._weights, self._buffers = ggml, config, weights, buffers
        # ggml would write past the end of the arrays.
        assert places <= (len(buffers.logits_PV) if head else len(buffers.tokens_P))
        nodes = 64 + (40 + NODES_PER_PLACE * places) * (config.layers + 2)
        self._context = new_context(ggml, nodes, ggml.ggml_graph_overhead_custom(nodes, False))
        allocator = new_allocator(ggml)
        self.close = finalize(self, free, ggml, allocator, self._context)
        """Free ggml's memory; this also happens when the object is garbage-collected."""
        self._graph = ggml.ggml_new_graph_custom(self._context, nodes, False)
        self._masks_PS = np.full((places, slots), -np.inf, np.float16)
        self._seen = [0] * places
        self._rows = [0] * places
        self._addresses = [(kv.ctypes.data, kv.strides[0]) for kv in buffers.kv]
        # The graph gets complete angles (see `inverse_angles`), so the position that ggml multiplies them by is 1.
        self._one = np.ones(1, np.int32)
        self._stores = self._build(places, slots, head, corrected)
        if not ggml.ggml_gallocr_alloc_graph(allocator, self._graph):
            raise ContextReadyError("There is not enough memory for one step of this model; use fewer rows.")
        self._plan = ggml.ggml_graph_plan(self._graph, threads, None)
        self._work = np.empty(max(1, self._plan.work_size), np.uint8)
        self._plan.work_data = ctypes.cast(self._work.ctypes.data, ctypes.POINTER(ctypes.c_uint8))
        self._plan_pointer = ctypes.byref(self._plan)

    def point(self, place: int, row: int) -> None:
        """Let a place write and read the keys and values of this row."""
        if self._rows[place] == row:
            return
        self._rows[place] = row
        for store, (first, stride) in zip(self._stores[place], self._addresses, strict=True):
            store.move(first + row * stride)

    def reveal(self, place: int, slots: int) -> None:
        """Let a place attend to the first `slots` slots of its row only."""
        seen = self._seen[place]
        if slots < seen:
            self._masks_PS[place, slots:seen] = -np.inf
        else:
            self._masks_PS[place, seen:slots] = 0.0
        self._seen[place] = slots

    def run(self) -> None:
        """Compute the step."""
        status = self._ggml.ggml_graph_compute(self._graph, self._plan_pointer)
        if status != self._ggml.GGML_STATUS_SUCCESS:
            raise ContextReadyError(f"ggml could not compute a step (status {status}); try again with fewer threads.")

    def _build(self, P: int, slots: int, head: bool, corrected: bool) -> list[list[Store]]:
        """Add all nodes; returns the tensors that point at the rows of the places."""
        ggml, context, c, buffers = self._ggml, self._context, self._config, self._buffers
        nodes = Nodes(ggml, context, c, self._weights)

        def over(type: int, array: Array) -> Any:
            return wrap(ggml, context, type, array)

        carried_PC = over(ggml.GGML_TYPE_F32, buffers.carried_PC[:P])
        tokens_P = over(ggml.GGML_TYPE_I32, buffers.tokens_P[:P])
        e_PC = ggml.ggml_get_rows(context, self._weights["embedding.weight"], tokens_P)
        x_PC = self._corrected(nodes, carried_PC, e_PC) if corrected else e_PC
        places = Places(
            masks=[over(ggml.GGML_TYPE_F16, mask_S[None]) for mask_S in self._masks_PS],
            slots=[over(ggml.GGML_TYPE_I64, buffers.slots_P[p : p + 1]) for p in range(P)],
            angles=[over(ggml.GGML_TYPE_F32, angles_E) for angles_E in buffers.inverse_angles_PE[:P]],
            one=over(ggml.GGML_TYPE_I32, self._one),
            attended=over(ggml.GGML_TYPE_F32, buffers.attended_PD[:P]),
        )
        attention, h_PC = Attention(nodes, self._graph, buffers, places, slots), x_PC
        for i in range(c.layers):
            a_PC = ggml.ggml_add(context, h_PC, attention.add(i, h_PC))
            h_PC = ggml.ggml_add(context, a_PC, nodes.ffn(f"layers.{i}.ffn", nodes.norm(f"layers.{i}.ffn_norm", a_PC)))
        if c.extra_ffn:
            h_PC = ggml.ggml_add(context, h_PC, nodes.ffn("extra_ffn", nodes.norm("extra_norm", h_PC)))
        left_PC = h_PC
        if carries_residual(c):
            z_PC = point(ggml.ggml_cont(context, h_PC), buffers.z_PC.ctypes.data)
            ggml.ggml_build_forward_expand(self._graph, z_PC)
            left_PC = ggml.ggml_sub(context, h_PC, x_PC)
        # The last result is written directly into the carried vector, whose old value was read at the start.
        point(left_PC, buffers.carried_PC.ctypes.data)
        ggml.ggml_build_forward_expand(self._graph, left_PC)
        if head:
            logits_PV = nodes.linear("unembedding", nodes.norm("final_norm", h_PC))
            point(logits_PV, buffers.logits_PV.ctypes.data)
            ggml.ggml_build_forward_expand(self._graph, logits_PV)
        return attention.stores

    def _corrected(self, nodes: Nodes, carried_PC: Any, e_PC: Any) -> Any:
        """Compute x = e + correction."""
        formula = Formula(nodes)
        correction = find_correction(self._config.correction)(formula, formula.value(carried_PC), formula.value(e_PC))
        return e_PC if correction is None else self._ggml.ggml_add(self._context, e_PC, correction.tensor)
