"""Measures how many tokens 1 to 16 rows generate together, and that every row gets what it would get alone.

    python benchmarks/rows.py                       # a random D=2 C=256, and a random GPT-2 in the wrapper
    python benchmarks/rows.py smollm2-crt           # and converted models from their folders
    python benchmarks/rows.py --out docs/results/rows.json

The last line is one JSON line.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import contextready
from contextready.infer.engine import Engine
from contextready.infer.ggml.engine import GgmlEngine
from contextready.infer.ggml.file import write_gguf
from contextready.infer.threads import torch_threads
from contextready.infer.torch_engine import torch_engine
from contextready.model.config import ModelConfig
from contextready.model.context_ready import ContextReady, build_model
from contextready.model.transformer import Transformer

ROWS = (1, 2, 4, 8, 16)
CONTEXT, WARM_UP = 128, 4
Make = Callable[[int], Engine]


def native(width: int = 256, layers: int = 2) -> ContextReady:
    """A random native model whose corrections are small, as in trained models."""
    torch.manual_seed(0)
    model = build_model(ModelConfig(4096, width, layers, width // 32, correction="add", correction_scale=0.02))
    with torch.no_grad():
        for weight in model.correction.parameters():
            weight.add_(0.02 * torch.randn_like(weight))
    return model.eval()


def wrapped() -> ContextReady:
    """A random GPT-2 with a small correction, which has no native form."""
    import transformers

    from contextready.hf import ContextReadyForCausalLM

    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=4096, n_embd=384, n_layer=6, n_head=6, n_positions=512)
    model = ContextReadyForCausalLM.wrap(transformers.GPT2LMHeadModel(config).eval()).model
    with torch.no_grad():
        for weight in model.correction.parameters():
            weight.add_(0.01 * torch.randn_like(weight))
    return model.eval()


def engines_of(model: ContextReady, folder: Path, precisions: list[str], steps: int) -> Iterator[tuple[str, Make]]:
    """The engines that run a model."""
    capacity = CONTEXT + WARM_UP + steps

    def in_ggml(path: Path) -> Make:
        return lambda rows: GgmlEngine(path, rows=rows, capacity=capacity)

    yield "eager f32", lambda rows: torch_engine(model, "eager", rows=rows, capacity=capacity)
    if isinstance(model.backbone, Transformer):
        yield "compiled f32", lambda rows: torch_engine(model, "compiled", rows=rows, capacity=capacity)
        for precision in precisions:
            path = folder / f"{precision}.gguf"
            write_gguf(model, path, capacity, precision)
            yield f"ggml {precision}", in_ggml(path)


def decode(engine: Engine, steps: int) -> tuple[list[list[int]], float]:
    """Greedy tokens of every row after its own prompt, and the median seconds of a step."""
    rows, seconds = range(engine.rows), []
    prompts = [np.random.default_rng(row).integers(engine.vocab_size, size=CONTEXT).tolist() for row in rows]
    tokens = [int(engine.read(row, prompt)[0].argmax()) for row, prompt in zip(rows, prompts, strict=True)]
    out = [[token] for token in tokens]
    for _ in range(WARM_UP + steps - 1):
        start = time.perf_counter()
        tokens = engine.step(tokens).argmax(axis=1).tolist()
        seconds.append(time.perf_counter() - start)
        for row in rows:
            out[row].append(tokens[row])
    return out, statistics.median(seconds[WARM_UP:])


def measure(make: Make, most: int, steps: int, rounds: int) -> tuple[dict[int, float], int]:
    """Tokens per second for each number of rows, which take turns, and in how many rows a token is not as alone."""
    counts = [rows for rows in ROWS if rows <= most]
    engines = {rows: make(rows) for rows in counts}
    texts: dict[int, list[list[int]]] = {}
    times: dict[int, list[float]] = {rows: [] for rows in counts}
    for number in range(rounds):
        for rows in counts if number % 2 == 0 else reversed(counts):
            for row in range(rows):
                engines[rows].free(row)
            texts[rows], seconds = decode(engines[rows], steps)
            times[rows].append(seconds)
    different = 0
    for row, text in enumerate(texts[counts[-1]]):
        # Alone in the engine with one row.
        engines[1].free(0)
        prompt = np.random.default_rng(row).integers(engines[1].vocab_size, size=CONTEXT).tolist()
        tokens = [int(engines[1].read(0, prompt)[0].argmax())]
        while len(tokens) < len(text):
            tokens.append(int(engines[1].step(tokens[-1:])[0].argmax()))
        different += tokens != text
    for engine in engines.values():
        if isinstance(engine, GgmlEngine):
            engine.close()
    return {rows: rows / statistics.median(times[rows]) for rows in counts}, different


def main() -> None:
    """Measure every model and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, help="folders of converted models")
    parser.add_argument("--precisions", default="f32,q8_0", help="of ggml (default: f32,q8_0)")
    parser.add_argument("--steps", type=int, default=24, help="tokens per row and round (default: 24)")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds (default: 5)")
    parser.add_argument("--most", type=int, default=max(ROWS), help="the largest number of rows (default: 16)")
    parser.add_argument("--quick", action="store_true", help="few short runs: a test, not a measurement")
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.rounds, options.most = 4, 1, 2
    models: dict[str, Callable[[], ContextReady]] = {"native D=2 C=256": native, "wrapped GPT-2 N=6 C=384": wrapped}
    models |= {path.name: lambda path=path: contextready.load(path).model.eval() for path in options.folders}
    found: dict[str, Any] = {}
    for name, make_model in models.items():
        model = make_model()
        threads = torch_threads(model.backbone.width)
        torch.set_num_threads(threads)
        found[name] = {}
        with tempfile.TemporaryDirectory() as folder:
            for engine, make in engines_of(model, Path(folder), options.precisions.split(","), options.steps):
                with torch.inference_mode():
                    speeds, different = measure(make, options.most, options.steps, options.rounds)
                found[name][engine] = {"tokens_per_second": speeds, "rows_unlike_alone": different}
                curve = ", ".join(f"{rows}: {speed:.0f} ({speed / speeds[1]:.2f} ×)" for rows, speed in speeds.items())
                print(f"{name}, {engine}, {threads} threads: tokens/s by rows {curve}; {different} rows unlike alone")
    result = {"benchmark": "rows", "torch": torch.__version__, "machine": platform.machine(), "models": found}
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
