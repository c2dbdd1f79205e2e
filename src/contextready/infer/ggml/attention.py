"""The attention of every place to the keys and values of its row, as nodes of a ggml graph.

Shape suffixes are those of `graph.py`; also G heads of keys and values, and D channels of all heads together.
"""

from dataclasses import dataclass
from typing import Any

from contextready.infer.ggml.buffers import Buffers
from contextready.infer.ggml.nodes import Nodes
from contextready.infer.ggml.rotation import mode
from contextready.infer.ggml.tensors import FLOAT, point, wrap


@dataclass(frozen=True)
class Places:
    """The tensors over the inputs of every place."""

    masks: list[Any]
    slots: list[Any]
    angles: list[Any]
    one: Any
    attended: Any


@dataclass(frozen=True)
class Store:
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


class Attention:
    """Adds the attention of the layers to a graph, over the first S slots of every place's row."""

    def __init__(self, nodes: Nodes, graph: Any, buffers: Buffers, places: Places, slots: int) -> None:
        self._nodes, self._graph, self._buffers, self._places, self._S = nodes, graph, buffers, places, slots
        self._P = len(places.slots)
        self.stores: list[list[Store]] = [[] for _ in range(self._P)]
        """The tensors of each place, layer by layer."""
        c, ggml = nodes.config, nodes.ggml
        self._H, self._G, self._E = c.heads, c.shared_heads, c.head_size
        self._head = self._E * FLOAT
        self._row = (self._H + 2 * self._G) * self._head
        self._mode, self._kind = mode(c), ggml.GGML_TYPE_F32

    def add(self, i: int, h_PC: Any) -> Any:
        """Add the attention of layer i.

        Every loop adds its nodes to the graph, because no later node refers to them: queries and keys are normalised
        and rotated in place, so that one view contains the finished keys and the values; then all places write their
        keys and values, before any attends to them; and attention is written into one array for all.
        """
        name, nodes = f"layers.{i}.attn", self._nodes
        qkv = nodes.linear(f"{name}.qkv", nodes.norm(f"{name}_norm", h_PC))
        if nodes.config.qk_norm:
            self._normalise(name, qkv)
        if nodes.config.has_rope(i):
            self._rotate(qkv)
        for p, (kv, held) in enumerate(self._write(i, qkv)):
            self._attend(p, qkv, kv, held)
        return nodes.linear(f"{name}.out", self._places.attended)

    def _normalise(self, name: str, qkv: Any) -> None:
        """Normalise the queries and the keys of all places, head by head."""
        ggml, context = self._nodes.ggml, self._nodes.context
        for part, heads, first in (("q_norm", self._H, 0), ("k_norm", self._G, self._H)):
            view = ggml.ggml_view_3d(context, qkv, self._E, heads, self._P, self._head, self._row, first * self._head)
            self._include(self._nodes.rms_norm_inplace(f"{name}.{part}", view))

    def _rotate(self, qkv: Any) -> None:
        """Rotate the queries and keys of every place."""
        ggml, context, places, heads = self._nodes.ggml, self._nodes.context, self._places, self._H + self._G
        for p in range(self._P):
            qk = ggml.ggml_view_3d(context, qkv, self._E, heads, 1, self._head, heads * self._head, p * self._row)
            rotated = ggml.ggml_rope_ext_inplace(
                context, qk, places.one, places.angles[p], self._E, self._mode, 0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0
            )
            self._include(rotated)

    def _write(self, i: int, qkv: Any) -> list[tuple[Any, Any]]:
        """Write the keys and values of every place into its row; returns them before and after that."""
        ggml, context, written = self._nodes.ggml, self._nodes.context, []
        for p in range(self._P):
            first = p * self._row + self._H * self._head
            fresh = ggml.ggml_view_3d(context, qkv, self._E, 1, 2 * self._G, self._head, self._head, first)
            kv = wrap(ggml, context, self._kind, self._buffers.kv[i][0])
            held = ggml.ggml_set_rows(context, kv, fresh, self._places.slots[p])
            self._include(held)
            written.append((kv, held))
        return written

    def _attend(self, p: int, qkv: Any, kv: Any, held: Any) -> None:
        """Let the queries of a place attend to the keys and values of its row."""
        ggml, context, E, G, S = self._nodes.ggml, self._nodes.context, self._E, self._G, self._S
        strides = kv.contents.nb[1], kv.contents.nb[2]
        values = G * strides[1]
        q = ggml.ggml_view_3d(context, qkv, E, 1, self._H, self._head, self._head, p * self._row)
        k = ggml.ggml_view_3d(context, held, E, S, G, *strides, 0)
        v = ggml.ggml_view_3d(context, held, E, S, G, *strides, values)
        y = ggml.ggml_flash_attn_ext(context, q, k, v, self._places.masks[p], E**-0.5, 0.0, 0.0)
        point(y, self._buffers.attended_PD[p].ctypes.data)
        self._include(y)
        self.stores[p].append(Store((kv, held, k), v, values))

    def _include(self, node: Any) -> None:
        self._nodes.ggml.ggml_build_forward_expand(self._graph, node)
