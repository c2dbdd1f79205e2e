"""Measures time and peak memory of the gradient modes, and compares the exact gradient with an autograd loop.

Time is in units of one forward pass (blocks and correction), with the prediction from the arithmetic beside it; the
modes take turns. Memory is the peak growth of a separate process over three whole steps (weights, gradients, moments,
activations), with the prediction of `crt plan` beside it. The C library is configured to return freed memory at once,
so that its caching is not measured. The last line is one JSON line.

    python benchmarks/gradients.py [--quick]
"""

import argparse
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from timing import interleaved_medians, median_ratio

from contextready import ContextReady, ModelConfig, build_model
from contextready.runs.config import RunConfig, build_run
from contextready.solve.bptt import DifferentiableStream
from contextready.train.objective import Objective
from contextready.train.plan import make_plan
from contextready.train.trainer import make_optimizer

MODES: dict[str, dict[str, object]] = {
    "unroll": {},
    "unroll, recomputed": {"checkpoint_passes": True},
    "truncated J=1": {"gradient": "truncated"},
    "truncated J=2": {"gradient": "truncated", "truncated_passes": 2},
    "implicit m=0": {"gradient": "implicit", "adjoint_steps": 0},
    "implicit m=2": {"gradient": "implicit", "adjoint_steps": 2},
    "implicit m=K": {"gradient": "implicit"},
    "bptt": {"gradient": "bptt"},
}
SMALL = {"width": 64, "heads": 2, "vocab_size": 64, "block_size": 16, "batch_size": 2}
FULL = {"width": 256, "heads": 4, "vocab_size": 512, "block_size": 128, "batch_size": 8}
MINIATURE = {"width": 128, "heads": 4, "vocab_size": 4096, "block_size": 128, "batch_size": 16, "layers": 1}


def run_of(mode: str, passes: int, **shape: int) -> RunConfig:
    """Settings of a run in this mode; m=K uses as many adjoint products as passes."""
    options = MODES[mode] | ({"adjoint_steps": passes} if mode == "implicit m=K" else {})
    base = {"data": "-", "out": "-", "correction": "add", "passes": passes, "precision": "fp32", "gradient": "unroll"}
    return build_run(base | shape | options)


def step_of(config: RunConfig, model: ContextReady) -> partial[object]:
    """Create a function that runs one batch forward and backward."""
    t = config.train
    objective = Objective.for_run(model, t)
    tokens_BT = torch.randint(config.model.vocab_size, (t.batch_size, t.block_size))
    return partial(objective.backward, tokens_BT, tokens_BT, None if t.passes is None else int(t.passes))


def make(config: ModelConfig) -> ContextReady:
    """Create a model with random weights."""
    torch.manual_seed(0)
    return build_model(config)


def predicted(mode: str, passes: int) -> int:
    """Predict forward units: 1 per pass, 2 more per pass that the gradient flows through, 1 per adjoint product."""
    if mode == "bptt":
        return 3
    through = {"unroll": passes, "unroll, recomputed": passes, "truncated J=2": min(2, passes)}.get(mode, 1)
    again = {"unroll, recomputed": passes, "implicit m=2": 2, "implicit m=K": passes}.get(mode, 0)
    return passes + 2 * through + again


def times(shape: dict[str, int], depths: list[int], rounds: int) -> list[dict[str, object]]:
    """Measure a step of each mode and K, in forward units."""
    cases = [(mode, k) for mode in MODES for k in (depths if mode != "bptt" else depths[:1])]
    configs = [run_of(mode, k, **shape) for mode, k in cases]
    model = make(configs[0].model)
    tokens_BT = torch.randint(shape["vocab_size"], (shape["batch_size"], shape["block_size"]))

    @torch.no_grad()
    def one_pass() -> None:
        e_BTC = model.backbone.embed(tokens_BT)
        model.recur(e_BTC, e_BTC)

    forward, *seconds = interleaved_medians([one_pass, *(step_of(c, model) for c in configs)], rounds, warmups=1)
    return [
        {"mode": mode, "K": None if mode == "bptt" else k, "ms": s * 1e3, "units": s / forward}
        | {"predicted": predicted(mode, k)}
        for (mode, k), s in zip(cases, seconds, strict=True)
    ]


