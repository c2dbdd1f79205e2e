"""One streaming step as a ggml graph: the recurrence for some rows, over buffers at fixed addresses.

This implements `ContextReady.recur` and the blocks a second time, because ggml is not torch. Every change there must be
repeated here; `tests/infer/ggml/test_engine.py` compares the two. The correction is not implemented again: its formula
is evaluated over `_Formula`. Shape suffixes list the outermost dimension first, as in numpy: R rows, S slots, C width,
H heads, E head size, V vocabulary. ggml lists the innermost dimension first.
"""

import ctypes
from dataclasses import dataclass
from typing import Any
from weakref import finalize

import numpy as np
import numpy.typing as npt

from contextready.errors import ContextReadyError
from contextready.infer.ggml.file import Exported, ExportedConfig
from contextready.model.correction import find_correction

Array = npt.NDArray[Any]

ROPE_MODES = {"geometric": 2, "integer": 0}
"""ggml's modes for rotating the pairs (i, i + E/2), and the neighbours (2i, 2i + 1)."""
FLOAT = 4
"""Bytes of a float32."""
NODES_PER_ROW = 4
"""Nodes of a graph that every row adds to every layer."""
NODE_BYTES = 512
"""About how many bytes ggml needs to describe a node."""
EPSILON = 1e-5
"""Epsilon of the layer norms, equal to torch's default."""


class Weights:
    """The tensors of a file as ggml tensors that point into the memory map."""

    def __init__(self, ggml: Any, exported: Exported) -> None:
        # The arrays own the memory map, so they are kept as long as ggml may read them.
        self._arrays = {name: _aligned(weight.data) for name, weight in exported.weights.items()}
        context = _context(ggml, len(self._arrays))
        self.close = finalize(self, ggml.ggml_free, context)
        """Free ggml's memory; this also happens when the object is garbage-collected."""
        self._tensors = {}
        for name, weight in exported.weights.items():
            number = getattr(ggml, f"GGML_TYPE_{weight.type.upper()}")
            self._tensors[name] = _point(_new(ggml, context, number, weight.shape), self._arrays[name].ctypes.data)

    def __getitem__(self, name: str) -> Any:
        return self._tensors[name]

    def __contains__(self, name: str) -> bool:
        return name in self._tensors


