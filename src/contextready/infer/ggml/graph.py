"""One streaming step as a ggml graph: the recurrence for some tokens, each in its own place.

A place is one token's input and output. It is pointed at the keys and values of any row, so one graph serves every
choice of as many rows. The products with weights see the tokens of all places at once.

This implements `ContextReady.recur` and the blocks a second time, because ggml is not torch. Every change there must be
repeated here; `tests/infer/ggml/test_engine.py` compares the two. The correction is not implemented again: its formula
is evaluated over `_Formula`. Shape suffixes list the outermost dimension first, as in numpy: R rows, P places, S slots,
C width, H heads, E head size, V vocabulary. ggml lists the innermost dimension first.
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
NODES_PER_PLACE = 10
"""Nodes of a graph that every place adds to every layer."""
NODE_BYTES = 512
"""About how many bytes ggml needs to describe a node."""
EPSILON = 1e-5
"""Epsilon of the layer norms, equal to torch's default."""


class Weights:
    """The tensors of a file as ggml tensors that point into the memory map."""

    def __init__(self, ggml: Any, exported: Exported) -> None:
        # The arrays own the memory map, so they are kept as long as ggml may read them.
        self._arrays = {name: _aligned(weight.data) for name, weight in exported.weights.items()}
        context = new_context(ggml, len(self._arrays))
        self.close = finalize(self, ggml.ggml_free, context)
        """Free ggml's memory; this also happens when the object is garbage-collected."""
        self._tensors = {}
        for name, weight in exported.weights.items():
            number = getattr(ggml, f"GGML_TYPE_{weight.type.upper()}")
            self._tensors[name] = point(new_tensor(ggml, context, number, weight.shape), self._arrays[name].ctypes.data)

    def __getitem__(self, name: str) -> Any:
        return self._tensors[name]

    def __contains__(self, name: str) -> bool:
        return name in self._tensors


