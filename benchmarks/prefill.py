"""Measures prompt reading with a trained model: cost and error of the solvers, greedy continuations, long prompts.

    python benchmarks/prefill.py runs/wiki-d2-c256 --plot docs/pictures/prefill.png

The last line is one JSON line.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from timing import interleaved_medians

from contextready.data.shards import Data
from contextready.model.context_ready import ContextReady
from contextready.runs.checkpoint import open_checkpoint
from contextready.solve.hardware import free_tokens
from contextready.solve.prefill import prefill, segment_length
from contextready.solve.prompt_reader import SOLVERS, TOLERANCE
from contextready.solve.sweep import Chunk
from contextready.solve.unroll import unroll

Point = dict[str, float]


@torch.inference_mode()
def main() -> None:
    """Run all measurements and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run or checkpoint")
    parser.add_argument("--data", type=Path, help="prepared data (default: the data that the model was trained on)")
    parser.add_argument("--tokens", type=int, default=1024, help="length of the prompts (default: 1024)")
    parser.add_argument(
        "--prompts", type=int, default=200, help="number of prompts to continue greedily (default: 200)"
    )
    parser.add_argument("--new", type=int, default=20, help="tokens per continuation (default: 20)")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds (default: 5)")
    parser.add_argument("--only-curves", action="store_true", help="measure only cost against error")
    parser.add_argument(
        "--lengths", default="128,256,512,1024,2048,4096", help="prompt lengths to time (default: 128 to 4096)"
    )
    parser.add_argument("--threads", type=int, default=2, help="number of threads (default: 2)")
    parser.add_argument("--plot", type=Path, help="write a plot to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    checkpoint = open_checkpoint(options.run)
    model = checkpoint.model().eval()
    row = Data(options.data or Path(checkpoint.config["train"]["data"]), verify=[]).tokens("val")
    tokens_1T = torch.from_numpy(row.read(0, options.tokens).astype(np.int64))[None]
    rows, segment = free_tokens(model), segment_length(options.tokens, free_tokens(model))
    print(
        f"{options.run}: a step of r tokens costs 1 + r / {rows:.1f}; {options.tokens} tokens in segments of {segment}"
    )

    curves = cost_against_error(model, tokens_1T, sorted({segment, 2 * segment, segment // 2}), options.rounds)
    for name, points in curves.items():
        for point in points:
            print(
                f"{name:12s} {point['number']:4.0f}  {1e3 * point['seconds']:8.1f} ms  {point['cost']:6.2f} passes  "
                f"error {point['error']:.1e} (mean {point['mean_error']:.1e})"
            )
    if options.only_curves:
        print(json.dumps({"benchmark": "prefill", "curves": curves}))
        return
    same = greedy_continuations(model, row, options.tokens, options.prompts, options.new)
    print(json.dumps(same))
    lengths = [int(length) for length in options.lengths.split(",")]
    longer = [one for length in lengths for one in by_length(model, row, length, options.rounds)]
    for one in longer:
        print(f"{one['tokens']:5d} tokens  {one['solver']:10s} {1e3 * one['seconds']:8.1f} ms  cost {one['cost']:.2f}")
    if options.plot:
        draw(curves, longer, options.plot)
    print(json.dumps({"benchmark": "prefill", "curves": curves, "greedy": same, "lengths": longer}))


def cost_against_error(
    model: ContextReady, tokens_1T: torch.Tensor, segments: list[int], rounds: int
) -> dict[str, list[Point]]:
    """Measure the error of z after each pass and each sweep, against streaming in float64, with arithmetic and time."""
    T, start = tokens_1T.shape[1], model.init_state(1)
    exact_1TC = _streamed(model.double(), tokens_1T)
    model.float()
    info = prefill(model, tokens_1T, solver="sequential").info
    plain, corrected = info.plain_macs, info.macs
    assert plain is not None
    assert corrected is not None

    def sweeps(count: int, segment: int) -> torch.Tensor:
        chunk = _chunk(model, tokens_1T)
        chunk.plain_pass()
        for swept in range(count):
            chunk.sweep(swept, segment)
        return chunk.z_BTC

    calls: list[tuple[str, int, float, Callable[[], torch.Tensor]]] = []
    for passes in range(2, 15):
        run = partial(unroll, model, tokens_1T, passes, state=start)
        calls.append(("jacobi", passes, plain + (passes - 1) * corrected, lambda run=run: run()[0]))
    for segment in segments:
        for count in range(1, 6):
            # Each sweep skips the segments that earlier sweeps made exact.
            macs = plain + sum(corrected * (1 - swept * segment / T) for swept in range(count))
            calls.append((f"sweep L={segment}", count, macs, partial(sweeps, count, segment)))
    calls.append(("sequential", 1, corrected, partial(_streamed, model, tokens_1T)))

    found: dict[str, list[Point]] = {}
    seconds = interleaved_medians([call for *_, call in calls], rounds, warmups=1)
    for (name, count, macs, call), taken in zip(calls, seconds, strict=True):
        errors_T = (call() - exact_1TC).norm(dim=-1)[0] / exact_1TC.norm(dim=-1).max()
        point = {"number": count, "seconds": taken, "cost": macs / plain, "error": float(errors_T.max())}
        found.setdefault(name, []).append(point | {"mean_error": float(errors_T.mean())})
    return found


def greedy_continuations(
    model: ContextReady, row: object, tokens: int, prompts: int, new: int, batch: int = 5
) -> dict[str, float]:
    """Count the prompts that continue greedily as after sequential reading, and measure what reading them cost."""
    same: dict[str, float] = {"prompts": prompts, "new": new, "tolerance": TOLERANCE, "identical": 0}
    costs, sweeps = [], []
    for first in range(0, prompts, batch):
        ids = [row.read((first + i) * tokens, tokens).astype(np.int64) for i in range(batch)]  # type: ignore[attr-defined]
        tokens_BT = torch.from_numpy(np.stack(ids))
        exact = prefill(model, tokens_BT, solver="sequential")
        swept = prefill(model, tokens_BT, solver="sweep", bf16_passes="off")
        costs.append(swept.info.cost)
        sweeps.append(len(swept.info.changes))
        ours, theirs = (_greedy(model, one, new) for one in (swept, exact))
        same["identical"] += int((ours == theirs).all(dim=1).sum())
    return same | {"cost": statistics.mean(costs), "largest_cost": max(costs), "most_sweeps": max(sweeps)}


def by_length(model: ContextReady, row: object, length: int, rounds: int) -> list[dict[str, float | str]]:
    """Time every solver with its default tolerance on a prompt of this length (median over rounds)."""
    tokens_1T = torch.from_numpy(row.read(0, length).astype(np.int64))[None]  # type: ignore[attr-defined]
    calls = [lambda solver=solver: prefill(model, tokens_1T, solver=solver, bf16_passes="off") for solver in SOLVERS]
    seconds = interleaved_medians(calls, rounds, warmups=1)
    return [
        {"tokens": length, "solver": solver, "seconds": taken, "cost": call().info.cost or 0.0}
        for solver, call, taken in zip(SOLVERS, calls, seconds, strict=True)
    ]


def draw(curves: dict[str, list[Point]], longer: list[dict[str, float | str]], out: Path) -> None:
    """Plot arithmetic against error, time against error, and time against length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (cost, clock, length) = pyplot.subplots(1, 3, figsize=(13.5, 4.2), layout="constrained")
    for name, points in curves.items():
        errors = [point["error"] for point in points]
        cost.plot([point["cost"] for point in points], errors, marker="o", label=name)
        clock.plot([1e3 * point["seconds"] for point in points], errors, marker="o", label=name)
    for solver in SOLVERS:
        mine = [one for one in longer if one["solver"] == solver]
        length.plot(
            [one["tokens"] for one in mine], [1e3 * float(one["seconds"]) for one in mine], marker="o", label=solver
        )
    cost.set(xlabel="arithmetic, in plain passes", ylabel="largest relative error of z", yscale="log")
    clock.set(xlabel="ms", yscale="log")
    length.set(xlabel="tokens in the prompt", ylabel="ms", xscale="log", yscale="log")
    lengths = sorted({int(one["tokens"]) for one in longer})
    length.set_xticks(lengths, [f"{number:,}" for number in lengths])
    length.minorticks_off()
    for axes in (cost, clock, length):
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=130)


def _streamed(model: ContextReady, tokens_1T: torch.Tensor) -> torch.Tensor:
    chunk = _chunk(model, tokens_1T)
    chunk.read_from(0)
    return chunk.z_BTC


def _chunk(model: ContextReady, tokens_1T: torch.Tensor) -> Chunk:
    """Create a chunk with the tokens of a prompt, not solved yet, in a new buffer."""
    e_1TC = model.backbone.embed(tokens_1T)
    buffer = model.backbone.init_buffer(1, tokens_1T.shape[1])  # type: ignore[attr-defined]
    return Chunk(model, e_1TC, buffer, 0, torch.zeros_like(e_1TC[:, :1]))


def _greedy(model: ContextReady, read: object, new: int) -> torch.Tensor:
    logits_B1V, state, chosen = model.backbone.head(read.z_B1C), read.state, []  # type: ignore[attr-defined]
    for _ in range(new):
        chosen.append(logits_B1V[:, -1:].argmax(dim=-1))
        logits_B1V, state = model.stream(chosen[-1], state)
    return torch.cat(chosen, dim=1)


if __name__ == "__main__":
    main()
