"""Measures the cost of the method on this machine, as ratios within one run. The last line is one JSON line.

1. Time of K passes forward and backward, divided by the prediction from the multiply-accumulate count and from the time
   of one pass of the plain transformer of the same depth and width.
2. Time of a streaming step, divided by the time of its matrix products alone.
3. Time of `import contextready`, divided by the time of `import torch`.

    python benchmarks/core.py [--quick]
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from timing import interleaved_medians

from contextready import ContextReady, ModelConfig, account, build_model

VOCABULARY = 1024
TOKENS = 256
PASSES = 5


def unroll_cost(layers: int, width: int, batch: int, rounds: int) -> dict[str, float]:
    """Measure K passes forward and backward, and compare the time with the prediction."""
    shape = {"vocab_size": VOCABULARY, "width": width, "layers": layers, "heads": width // 64}
    plain_config, ready_config = ModelConfig(**shape), ModelConfig(**shape, correction="add")
    plain, ready = build_model(plain_config), build_model(ready_config)
    tokens_BT = torch.randint(VOCABULARY, (batch, TOKENS))
    targets = torch.randint(VOCABULARY, (batch * TOKENS,))

    def train(model: ContextReady) -> None:
        logits_BTV = model(tokens_BT, PASSES if model.is_recurrent else 1)
        F.cross_entropy(logits_BTV.flatten(0, 1), targets).backward()
        model.zero_grad(set_to_none=True)

    one, many = interleaved_medians([lambda: train(plain), lambda: train(ready)], rounds)
    predicted = account(ready_config).macs_sequence(TOKENS, PASSES) / account(plain_config).macs_sequence(TOKENS)
    return {
        "D": layers,
        "C": width,
        "T": TOKENS,
        "K": PASSES,
        "batch": batch,
        "transformer_ms": one * 1e3,
        "k_pass_ms": many * 1e3,
        "time_ratio": many / one,
        "predicted_ratio": predicted,
        "measured_over_predicted": many / one / predicted,
    }


@torch.inference_mode()
def step_overhead(layers: int, width: int, steps: int) -> dict[str, float]:
    """Measure the eager streaming step per token, relative to its matrix products alone."""
    config = ModelConfig(VOCABULARY, width, layers, heads=width // 64, correction="add")
    model = build_model(config)
    token_11 = torch.zeros(1, 1, dtype=torch.long)
    _, warm = model.stream(torch.zeros(1, 64, dtype=torch.long), model.init_state(1))
    products = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    inputs = [torch.randn(1, 1, m.in_features) for m in products]

    def stream() -> None:
        state = warm
        for _ in range(steps):
            _, state = model.stream(token_11, state)

    def multiply() -> None:
        for _ in range(steps):
            for module, x in zip(products, inputs, strict=True):
                F.linear(x, module.weight)

    step, bare = interleaved_medians([stream, multiply], rounds=15)
    return {
        "D": layers,
        "C": width,
        "step_us": step / steps * 1e6,
        "products_us": bare / steps * 1e6,
        "step_over_products": step / bare,
    }


def import_cost(rounds: int) -> dict[str, float]:
    """Measure `import torch` and `import contextready`, each in new interpreters."""

    def start(module: str) -> Callable[[], object]:
        return lambda: subprocess.run([sys.executable, "-c", f"import {module}"], check=True)

    bare, ours = interleaved_medians([start("torch"), start("contextready")], rounds)
    return {"torch_s": bare, "contextready_s": ours, "contextready_over_torch": ours / bare}


def main() -> None:
    """Run all three benchmarks and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="one round, one row, the small width: a test run, not a measurement"
    )
    quick = parser.parse_args().quick
    torch.manual_seed(0)
    rounds, widths, batch = (1, (256,), 1) if quick else (15, (256, 512), 8)
    unrolls = [unroll_cost(layers, width, batch, rounds) for layers in (1, 4) for width in widths]
    for row in unrolls:
        print(
            f"D={row['D']} C={row['C']}: K={PASSES} takes {row['time_ratio']:.2f} × a transformer pass, "
            f"predicted {row['predicted_ratio']:.2f}, measured/predicted {row['measured_over_predicted']:.3f}"
        )
    steps = [step_overhead(layers, width, 20) for layers in (1, 4) for width in widths]
    for row in steps:
        print(
            f"D={row['D']} C={row['C']}: a step takes {row['step_us']:.0f} µs, "
            f"its products {row['products_us']:.0f} µs, ratio {row['step_over_products']:.2f}"
        )
    imports = import_cost(1 if quick else 11)
    print(f"import contextready takes {imports['contextready_over_torch']:.3f} × import torch")
    print(
        json.dumps(
            {
                "benchmark": "core",
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
                "unroll": unrolls,
                "step": steps,
                "import": imports,
            }
        )
    )


if __name__ == "__main__":
    main()