@dataclass(frozen=True)
class Buffers:
    """Plain arrays that the graphs of one engine read and write between steps."""

    tokens_R: Array
    """Input: token ids, int32."""
    slots_R: Array
    """Input: the slot for each row's new keys and values, int64."""
    inverse_angles_RE: Array
    """Input: reciprocals of the E/2 rotation angles, float32."""
    carried_RC: Array
    """What the last position passes on to the next one; read, then overwritten."""
    logits_RV: Array
    """Output."""
    kv: tuple[Array, ...]
    """Per layer (R, 2H, S, E): the rotated keys of all heads, then the values."""

    @classmethod
    def empty(cls, config: ExportedConfig, rows: int, slots: int) -> "Buffers":
        """Create buffers for streams before their first token; the system allocates pages on the first write."""
        c = config
        return cls(
            np.zeros(rows, np.int32),
            np.zeros(rows, np.int64),
            np.zeros((rows, c.head_size // 2), np.float32),
            np.zeros((rows, c.width), np.float32),
            np.zeros((rows, c.vocab_size), np.float32),
            kv=tuple(np.zeros((rows, 2 * c.heads, slots, c.head_size), np.float32) for _ in range(c.layers)),
        )


class StepGraph:
    """One step of the rows first, …, first + R - 1 over their first `slots` slots, with or without the head."""

    def __init__(
        self,
        ggml: Any,
        config: ExportedConfig,
        weights: Weights,
        buffers: Buffers,
        *,
        first: int,
        rows: int,
        slots: int,
        head: bool,
        threads: int,
    ) -> None:
        self._ggml, self._config, self._weights = ggml, config, weights
        self._R, self._S = rows, slots
        nodes = 64 + (40 + NODES_PER_ROW * rows) * (config.layers + 2)
        self._context = _context(ggml, nodes, ggml.ggml_graph_overhead_custom(nodes, False))
        allocator = _allocator(ggml)
        self.close = finalize(self, _free, ggml, allocator, self._context)
        """Free ggml's memory; this also happens when the object is garbage-collected."""
        self._graph = ggml.ggml_new_graph_custom(self._context, nodes, False)
        self._masks_RS = np.full((rows, slots), -np.inf, np.float16)
        self._seen = [0] * rows
        # The graph gets complete angles (see `inverse_angles`), so the position that ggml multiplies them by is 1.
        self._one = np.ones(1, np.int32)
        self._build(buffers, slice(first, first + rows), head)
        if not ggml.ggml_gallocr_alloc_graph(allocator, self._graph):
            raise ContextReadyError("There is not enough memory for one step of this model; use fewer rows.")
        self._plan = ggml.ggml_graph_plan(self._graph, threads, None)
        self._work = np.empty(max(1, self._plan.work_size), np.uint8)
        self._plan.work_data = ctypes.cast(self._work.ctypes.data, ctypes.POINTER(ctypes.c_uint8))
        self._plan_pointer = ctypes.byref(self._plan)

    def reveal(self, row: int, slots: int) -> None:
        """Let a row of this graph attend to its first `slots` slots only."""
        seen = self._seen[row]
        if slots < seen:
            self._masks_RS[row, slots:seen] = -np.inf
        else:
            self._masks_RS[row, seen:slots] = 0.0
        self._seen[row] = slots

    def run(self) -> None:
        """Compute the step."""
        status = self._ggml.ggml_graph_compute(self._graph, self._plan_pointer)
        if status != self._ggml.GGML_STATUS_SUCCESS:
            raise ContextReadyError(f"ggml could not compute a step (status {status}); try again with fewer threads.")

    def _build(self, buffers: Buffers, rows: slice, head: bool) -> None:
        ggml, context, c = self._ggml, self._context, self._config
        carried_RC = self._wrap(ggml.GGML_TYPE_F32, buffers.carried_RC[rows])
        e_RC = ggml.ggml_get_rows(
            context, self._weights["embedding.weight"], self._wrap(ggml.GGML_TYPE_I32, buffers.tokens_R[rows])
        )
        x_RC = self._corrected(carried_RC, e_RC)
        masks = self._wrap(ggml.GGML_TYPE_F16, self._masks_RS[:, None, None])
        slots = self._wrap(ggml.GGML_TYPE_I64, buffers.slots_R[rows][:, None, None])
        one = self._wrap(ggml.GGML_TYPE_I32, self._one)
        angles = [
            self._wrap(ggml.GGML_TYPE_F32, inverse_angles_E) for inverse_angles_E in buffers.inverse_angles_RE[rows]
        ]
        h_RC = x_RC
        for i, kv in enumerate(buffers.kv):
            attended_RC = self._attention(
                i, h_RC, self._wrap(ggml.GGML_TYPE_F32, kv[rows]), slots, one, angles=angles, masks=masks
            )
            a_RC = ggml.ggml_add(context, h_RC, attended_RC)
            h_RC = ggml.ggml_add(context, a_RC, self._ffn(f"layers.{i}.ffn", self._norm(f"layers.{i}.ffn_norm", a_RC)))
        if c.extra_ffn:
            h_RC = ggml.ggml_add(context, h_RC, self._ffn("extra_ffn", self._norm("extra_norm", h_RC)))
        residual = find_correction(c.correction).carries_residual
        left_RC = ggml.ggml_sub(context, h_RC, x_RC) if residual else h_RC
        # The last result is written directly into the carried vector, whose old value was read at the start.
        _point(left_RC, buffers.carried_RC[rows].ctypes.data)
        ggml.ggml_build_forward_expand(self._graph, left_RC)
        if head:
            logits_RV = self._linear("unembedding", self._norm("final_norm", h_RC))
            _point(logits_RV, buffers.logits_RV[rows].ctypes.data)
            ggml.ggml_build_forward_expand(self._graph, logits_RV)

    def _corrected(self, carried_RC: Any, e_RC: Any) -> Any:
        """Compute x = e + correction."""
        formula = _Formula(self)
        correction = find_correction(self._config.correction)(formula, formula.value(carried_RC), formula.value(e_RC))
        return e_RC if correction is None else self._ggml.ggml_add(self._context, e_RC, correction.tensor)

    def _attention(self, i: int, h_RC: Any, kv: Any, slots: Any, one: Any, *, angles: list[Any], masks: Any) -> Any:
        ggml, context, c = self._ggml, self._context, self._config
        H, E, R = c.heads, c.head_size, self._R
        head, row = E * FLOAT, 3 * c.width * FLOAT
        qkv = self._linear(f"layers.{i}.attn.qkv", self._norm(f"layers.{i}.attn_norm", h_RC))
        # Queries and keys are rotated in place, so that one view contains the rotated keys and the values.
        for r, angles_E in enumerate(angles):
            qk = ggml.ggml_view_3d(context, qkv, E, 2 * H, 1, head, 2 * H * head, r * row)
            rotated = ggml.ggml_rope_ext_inplace(
                context, qk, one, angles_E, E, ROPE_MODES[c.rope], 0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0
            )
            # No later node refers to the rotation, so it is added to the graph before the nodes that read its result.
            ggml.ggml_build_forward_expand(self._graph, rotated)
        fresh = ggml.ggml_view_4d(context, qkv, E, 1, 2 * H, R, head, head, row, H * head)
        held = ggml.ggml_set_rows(context, kv, fresh, slots)
        strides = [kv.contents.nb[dim] for dim in (1, 2, 3)]
        q = ggml.ggml_view_4d(context, qkv, E, 1, H, R, head, head, row, 0)
        k = ggml.ggml_view_4d(context, held, E, self._S, H, R, *strides, 0)
        v = ggml.ggml_view_4d(context, held, E, self._S, H, R, *strides, H * strides[1])
        y = ggml.ggml_flash_attn_ext(context, q, k, v, masks, E**-0.5, 0.0, 0.0)
        return self._linear(f"layers.{i}.attn.out", ggml.ggml_reshape_2d(context, y, c.width, R))

    def _norm(self, name: str, x: Any) -> Any:
        ggml, context = self._ggml, self._context
        out = ggml.ggml_mul(context, ggml.ggml_norm(context, x, EPSILON), self._weights[f"{name}.weight"])
        return self._biased(name, out)

    def _linear(self, name: str, x: Any) -> Any:
        return self._biased(name, self._ggml.ggml_mul_mat(self._context, self._weights[f"{name}.weight"], x))

    def _biased(self, name: str, x: Any) -> Any:
        bias = f"{name}.bias"
        return self._ggml.ggml_add(self._context, x, self._weights[bias]) if bias in self._weights else x

    def _ffn(self, name: str, x: Any) -> Any:
        ggml, context, C = self._ggml, self._context, self._config.width
        up = self._linear(f"{name}.up", x)
        # ggml splits an elementwise function by rows, so each row is reshaped into many to use all threads.
        pieces = ggml.ggml_reshape_2d(context, up, C // self._config.heads, 4 * self._config.heads * self._R)
        active = ggml.ggml_reshape_2d(context, ggml.ggml_gelu_erf_inplace(context, pieces), 4 * C, self._R)
        return self._linear(f"{name}.down", active)

    def _wrap(self, type: int, array: Array) -> Any:
        """Create a tensor over a numpy array, which the caller must keep alive."""
        tensor = _new(self._ggml, self._context, type, array.shape)
        return _point(tensor, array.ctypes.data)


class _Value:
    """A tensor in a formula."""

    def __init__(self, formula: "_Formula", tensor: Any) -> None:
        self.formula, self.tensor = formula, tensor

    def __add__(self, other: "_Value") -> "_Value":
        return self.formula.add(self, other)


class _Formula:
    """The operations of a correction's formula as nodes of a graph."""

    def __init__(self, graph: StepGraph) -> None:
        self._graph, self._ggml, self._context = graph, graph._ggml, graph._context

    def value(self, tensor: Any) -> _Value:
        """Wrap a tensor for use in a formula."""
        return _Value(self, tensor)

    def add(self, a: _Value, b: _Value) -> _Value:
        """Add two values."""
        return self.value(self._ggml.ggml_add(self._context, a.tensor, b.tensor))

    def concat(self, z: _Value, e: _Value) -> _Value:
        """Concatenate two values."""
        return self.value(self._ggml.ggml_concat(self._context, z.tensor, e.tensor, 0))

    def LN(self, x: _Value, name: str = "norm") -> _Value:
        """Apply a layer norm of the correction."""
        return self.value(self._graph._norm(f"correction.{name}", x.tensor))

    def corr_ffn(self, x: _Value) -> _Value:
        """Apply the correction's network."""
        return self.value(self._graph._ffn("correction.ffn", x.tensor))

    def last_ffn(self, x: _Value) -> _Value:
        """Apply the feed-forward network of the last block."""
        return self.value(self._graph._ffn(f"{self._last_block}.ffn", x.tensor))

    def last_norm(self, x: _Value) -> _Value:
        """Apply the norm in front of that network."""
        return self.value(self._graph._norm(f"{self._last_block}.ffn_norm", x.tensor))

    @property
    def _last_block(self) -> str:
        return f"layers.{self._graph._config.layers - 1}"


def frequencies(config: ExportedConfig) -> npt.NDArray[np.float64]:
    """The E/2 rotary frequencies, in radians per position."""
    even_E = np.arange(0, config.head_size, 2, dtype=np.float64)
    return even_E / 2 if config.rope == "integer" else config.rope_base ** -(even_E / config.head_size)


def inverse_angles(frequencies_E: npt.NDArray[np.float64], position: int) -> npt.NDArray[np.float64]:
    """Reciprocals of a position's rotation angles, which are first reduced to between -π and π.

    ggml computes angles in float32, with an error of 0.006 rad at position 100,000. With base 1 and position 1 it uses
    the angle 1 / factor, so the factors carry the angle with full float32 precision.
    """
    angles_E = np.remainder(position * frequencies_E + np.pi, 2 * np.pi) - np.pi
    # The reciprocal of 0 would be infinite, and an angle of 1e-30 is just as good.
    angles_E[np.abs(angles_E) < 1e-30] = 1e-30
    return np.reciprocal(angles_E)


def _context(ggml: Any, tensors: int, more: int = 0) -> Any:
    """Create a ggml context that describes tensors but contains none of their data."""
    size = (tensors + 8) * ggml.ggml_tensor_overhead() + more
    context = ggml.ggml_init(ggml.ggml_init_params(mem_size=size, mem_buffer=None, no_alloc=True))
    if context is None:
        raise ContextReadyError("ggml could not start because there is not enough memory; free some memory.")
    return context


def _new(ggml: Any, context: Any, type: int, shape: tuple[int, ...]) -> Any:
    sizes = (ctypes.c_int64 * len(shape))(*reversed(shape))
    return ggml.ggml_new_tensor(context, type, len(shape), sizes)


def _point(tensor: Any, address: int) -> Any:
    tensor.contents.data = ctypes.c_void_p(address)
    return tensor


def _aligned(array: Array) -> Array:
    """The array itself if ggml can read it in place, otherwise a copy."""
    return array if array.ctypes.data % 16 == 0 else array.copy()


def _allocator(ggml: Any) -> Any:
    """Create the allocator that gives a graph's intermediate results memory and reuses it."""
    # The buffer type comes from a backend, because the binding of ggml_backend_cpu_buffer_type truncates its pointer.
    backend = ggml.ggml_backend_cpu_init()
    allocator = ggml.ggml_gallocr_new(ggml.ggml_backend_get_default_buffer_type(backend))
    ggml.ggml_backend_free(backend)
    return allocator


def _free(ggml: Any, allocator: Any, context: Any) -> None:
    ggml.ggml_gallocr_free(allocator)
    ggml.ggml_free(context)
