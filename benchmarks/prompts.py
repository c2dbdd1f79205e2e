"""Measures how fast every engine reads prompts, and how far the result is from reading one token at a time.

    python benchmarks/prompts.py runs/wiki-d2-c256 --data data/wiki
    python benchmarks/prompts.py smollm2-tuned --data data/smollm2 --peers   # and llama.cpp with the plain model

All engines take turns. The last line is one JSON line.
"""

import argparse
import json
import platform
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from timing import interleaved_medians

import contextready
from contextready.bench.llama import Shape, is_llama, weights_of
from contextready.bench.peers import LlamaCppPeer
from contextready.data.shards import Data
from contextready.infer.engine import Engine
from contextready.infer.ggml.engine import GgmlEngine
from contextready.infer.ggml.file import write_gguf
from contextready.infer.threads import torch_threads
from contextready.infer.torch_engine import torch_engine
from contextready.model.context_ready import ContextReady
from contextready.model.transformer import Transformer
from contextready.solve.prompt_reader import SOLVERS

NEW = 20
"""Tokens of every greedy continuation."""


class Way(NamedTuple):
    """An engine with one way to read prompts."""

    name: str
    engine: Engine


def ways_of(model: ContextReady, folder: Path, capacity: int, precisions: list[str]) -> Iterator[Way]:
    """Every engine with every solver; the first one reads one token at a time in fp32."""
    for solver in reversed(SOLVERS):
        for bf16 in ("off", "on") if solver != "sequential" else ("off",):
            engine = torch_engine(model, capacity=capacity, solver=solver, bf16_passes=bf16)
            yield Way(f"eager f32, {solver}{', early passes in bf16' if bf16 == 'on' else ''}", engine)
    for precision in precisions:
        path = folder / f"{precision}.gguf"
        write_gguf(model, path, capacity, precision)
        for solver in reversed(SOLVERS):
            yield Way(f"ggml {precision}, {solver}", GgmlEngine(path, capacity=capacity, solver=solver))


def read(engine: Engine, prompt: list[int]) -> np.ndarray:
    """Read a prompt into an empty row; returns the logits."""
    engine.free(0)
    return engine.read(0, prompt)[0]


def continued(engine: Engine, prompt: list[int]) -> list[int]:
    """Continue a prompt greedily."""
    tokens = [int(read(engine, prompt).argmax())]
    while len(tokens) < NEW:
        tokens.append(int(engine.step(tokens[-1:])[0].argmax()))
    return tokens


def measure(ways: list[Way], peers: list[LlamaCppPeer], text: np.ndarray, length: int, rounds: int) -> dict[str, Any]:
    """Time all of them on one prompt, and compare the engines' logits with those of the first one."""
    prompt = text[:length].tolist()
    calls: list[Callable[[], object]] = [lambda engine=way.engine: read(engine, prompt) for way in ways]
    calls += [lambda peer=peer: peer.read(prompt) for peer in peers]
    seconds = interleaved_medians(calls, rounds, warmups=1)
    exact = read(ways[0].engine, prompt)
    found: dict[str, Any] = {}
    for way, taken in zip(ways, seconds, strict=False):
        way.engine.free(0)
        logits, info = way.engine.read(0, prompt)
        error = float(np.linalg.norm(logits - exact) / np.linalg.norm(exact))
        found[way.name] = {"tokens_per_second": length / taken, "error": error, "cost": info.cost}
    for peer, taken in zip(peers, seconds[len(ways) :], strict=True):
        found[f"{peer.name} {peer.precision}, plain model"] = {"tokens_per_second": length / taken}
    return found


def main() -> None:
    """Measure and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a run, a checkpoint or a converted model")
    parser.add_argument("--data", type=Path, required=True, help="prepared data, whose validation text is read")
    parser.add_argument("--lengths", default="512,2048", help="lengths of the prompts (default: 512,2048)")
    parser.add_argument("--precisions", default="f32,q8_0", help="of ggml (default: f32,q8_0)")
    parser.add_argument("--peers", action="store_true", help="compare with llama.cpp, which reads with the plain model")
    parser.add_argument("--greedy", type=int, default=0, help="number of prompts to continue greedily (default: 0)")
    parser.add_argument("--greedy-length", type=int, default=256, help="their length (default: 256)")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds (default: 3)")
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    options = parser.parse_args()
    model = contextready.load(options.model).model.eval()
    backbone = model.backbone
    assert isinstance(backbone, Transformer)
    threads = torch_threads(backbone.width)
    torch.set_num_threads(threads)
    lengths, precisions = [int(one) for one in options.lengths.split(",")], options.precisions.split(",")
    text = Data(options.data, verify=[]).tokens("val").read(0, max(lengths)).astype(np.int64)
    peers: list[LlamaCppPeer] = []
    if options.peers and is_llama(backbone.config):
        shape = Shape.like(backbone.config)
        peers = [LlamaCppPeer(shape, one, threads, max(lengths) + NEW, weights_of(backbone)) for one in precisions]
    result = {"benchmark": "prompts", "torch": torch.__version__, "machine": platform.machine(), "threads": threads}
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        ways = list(ways_of(model, Path(folder), max(lengths) + NEW, precisions))
        result["lengths"] = {length: measure(ways, peers, text, length, options.rounds) for length in lengths}
        for length, found in result["lengths"].items():
            for name, one in found.items():
                error = f", error {one['error']:.1e}, {one['cost'] or 0:.2f} passes" if "error" in one else ""
                print(f"{length:,} tokens, {name}: {one['tokens_per_second']:.0f} tokens/s{error}")
        if options.greedy:
            result["greedy"] = greedy(ways, options)
            print(f"identical greedy continuations: {result['greedy']}")
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))
    for way in ways:
        if isinstance(way.engine, GgmlEngine):
            way.engine.close()


def greedy(ways: list[Way], options: argparse.Namespace) -> dict[str, str]:
    """Count the prompts that the default solver, with and without bf16, continues as reading one by one does."""
    length, tokens = options.greedy_length, Data(options.data, verify=[]).tokens("val")
    prompts = [tokens.read(i * length, length).astype(np.int64).tolist() for i in range(options.greedy)]
    expected = [continued(ways[0].engine, prompt) for prompt in prompts]
    found = {}
    for way in ways:
        if way.name.startswith(f"eager f32, {SOLVERS[0]}"):
            same = sum(continued(way.engine, p) == one for p, one in zip(prompts, expected, strict=True))
            found[way.name] = f"{same} of {len(prompts)}"
    return found


if __name__ == "__main__":
    main()
