"""A slow, literal, independent implementation of the paper's equations, with loops over positions, heads and pairs.

It shares no code with the package and uses numpy only. Names follow the paper: e, z, D, K, correction.
"""

import math
from dataclasses import dataclass, field

import numpy as np

Vector = np.ndarray


@dataclass
class Linear:
    weight: np.ndarray
    bias: np.ndarray | None = None

    def __call__(self, x: Vector) -> Vector:
        y = np.array([row @ x for row in self.weight])
        return y if self.bias is None else y + self.bias


@dataclass
class LN:
    weight: np.ndarray
    bias: np.ndarray | None = None
    eps: float = 1e-5

    def __call__(self, x: Vector) -> Vector:
        mean = sum(x) / len(x)
        variance = sum((v - mean) ** 2 for v in x) / len(x)
        y = (x - mean) / math.sqrt(variance + self.eps) * self.weight
        return y if self.bias is None else y + self.bias


@dataclass
class RMS:
    """Llama's norm: divides by the root mean square."""

    weight: np.ndarray
    eps: float

    def __call__(self, x: Vector) -> Vector:
        return np.array([v / math.sqrt(sum(u * u for u in x) / len(x) + self.eps) for v in x]) * self.weight


@dataclass
class FFN:
    up: Linear
    down: Linear

    def __call__(self, x: Vector) -> Vector:
        h = self.up(x)
        return self.down(np.array([v * 0.5 * (1.0 + math.erf(v / math.sqrt(2.0))) for v in h]))


@dataclass
class GatedFFN:
    """Llama's network: SiLU of the gate times up, then down."""

    gate: Linear
    up: Linear
    down: Linear

    def __call__(self, x: Vector) -> Vector:
        gate, up = self.gate(x), self.up(x)
        return self.down(np.array([g / (1.0 + math.exp(-g)) * u for g, u in zip(gate, up, strict=True)]))


@dataclass
class Layer:
    norm_a: LN | RMS
    q: Linear
    k: Linear
    v: Linear
    out: Linear
    norm_f: LN | RMS
    ffn: FFN | GatedFFN
    norm_q: RMS | None = None
    norm_k: RMS | None = None
    rotates: bool = True


@dataclass
class Llama3:
    """Llama 3's scaling of the rotary angles, by their wavelength."""

    factor: float
    low: float
    high: float
    length: int

    def __call__(self, frequency: float) -> float:
        wavelength = 2 * math.pi / frequency
        if wavelength < self.length / self.high:
            return frequency
        if wavelength > self.length / self.low:
            return frequency / self.factor
        smooth = (self.length / wavelength - self.low) / (self.high - self.low)
        return (1 - smooth) * frequency / self.factor + smooth * frequency


@dataclass
class Model:
    """Weights of a roformer and, unless `variant` is none, of its correction."""

    embedding: np.ndarray
    layers: list[Layer]
    norm_out: LN | RMS
    head: Linear
    heads: int
    window: int | None = None
    rope_base: float | None = 10_000.0
    """None: neighbouring channels turn by 0, 1, 2, … radians per position."""
    scaling: float | Llama3 = 1.0
    """All frequencies are divided by a number, or scaled as in Llama 3."""
    size: int | None = None
    """Channels per head; None: all heads together are as wide as the model."""
    kv_heads: int | None = None
    """Heads of keys and values; None: as many as heads."""
    extra: tuple[LN | RMS, FFN | GatedFFN] | None = None
    variant: str | None = None
    corr_norms: dict[str, LN] | None = None
    corr_ffn: FFN | None = None
    corr_scale: np.ndarray | float = 1.0


@dataclass
class Caches:
    """K_i and V_i of every layer: lists over positions."""

    keys: list[list[Vector]] = field(default_factory=list)
    values: list[list[Vector]] = field(default_factory=list)


def rope(x: Vector, position: int, base: float | None, scaling: float | Llama3 = 1.0) -> Vector:
    """Rotate the pair (i, i + half) of one head's vector by position / base^(2i / size).

    Without a base, rotate the pair (2i, 2i + 1) by i radians per position.
    """

    def scaled(frequency: float) -> float:
        return scaling(frequency) if isinstance(scaling, Llama3) else frequency / scaling

    half = len(x) // 2
    y = np.zeros_like(x)
    for i in range(half):
        first, second = (2 * i, 2 * i + 1) if base is None else (i, i + half)
        angle = position * i if base is None else position * scaled(base ** (-2 * i / len(x)))
        y[first] = x[first] * math.cos(angle) - x[second] * math.sin(angle)
        y[second] = x[first] * math.sin(angle) + x[second] * math.cos(angle)
    return y


def attention(model: Model, layer: Layer, x: Vector, t: int, keys: list[Vector], values: list[Vector]) -> Vector:
    """Attn(x; K, V) at position t; adds t's key and value to the caches first."""
    size = model.size or len(x) // model.heads
    kv_heads = model.kv_heads or model.heads

    def head(vector: Vector, h: int) -> Vector:
        return vector[h * size : (h + 1) * size]

    def placed(vector: Vector, norm: RMS | None) -> Vector:
        vector = vector if norm is None else norm(vector)
        return rope(vector, t, model.rope_base, model.scaling) if layer.rotates else vector

    q, k, v = layer.q(x), layer.k(x), layer.v(x)
    keys.append(np.concatenate([placed(head(k, h), layer.norm_k) for h in range(kv_heads)]))
    values.append(v)
    first = 0 if model.window is None else max(0, t - model.window + 1)
    outputs = []
    for h in range(model.heads):
        shared = h // (model.heads // kv_heads)
        q_h = placed(head(q, h), layer.norm_q)
        scores = [float(q_h @ head(keys[s], shared)) / math.sqrt(size) for s in range(first, t + 1)]
        weights = [math.exp(score - max(scores)) for score in scores]
        y_h = np.zeros(size)
        for s, weight in zip(range(first, t + 1), weights, strict=True):
            y_h += weight / sum(weights) * head(values[s], shared)
        outputs.append(y_h)
    return layer.out(np.concatenate(outputs))


