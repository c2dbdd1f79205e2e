"""The parts of a layer as nodes of a ggml graph: linear layers, norms and feed-forward networks."""

from dataclasses import dataclass
from math import gcd
from typing import Any

from contextready.infer.ggml.config import ExportedConfig
from contextready.infer.ggml.tensors import Weights

EPSILON = 1e-5
"""Epsilon of a correction's layer norms, equal to torch's default."""
PIECES = 64
"""The most rows into which the hidden channels of a token are cut, so that threads share an elementwise function."""


@dataclass(frozen=True)
class Nodes:
    """Adds nodes for the tokens of P places to a context; weights are named as in the file."""

    ggml: Any
    context: Any
    config: ExportedConfig
    weights: Weights

    def linear(self, name: str, x: Any) -> Any:
        """Apply a linear layer."""
        return self._biased(name, self.ggml.ggml_mul_mat(self.context, self.weights[f"{name}.weight"], x))

    def layer_norm(self, name: str, x: Any, epsilon: float = EPSILON) -> Any:
        """Apply a layer norm."""
        normed = self.ggml.ggml_norm(self.context, x, epsilon)
        return self._biased(name, self.ggml.ggml_mul(self.context, normed, self.weights[f"{name}.weight"]))

    def norm(self, name: str, x: Any) -> Any:
        """Apply a norm of the residual stream."""
        if self.config.norm == "layer":
            return self.layer_norm(name, x, self.config.norm_eps)
        normed = self.ggml.ggml_rms_norm(self.context, x, self.config.norm_eps)
        return self.ggml.ggml_mul(self.context, normed, self.weights[f"{name}.weight"])

    def rms_norm_inplace(self, name: str, x: Any) -> Any:
        """Apply an RMS norm to a view, whose tensor is overwritten."""
        normed = self.ggml.ggml_rms_norm_inplace(self.context, x, self.config.norm_eps)
        return self.ggml.ggml_mul_inplace(self.context, normed, self.weights[f"{name}.weight"])

    def ffn(self, name: str, x: Any) -> Any:
        """Apply a feed-forward network of the blocks."""
        if self.config.ffn == "gelu":
            return self.gelu_ffn(name, x)
        up = self.linear(f"{name}.up", x)
        gate = self._in_pieces(self.linear(f"{name}.gate", x))
        active = self.ggml.ggml_swiglu_split(self.context, gate, self._in_pieces(up))
        return self.linear(f"{name}.down", self._whole(active, up))

    def gelu_ffn(self, name: str, x: Any) -> Any:
        """Apply a feed-forward network with GELU."""
        up = self.linear(f"{name}.up", x)
        active = self.ggml.ggml_gelu_erf_inplace(self.context, self._in_pieces(up))
        return self.linear(f"{name}.down", self._whole(active, up))

    def _biased(self, name: str, x: Any) -> Any:
        bias = f"{name}.bias"
        return self.ggml.ggml_add(self.context, x, self.weights[bias]) if bias in self.weights else x

    def _in_pieces(self, x: Any) -> Any:
        """Reshape each row into many, because ggml splits an elementwise function by rows."""
        hidden, places = x.contents.ne[0], x.contents.ne[1]
        pieces = gcd(hidden, PIECES)
        return self.ggml.ggml_reshape_2d(self.context, x, hidden // pieces, pieces * places)

    def _whole(self, pieces: Any, like: Any) -> Any:
        return self.ggml.ggml_reshape_2d(self.context, pieces, like.contents.ne[0], like.contents.ne[1])
