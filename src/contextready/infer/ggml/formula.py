"""The formula of a correction as nodes of a graph."""

from typing import Any

from contextready.infer.ggml.nodes import Nodes


class Value:
    """A tensor in a formula."""

    def __init__(self, formula: "Formula", tensor: Any) -> None:
        self.formula, self.tensor = formula, tensor

    def __add__(self, other: "Value") -> "Value":
        return self.formula.add(self, other)


class Formula:
    """The operations of a correction's formula as nodes of a graph."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes, self._ggml, self._context = nodes, nodes.ggml, nodes.context

    def value(self, tensor: Any) -> Value:
        """Wrap a tensor for use in a formula."""
        return Value(self, tensor)

    def add(self, a: Value, b: Value) -> Value:
        """Add two values."""
        return self.value(self._ggml.ggml_add(self._context, a.tensor, b.tensor))

    def concat(self, z: Value, e: Value) -> Value:
        """Concatenate two values."""
        return self.value(self._ggml.ggml_concat(self._context, z.tensor, e.tensor, 0))

    def LN(self, x: Value, name: str = "norm") -> Value:
        """Apply a layer norm of the correction."""
        return self.value(self._nodes.layer_norm(f"correction.{name}", x.tensor))

    def corr_ffn(self, x: Value) -> Value:
        """Apply the correction's network."""
        return self.value(self._nodes.gelu_ffn("correction.ffn", x.tensor))

    def last_ffn(self, x: Value) -> Value:
        """Apply the feed-forward network of the last block."""
        return self.value(self._nodes.ffn(f"{self._last_block}.ffn", x.tensor))

    def last_norm(self, x: Value) -> Value:
        """Apply the norm in front of that network."""
        return self.value(self._nodes.norm(f"{self._last_block}.ffn_norm", x.tensor))

    @property
    def _last_block(self) -> str:
        return f"layers.{self._nodes.config.layers - 1}"