def block_unit(model: Model, x: Vector, t: int, caches: Caches) -> Vector:
    """z_t = h^(D) from h^(0) = x."""
    h = x
    for i, layer in enumerate(model.layers):
        a = h + attention(model, layer, layer.norm_a(h), t, caches.keys[i], caches.values[i])
        h = a + layer.ffn(layer.norm_f(a))
    if model.extra is not None:
        norm, ffn = model.extra
        h = h + ffn(norm(h))
    return h


def correction(model: Model, z_prev: Vector, x_prev: Vector, e: Vector) -> Vector:
    """correction_t from the previous block output (and, for block_head, the previous block input)."""
    if model.variant in ("add", "tied"):
        ffn = model.corr_ffn if model.variant == "add" else model.layers[-1].ffn
        return model.corr_scale * ffn(model.corr_norms["norm"](z_prev + e))
    if model.variant == "tied_norm":
        return model.layers[-1].ffn(model.layers[-1].norm_f(z_prev + e))
    if model.variant == "balanced":
        both = model.corr_norms["norm_z"](z_prev) + model.corr_norms["norm_e"](e)
        return model.corr_scale * model.corr_ffn(both)
    if model.variant == "blind":
        return model.corr_scale * model.corr_ffn(model.corr_norms["norm"](z_prev))
    if model.variant == "memoryless":
        return model.corr_scale * model.corr_ffn(model.corr_norms["norm"](e))
    if model.variant == "concat":
        return model.corr_scale * model.corr_ffn(model.corr_norms["norm"](np.concatenate([z_prev, e])))
    if model.variant == "concat_z":
        return model.corr_scale * model.corr_ffn(np.concatenate([model.corr_norms["norm"](z_prev), e]))
    if model.variant == "block_head":
        return z_prev - x_prev
    raise AssertionError(model.variant)


def fresh_caches(model: Model) -> Caches:
    return Caches([[] for _ in model.layers], [[] for _ in model.layers])


def run_blocks(model: Model, x: list[Vector]) -> list[Vector]:
    """The D-block unit over a whole sequence."""
    caches = fresh_caches(model)
    return [block_unit(model, x_t, t, caches) for t, x_t in enumerate(x)]


def predict(model: Model, z: list[Vector]) -> np.ndarray:
    return np.stack([model.head(model.norm_out(z_t)) for z_t in z])


def transformer(model: Model, tokens: list[int]) -> np.ndarray:
    return predict(model, run_blocks(model, [model.embedding[token] for token in tokens]))


def trajectory(
    model: Model, tokens: list[int], K: int, cumulative: bool = False
) -> tuple[list[list[Vector]], list[list[Vector]]]:
    """Parallel training (Section 3.2): z^(1) … z^(K) and correction^(0) … correction^(K)."""
    e = [model.embedding[token] for token in tokens]
    zero = np.zeros_like(e[0])
    corrections = [zero for _ in e]
    base = list(e)
    all_z, all_corrections = [], [corrections]
    for _ in range(K):
        x = [base[t] + corrections[t] for t in range(len(e))]
        z = run_blocks(model, x)
        if cumulative:
            base = x
        corrections = [
            correction(model, z[t - 1] if t else zero, x[t - 1] if t else zero, base[t]) for t in range(len(e))
        ]
        all_z.append(z)
        all_corrections.append(corrections)
    return all_z, all_corrections


def parallel(model: Model, tokens: list[int], K: int, cumulative: bool = False) -> np.ndarray:
    """Logits after K iterations."""
    return predict(model, trajectory(model, tokens, K, cumulative)[0][-1])


def empirical_rate(model: Model, tokens: list[int], K: int) -> float:
    """max_t ‖c_{K,t} - c_{K-1,t}‖ / ‖c_{K-1,t} - c_{K-2,t}‖, over positions whose correction still moved."""
    c = trajectory(model, tokens, K)[1]
    ratios = []
    for t in range(len(tokens)):
        before = math.sqrt(sum((c[K - 1][t] - c[K - 2][t]) ** 2))
        if before > 1e-12:
            ratios.append(math.sqrt(sum((c[K][t] - c[K - 1][t]) ** 2)) / before)
    return max(ratios)


def channel_rate(model: Model, rows: list[list[int]], K: int) -> float:
    """max |c_K - c_{K-1}| / max |c_{K-1} - c_{K-2}|, each over all rows, positions and channels."""
    largest = [0.0, 0.0]
    for tokens in rows:
        c = trajectory(model, tokens, K)[1]
        for t in range(len(tokens)):
            for i, k in enumerate((K - 1, K)):
                largest[i] = max(largest[i], *(abs(v) for v in c[k][t] - c[k - 1][t]))
    return largest[1] / largest[0]


def streaming(model: Model, tokens: list[int]) -> np.ndarray:
    """Algorithm 1."""
    caches = fresh_caches(model)
    z_prev = x_prev = np.zeros(model.embedding.shape[1])
    outputs = []
    for t, token in enumerate(tokens):
        e = model.embedding[token]
        h = e + correction(model, z_prev, x_prev, e)
        x_prev = h
        z_prev = block_unit(model, h, t, caches)
        outputs.append(z_prev)
    return predict(model, outputs)