@dataclass(frozen=True)
class Buffers:
    """Plain arrays that the graphs of one engine read and write. All but the keys and values belong to places."""

    tokens_P: Array
    """Input: token ids, int32."""
    slots_P: Array
    """Input: the slot for each place's new keys and values, int64."""
    inverse_angles_PE: Array
    """Input: reciprocals of the E/2 rotation angles, float32."""
    carried_PC: Array
    """What the last position passes on to the next one; read, then overwritten."""
    z_PC: Array
    """Output of the blocks; the same array as `carried_PC` if that is what is passed on."""
    attended_PC: Array
    """What the heads of a layer return; overwritten by every layer."""
    logits_PV: Array
    """Output."""
    kv: tuple[Array, ...]
    """Per layer (R, 2H, S, E): the rotated keys of all heads, then the values."""

    @classmethod
    def empty(cls, config: ExportedConfig, rows: int, slots: int, places: int) -> "Buffers":
        """Create buffers for streams before their first token; the system allocates pages on the first write.

        Steps with the head have at most as many places as there are rows.
        """
        c = config
        carried_PC = np.zeros((places, c.width), np.float32)
        return cls(
            np.zeros(places, np.int32),
            np.zeros(places, np.int64),
            np.zeros((places, c.head_size // 2), np.float32),
            carried_PC,
            np.zeros((places, c.width), np.float32) if carries_residual(c) else carried_PC,
            np.zeros((places, c.width), np.float32),
            np.zeros((rows, c.vocab_size), np.float32),
            kv=tuple(np.zeros((rows, 2 * c.heads, slots, c.head_size), np.float32) for _ in range(c.layers)),
        )


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
        self._P, self._S = places, slots
        # ggml would write past the end of the arrays.
        assert places <= (len(buffers.logits_PV) if head else len(buffers.tokens_P))
        nodes = 64 + (40 + NODES_PER_PLACE * places) * (config.layers + 2)
        self._context = new_context(ggml, nodes, ggml.ggml_graph_overhead_custom(nodes, False))
        allocator = _allocator(ggml)
        self.close = finalize(self, _free, ggml, allocator, self._context)
        """Free ggml's memory; this also happens when the object is garbage-collected."""
        self._graph = ggml.ggml_new_graph_custom(self._context, nodes, False)
        self._masks_PS = np.full((places, slots), -np.inf, np.float16)
        self._seen = [0] * places
        self._rows = [0] * places
        self._addresses = [(kv.ctypes.data, kv.strides[0]) for kv in buffers.kv]
        self._stores: list[list[_Store]] = [[] for _ in range(places)]
        # The graph gets complete angles (see `inverse_angles`), so the position that ggml multiplies them by is 1.
        self._one = np.ones(1, np.int32)
        self._build(head, corrected)
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

    def _build(self, head: bool, corrected: bool) -> None:
        ggml, context, c, buffers, P = self._ggml, self._context, self._config, self._buffers, self._P
        carried_PC = self._wrap(ggml.GGML_TYPE_F32, buffers.carried_PC[:P])
        tokens_P = self._wrap(ggml.GGML_TYPE_I32, buffers.tokens_P[:P])
        e_PC = ggml.ggml_get_rows(context, self._weights["embedding.weight"], tokens_P)
        x_PC = self._corrected(carried_PC, e_PC) if corrected else e_PC
        places = _Places(
            masks=[self._wrap(ggml.GGML_TYPE_F16, mask_S[None]) for mask_S in self._masks_PS],
            slots=[self._wrap(ggml.GGML_TYPE_I64, buffers.slots_P[p : p + 1]) for p in range(P)],
            angles=[self._wrap(ggml.GGML_TYPE_F32, angles_E) for angles_E in buffers.inverse_angles_PE[:P]],
            one=self._wrap(ggml.GGML_TYPE_I32, self._one),
            attended=self._wrap(ggml.GGML_TYPE_F32, buffers.attended_PC[:P]),
        )
        h_PC = x_PC
        for i in range(c.layers):
            a_PC = ggml.ggml_add(context, h_PC, self._attention(i, h_PC, places))
            h_PC = ggml.ggml_add(context, a_PC, self._ffn(f"layers.{i}.ffn", self._norm(f"layers.{i}.ffn_norm", a_PC)))
        if c.extra_ffn:
            h_PC = ggml.ggml_add(context, h_PC, self._ffn("extra_ffn", self._norm("extra_norm", h_PC)))
        left_PC = h_PC
        if carries_residual(c):
            z_PC = point(ggml.ggml_cont(context, h_PC), buffers.z_PC.ctypes.data)
            ggml.ggml_build_forward_expand(self._graph, z_PC)
            left_PC = ggml.ggml_sub(context, h_PC, x_PC)
        # The last result is written directly into the carried vector, whose old value was read at the start.
        point(left_PC, buffers.carried_PC.ctypes.data)
        ggml.ggml_build_forward_expand(self._graph, left_PC)
        if head:
            logits_PV = self._linear("unembedding", self._norm("final_norm", h_PC))
            point(logits_PV, buffers.logits_PV.ctypes.data)
            ggml.ggml_build_forward_expand(self._graph, logits_PV)

    def _corrected(self, carried_RC: Any, e_RC: Any) -> Any:
        """Compute x = e + correction."""
        formula = _Formula(self)
        correction = find_correction(self._config.correction)(formula, formula.value(carried_RC), formula.value(e_RC))
        return e_RC if correction is None else self._ggml.ggml_add(self._context, e_RC, correction.tensor)

    def _attention(self, i: int, h_PC: Any, places: "_Places") -> Any:
        ggml, context, c = self._ggml, self._context, self._config
        H, E, P = c.heads, c.head_size, self._P
        head, row = E * FLOAT, 3 * c.width * FLOAT
        qkv = self._linear(f"layers.{i}.attn.qkv", self._norm(f"layers.{i}.attn_norm", h_PC))
        stores = []
        # Every loop adds its nodes to the graph, because no later node refers to them: queries and keys are rotated in
        # place, so that one view contains the rotated keys and the values; then all places write their keys and values,
        # before any attends to them; and attention is written into one array for all.
        for p in range(P):
            qk = ggml.ggml_view_3d(context, qkv, E, 2 * H, 1, head, 2 * H * head, p * row)
            rotated = ggml.ggml_rope_ext_inplace(
                context, qk, places.one, places.angles[p], E, ROPE_MODES[c.rope], 0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0
            )
            ggml.ggml_build_forward_expand(self._graph, rotated)
        for p in range(P):
            fresh = ggml.ggml_view_3d(context, qkv, E, 1, 2 * H, head, head, p * row + H * head)
            kv = self._wrap(ggml.GGML_TYPE_F32, self._buffers.kv[i][0])
            held = ggml.ggml_set_rows(context, kv, fresh, places.slots[p])
            ggml.ggml_build_forward_expand(self._graph, held)
            stores.append((kv, held))
        for p, (kv, held) in enumerate(stores):
            strides = kv.contents.nb[1], kv.contents.nb[2]
            values = H * strides[1]
            q = ggml.ggml_view_3d(context, qkv, E, 1, H, head, head, p * row)
            k = ggml.ggml_view_3d(context, held, E, self._S, H, *strides, 0)
            v = ggml.ggml_view_3d(context, held, E, self._S, H, *strides, values)
            y = ggml.ggml_flash_attn_ext(context, q, k, v, places.masks[p], E**-0.5, 0.0, 0.0)
            point(y, self._buffers.attended_PC[p].ctypes.data)
            ggml.ggml_build_forward_expand(self._graph, y)
            self._stores[p].append(_Store((kv, held, k), v, values))
        return self._linear(f"layers.{i}.attn.out", places.attended)

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
        pieces = ggml.ggml_reshape_2d(context, up, C // self._config.heads, 4 * self._config.heads * self._P)
        active = ggml.ggml_reshape_2d(context, ggml.ggml_gelu_erf_inplace(context, pieces), 4 * C, self._P)
        return self._linear(f"{name}.down", active)

    def _wrap(self, type: int, array: Array) -> Any:
        """Create a tensor over a numpy array, which the caller must keep alive."""
        tensor = new_tensor(self._ggml, self._context, type, array.shape)
        return point(tensor, array.ctypes.data)


@dataclass(frozen=True)
class _Places:
    """The tensors over the inputs of every place."""

    masks: list[Any]
    slots: list[Any]
    angles: list[Any]
    one: Any
    attended: Any


@dataclass(frozen=True)
class _Store:
    """The tensors of one layer that point at the keys and values of one place's row."""

    keys: tuple[Any, ...]
    values: Any
    offset: int
    """Bytes from the keys to the values."""

    def move(self, address: int) -> None:
        """Point them at another row."""
        for tensor in self.keys:
            point(tensor, address)
        point(self.values, address + self.offset)


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


def carries_residual(config: ExportedConfig) -> bool:
    """Whether a position passes on z minus the input of the blocks, instead of z."""
    return find_correction(config.correction).carries_residual


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


def new_context(ggml: Any, tensors: int, more: int = 0) -> Any:
    """Create a ggml context that describes tensors but contains none of their data."""
    size = (tensors + 8) * ggml.ggml_tensor_overhead() + more
    context = ggml.ggml_init(ggml.ggml_init_params(mem_size=size, mem_buffer=None, no_alloc=True))
    if context is None:
        raise ContextReadyError("ggml could not start because there is not enough memory; free some memory.")
    return context


def new_tensor(ggml: Any, context: Any, type: int, shape: tuple[int, ...]) -> Any:
    """Describe a tensor, whose data is elsewhere."""
    sizes = (ctypes.c_int64 * len(shape))(*reversed(shape))
    return ggml.ggml_new_tensor(context, type, len(shape), sizes)


def point(tensor: Any, address: int) -> Any:
    """Let a tensor use the data at this address."""
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
