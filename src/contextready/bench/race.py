"""Measures how fast models generate, relative to the memory bandwidth; the engines being compared take turns."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from contextready.bench.llama import PRECISIONS, Shape, Weights, is_llama, weights_of
from contextready.bench.peers import HuggingFacePeer, LlamaCppPeer, Peer
from contextready.infer.engine import Engine
from contextready.infer.ggml.engine import GgmlEngine
from contextready.infer.ggml.file import write_gguf
from contextready.infer.torch_engine import torch_engine
from contextready.model.cache import KVCache
from contextready.model.config import ModelConfig
from contextready.model.context_ready import ContextReady
from contextready.model.cost import Account
from contextready.model.narrow import narrowed
from contextready.model.state import State
from contextready.model.transformer import Transformer

BITS = {"f32": 32.0, "bf16": 16.0, "f16": 16.0, "q8_0": 8.5, "q4_0": 4.5, "q4_k": 4.5}
"""Bits per weight of a matrix, including the scales of quantised blocks."""
PROBE = 2**27
"""Number of floats that the bandwidth probe reads: 512 MB, far more than any cache holds."""
WARM_UP = 3


class Contestant(Protocol):
    """One of the engines being compared."""

    label: str
    engine: str
    precision: str

    def bytes_per_token(self, context: int) -> float:
        """Bytes that a step must read: every matrix once, and the keys and values of the context."""

    def decode(self, context: int, new: int) -> list[float]:
        """Seconds of each of `new` steps after `context` tokens, without warm-up."""

    def close(self) -> None:
        """Free its memory."""


class EngineContestant:
    """An engine of this package, which decodes greedily after a context of random keys and values."""

    def __init__(self, label: str, account: Account, engine: Engine, precision: str, close: Callable[[], None]) -> None:
        self.label, self.account, self.runs, self.precision, self.close = label, account, engine, precision, close
        self.engine = engine.name

    def bytes_per_token(self, context: int) -> float:
        """Bytes of every matrix, and of the state in fp32."""
        weights = self.account.macs * BITS[self.precision] / 8
        return weights + self.account.state_bytes(context)

    def decode(self, context: int, new: int) -> list[float]:
        """Seconds of each step, which runs the model and takes the argmax."""
        self.runs.load(0, random_state(self.account.config, context))
        seconds, token = [], 0
        for _ in range(WARM_UP + new):
            start = time.perf_counter()
            token = int(self.runs.step([token])[0].argmax())
            seconds.append(time.perf_counter() - start)
        return seconds[WARM_UP:]


class PeerContestant:
    """A model in another program."""

    def __init__(self, label: str, account: Account, peer: Peer) -> None:
        self.label, self.account, self.peer = label, account, peer
        self.engine, self.precision, self.close = peer.name, peer.precision, peer.close

    def bytes_per_token(self, context: int) -> float:
        """Bytes of its own matrices, and of keys and values in fp32 for f32 models or in f16 for others."""
        kv = self.account.kv_bytes_per_token() * context
        return self.peer.bytes_per_token + (kv if self.precision == "f32" else kv / 2)

    def decode(self, context: int, new: int) -> list[float]:
        """Seconds of each step, without warm-up."""
        return self.peer.decode(context, new)


@dataclass(frozen=True)
class Timing:
    """Result of one engine at one context length."""

    label: str
    engine: str
    precision: str
    context: int
    seconds: float
    """Time per step: the median over rounds of each round's median."""
    low: float
    high: float
    """The 10th and 90th percentile of all steps."""
    bytes_per_token: float
    of_bandwidth: float
    """Bytes per second divided by the bandwidth measured in the same round; the median over rounds."""
    growth: float
    """Time per step divided by that after the first context."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second."""
        return 1.0 / self.seconds

    @property
    def gigabytes_per_second(self) -> float:
        """Gigabytes read per second."""
        return self.bytes_per_token / self.seconds / 1e9


def random_state(config: ModelConfig, position: int) -> State:
    """Create a state with one row that has read `position` tokens, with random keys and values."""
    held = position if config.window is None else min(position, config.window)
    layers = tuple(
        (
            torch.randn(1, config.shared_heads, held, config.head_size),
            torch.randn(1, config.shared_heads, held, config.head_size),
        )
        for _ in range(config.layers)
    )
    cache = KVCache(layers, position, config.window, config.window)
    return State(cache, torch.randn(1, min(position, 1) + 1, config.width), 1)


def in_files(precisions: Sequence[str]) -> list[str]:
    """Return those of the precisions that files of weights are written in."""
    return [precision for precision in precisions if precision != "bf16"]


