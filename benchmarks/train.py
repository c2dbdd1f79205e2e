"""Measures the cost of training and evaluation on this machine, as ratios within one run. The last line is JSON.

1. A training step of the baseline with `Trainer`, relative to a hand-written PyTorch loop with the same modules.
2. The same step in bf16, relative to fp32.
3. A training step of the context-ready model at K = 5, relative to the prediction from the multiply-accumulate count
   and the baseline's step.
4. Sequential evaluation of a validation set, relative to one parallel pass over it.

    python benchmarks/train.py [--quick]
"""

import argparse
import dataclasses
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from timing import interleaved_medians, median_ratio

from contextready import account, build_model
from contextready.data.batches import Sequences
from contextready.data.prepare import Preparation, prepare
from contextready.data.shards import Data
from contextready.device import multiplies_bf16
from contextready.measure.perplexity import parallel_scores, sequential_score
from contextready.runs.config import RunConfig, build_run
from contextready.train.trainer import Trainer

VOCABULARY = 4096
TOKENS = 128
PASSES = 5


def make_data(folder: Path, train_tokens: int, val_tokens: int) -> Path:
    """Create prepared data from random ids; speed does not depend on their content."""
    rng = np.random.default_rng(0)
    for name, count in (("train", train_tokens), ("val", val_tokens)):
        rng.integers(1, VOCABULARY, count).astype("<u2").tofile(folder / f"{name}.bin")
    sources, val = [str(folder / "train.bin")], [str(folder / "val.bin")]
    prepare(folder / "data", Preparation(sources, val, vocab_size=VOCABULARY, end_id=0))
    return folder / "data"


def settings(data: Path, out: Path, width: int, layers: int, **changes: object) -> RunConfig:
    """Settings of a run with this shape in fp32."""
    shape = {"vocab_size": VOCABULARY, "width": width, "layers": layers, "heads": width // 32}
    run = {"data": str(data), "out": str(out), "block_size": TOKENS, "batch_size": 16, "lr": 1e-3}
    run |= {"precision": "fp32", "device": "cpu"}
    return build_run(shape | run | changes)


def bare_loop(config: RunConfig, data: Path):  # type: ignore[no-untyped-def]
    """A hand-written training step: the same modules, batch, loss, clipping and optimizer, and nothing else."""
    t = config.train
    model = build_model(config.model)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": t.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=t.lr,
        betas=(t.beta1, t.beta2),
        fused=True,
    )
    ids = np.memmap(data / "train-00000.bin", "<u2", "r")
    rng = np.random.default_rng(0)

    def step() -> None:
        starts = rng.integers(len(ids) - TOKENS - 1, size=t.batch_size)
        rows = torch.from_numpy(np.stack([ids[s : s + TOKENS + 1] for s in starts]).astype(np.int64))
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), t.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def step_costs(data: Path, folder: Path, width: int, layers: int, rounds: int) -> dict[str, float]:
    """Compare the baseline with the bare loop, and K = 5 with its prediction; each pair takes turns."""
    plain = settings(data, folder / "plain", width, layers, extra_ffn=True)
    ready = settings(data, folder / "ready", width, layers, correction="add", passes=PASSES, gradient="unroll")
    ours, many = Trainer(plain), Trainer(ready)
    bare, step, slower = median_ratio(bare_loop(plain, data), ours.step, rounds)
    k_pass, _, k_ratio = median_ratio(many.step, ours.step, rounds)
    one, several = (account(c.model).macs_sequence(TOKENS, k) for c, k in ((plain, 1), (ready, PASSES)))
    return {
        "layers": layers,
        "width": width,
        "bare_tokens_per_s": plain.train.tokens_per_step / bare,
        "our_tokens_per_s": plain.train.tokens_per_step / step,
        "ours_over_bare": slower,
        "k_pass_tokens_per_s": plain.train.tokens_per_step / k_pass,
        "k_pass_time_ratio": k_ratio,
        "k_pass_predicted_ratio": several / one,
        "k_pass_measured_over_predicted": k_ratio / (several / one),
    }


def bf16_cost(data: Path, folder: Path, width: int, layers: int, rounds: int) -> dict[str, object]:
    """Compare the baseline's step in bf16 with fp32."""
    full = settings(data, folder / "full", width, layers, extra_ffn=True)
    half = dataclasses.replace(full, train=dataclasses.replace(full.train, precision="bf16", out=str(folder / "half")))
    slow, fast = interleaved_medians([Trainer(full).step, Trainer(half).step], rounds, warmups=1)
    return {
        "native_bf16": multiplies_bf16(torch.device("cpu")),
        "fp32_tokens_per_s": full.train.tokens_per_step / slow,
        "bf16_tokens_per_s": full.train.tokens_per_step / fast,
        "bf16_over_fp32": slow / fast,
    }


def sequential_cost(data: Path, config: RunConfig, tokens: int) -> dict[str, float]:
    """Measure sequential evaluation of a validation set, in units of a parallel pass over the same set."""
    model = build_model(config.model).eval()
    windows = Sequences(Data(data, verify=()).tokens("val"), TOKENS)
    count = tokens // TOKENS
    sequential_score(model, windows, min(count, 512))
    parallel_scores(model, windows, [1], min(count, 512))
    before = time.perf_counter()
    parallel_scores(model, windows, [1], count)
    between = time.perf_counter()
    sequential_score(model, windows, count)
    after = time.perf_counter()
    return {
        "tokens": count * TOKENS,
        "parallel_pass_s": between - before,
        "sequential_s": after - between,
        "sequential_tokens_per_s": count * TOKENS / (after - between),
        "sequential_over_parallel_pass": (after - between) / (between - before),
    }


def main() -> None:
    """Run all four benchmarks and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round, small models: a test run, not a measurement")
    quick = parser.parse_args().quick
    torch.manual_seed(0)
    shapes, rounds, tokens = ([(32, 1)], 1, 2048) if quick else ([(128, 1), (256, 1), (256, 4)], 24, 1 << 20)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = make_data(folder, max(tokens, 1 << 16), tokens + 1)
        steps = [step_costs(data, folder / f"{width}-{layers}", width, layers, rounds) for width, layers in shapes]
        for row in steps:
            print(
                f"N={row['layers']} C={row['width']}: {row['our_tokens_per_s']:,.0f} tokens/s, "
                f"{row['ours_over_bare']:.3f} of the bare loop; K={PASSES} takes {row['k_pass_time_ratio']:.2f} ×, "
                f"measured/predicted {row['k_pass_measured_over_predicted']:.3f}"
            )
        width, layers = shapes[0]
        half = bf16_cost(data, folder / "bf16", width, layers, 1 if quick else 3)
        print(f"bf16 runs at {half['bf16_over_fp32']:.2f} × fp32 (native: {half['native_bf16']})")
        ready = settings(data, folder / "eval", width, layers, correction="add")
        sequential = sequential_cost(data, ready, tokens)
        print(
            f"sequential evaluation of {sequential['tokens']:,} tokens takes "
            f"{sequential['sequential_over_parallel_pass']:.2f} parallel passes "
            f"({sequential['sequential_s']:.1f} s against {sequential['parallel_pass_s']:.1f} s)"
        )
    print(
        json.dumps(
            {
                "benchmark": "train",
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
                "steps": steps,
                "bf16": half,
                "sequential": sequential,
            }
        )
    )


if __name__ == "__main__":
    main()