def status(key: str) -> int:
    """Memory of this process in bytes, as the system reports it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def grown(mode: str, passes: int, shape: dict[str, int]) -> int:
    """Peak growth of this process in bytes over three whole steps."""
    for size in (SMALL | {"layers": 1}, shape):
        # The small model runs first, because what kernels load on first use does not belong to the step.
        before = status("VmRSS")
        config = run_of(mode, passes, **size)
        model = make(config.model)
        optimizer, step = make_optimizer(model, config), step_of(config, model)
        for _ in range(3):
            step()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return status("VmHWM") - before


def measure_memory(mode: str, passes: int, shape: dict[str, int]) -> tuple[int, int]:
    """Memory of a step in bytes: measured in a separate process, and planned."""
    words = [sys.executable, __file__, "--memory", mode, str(passes), json.dumps(shape)]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    return int(done.stdout), make_plan(run_of(mode, passes, **shape), 1).total


def stream_speed(width: int, batch: int, tokens: int, rounds: int) -> dict[str, float]:
    """Compare the exact gradient with an autograd loop that concatenates its caches at every token."""
    model = make(ModelConfig(64, width, 1, heads=4, correction="add"))
    stream, tokens_BT = DifferentiableStream(model), torch.randint(64, (batch, tokens))

    def step(exact: bool) -> None:
        model.zero_grad()
        e_BTC = model.backbone.embed(tokens_BT)
        z_BTC = stream(e_BTC) if exact else model.read(e_BTC, model.init_state(batch))[0]
        F.cross_entropy(model.backbone.head(z_BTC).flatten(0, 1), tokens_BT.flatten()).backward()

    naive, ours, ratio = median_ratio(partial(step, False), partial(step, True), rounds)
    return {"B": batch, "T": tokens, "C": width, "naive_ms": naive * 1e3, "ours_ms": ours * 1e3, "ratio": ratio}


def miniature(rounds: int) -> dict[str, float]:
    """Milliseconds per step of the small recipes, averaged over K = 2 … 5."""
    cases = [(mode, k) for mode in MODES for k in (range(2, 6) if mode != "bptt" else [2])]
    model = make(run_of("unroll", 5, **MINIATURE).model)
    steps = [step_of(run_of(mode, k, **MINIATURE), model) for mode, k in cases]
    seconds = interleaved_medians(steps, rounds, warmups=1)
    of_mode = {mode: [s for (m, _), s in zip(cases, seconds, strict=True) if m == mode] for mode in MODES}
    return {mode: 1e3 * sum(each) / len(each) for mode, each in of_mode.items()}


def main() -> None:
    """Run all benchmarks and print one line per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round, small models: a test run, not a measurement")
    parser.add_argument("--memory", nargs=3, metavar="X", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        mode, passes, shape = options.memory
        print(grown(mode, int(passes), json.loads(shape)))
        return
    quick = options.quick
    sizes, depths, rounds = (SMALL, [2], 1) if quick else (FULL, [2, 5, 10], 3)
    streams = []
    for width, batch, tokens in [(16, 4, 12)] if quick else [(64, 64, 100), (128, 64, 352)]:
        streams.append(stream_speed(width, batch, tokens, 1 if quick else 7))
        line = "exact gradient: {T} tokens, C={C}: {naive_ms:.0f} ms naive, {ours_ms:.0f} ms, {ratio:.2f} ×"
        print(line.format(**streams[-1]))
    rows = []
    for layers in [1] if quick else [1, 4]:
        shape = sizes | {"layers": layers}
        for row in times(shape, depths, rounds):
            measured, planned = measure_memory(str(row["mode"]), row["K"] or depths[0], shape)
            rows.append({"D": layers} | row | {"bytes": measured, "planned": planned})
            print(
                f"D={layers} K={row['K'] or '-':>2} {row['mode']:<18} {row['units']:6.1f} forward passes (predicted "
                f"{row['predicted']:>2}), {measured / 1e6:5.0f} MB, {planned / measured:.2f} of that planned"
            )
    small = {} if quick else miniature(rounds)
    for mode, ms in small.items():
        print(f"miniature step, {mode:<18} {ms:6.1f} ms, {ms / small['unroll']:.2f} of unroll")
    about = {"benchmark": "gradients", "threads": torch.get_num_threads(), "torch": torch.__version__}
    print(json.dumps(about | {"shape": sizes, "streams": streams, "rows": rows, "miniature_ms": small}))


if __name__ == "__main__":
    main()