def bandwidth_probe() -> Callable[[], float]:
    """Create a function that reads 512 MB with all threads of PyTorch and returns bytes per second."""
    numbers = torch.ones(PROBE)

    def probe() -> float:
        start = time.perf_counter()
        numbers.sum()
        return numbers.nbytes / (time.perf_counter() - start)

    probe()
    return probe


@dataclass(frozen=True)
class Hardware:
    """The resources of each engine."""

    capacity: int
    """Number of tokens that a stream can hold."""
    threads: int
    scratch: Path
    """Folder for temporary exported files."""


def engine_contestants(
    label: str,
    account: Account,
    model: ContextReady | Path,
    engines: Sequence[str],
    precisions: Sequence[str],
    *,
    hardware: Hardware,
) -> list[Contestant]:
    """Open one model in each engine and precision; bf16 is for the engines of PyTorch, which always run f32 too."""
    capacity, threads, scratch = hardware.capacity, hardware.threads, hardware.scratch

    def in_ggml(path: Path, precision: str | None = None) -> Contestant:
        engine = GgmlEngine(path, capacity=capacity, threads=threads)
        return EngineContestant(label, account, engine, precision or engine.exported.type, engine.close)

    if isinstance(model, Path):
        return [in_ggml(model)]
    contestants: list[Contestant] = []
    for name in engines:
        if name != "ggml":
            engine = torch_engine(model, name, capacity=capacity)
            contestants.append(EngineContestant(label, account, engine, "f32", lambda: None))
            if "bf16" in precisions:
                engine = torch_engine(narrowed(model), name, capacity=capacity)
                contestants.append(EngineContestant(label, account, engine, "bf16", lambda: None))
            continue
        for precision in in_files(precisions):
            path = scratch / f"{len(list(scratch.iterdir()))}.gguf"
            write_gguf(model, path, capacity, precision)
            contestants.append(in_ggml(path, precision))
    return contestants


def peer_contestants(
    account: Account, model: ContextReady | Path, precisions: Sequence[str], hardware: Hardware
) -> list[Contestant]:
    """Open Llama models in Hugging Face (fp32) and in llama.cpp (every precision that it has here).

    They have the weights of the model itself, without its correction, if it is a Llama model, and otherwise random ones
    and a shape like its own.
    """
    config = account.config
    shape, backbone = Shape.like(config), None if isinstance(model, Path) else model.backbone
    same = isinstance(backbone, Transformer) and is_llama(config)

    def weights() -> Weights | None:
        return weights_of(backbone) if isinstance(backbone, Transformer) and same else None

    peers: list[Peer] = [HuggingFacePeer(shape, weights())]
    chosen = [one for one in precisions if one in PRECISIONS]
    peers += [LlamaCppPeer(shape, one, hardware.threads, hardware.capacity, weights()) for one in chosen]
    label = "same weights, plain" if same else f"Llama N={config.layers} C={config.width}"
    return [PeerContestant(label, account, peer) for peer in peers]


def race(
    contestants: Sequence[Contestant], contexts: Sequence[int], new: int, rounds: int, tell: Callable[[str], None]
) -> tuple[list[Timing], float]:
    """Let all engines take turns decoding after each context; returns the timings and the memory bandwidth.

    `tell` receives a line of progress before every round.
    """
    probe, bandwidths = bandwidth_probe(), []
    timings = []
    shortest: dict[int, float] = {}
    for context in contexts:
        steps: list[list[list[float]]] = [[] for _ in contestants]
        shares: list[list[float]] = [[] for _ in contestants]
        for number in range(rounds):
            tell(f"context {context}, round {number + 1} of {rounds}")
            order = range(len(contestants)) if number % 2 == 0 else reversed(range(len(contestants)))
            for i in order:
                # Bandwidth varies with the machine's other work, so it is measured before and after every turn.
                before = probe()
                seconds = contestants[i].decode(context, new)
                bandwidth = statistics.mean((before, probe()))
                bandwidths.append(bandwidth)
                steps[i].append(seconds)
                speed = contestants[i].bytes_per_token(context) / statistics.median(seconds)
                shares[i].append(speed / bandwidth)
        for i, contestant in enumerate(contestants):
            middle = statistics.median(statistics.median(seconds) for seconds in steps[i])
            low, high = np.quantile(np.concatenate(steps[i]), (0.1, 0.9)).tolist()
            shortest.setdefault(i, middle)
            timings.append(
                Timing(
                    label=contestant.label,
                    engine=contestant.engine,
                    precision=contestant.precision,
                    context=context,
                    seconds=middle,
                    low=low,
                    high=high,
                    bytes_per_token=contestant.bytes_per_token(context),
                    of_bandwidth=statistics.median(shares[i]),
                    growth=middle / shortest[i],
                )
            )
    return timings, statistics.median(bandwidths)
