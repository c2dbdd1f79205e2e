"""Measures attention in the training of short sequences on a CPU: in bf16, and in float32 between bf16 tensors.

A forward and a backward of both take turns on one thread. `SHORT` in `contextready/model/attention.py` says which one
training uses. The last line is JSON.

    python benchmarks/attention.py
"""

import argparse
import json
import platform
from collections.abc import Callable
from unittest.mock import patch

import torch
from timing import interleaved_medians

from contextready.model import attention
from contextready.model.attention import Attend
from contextready.model.config import TransformerConfig

SHAPES = ((8, 4, 128, 24), (16, 4, 128, 32), (8, 4, 128, 64), (4, 4, 256, 32), (8, 4, 256, 64), (2, 4, 1024, 32))
"""Batch, heads, tokens, head size."""


def step(shape: tuple[int, int, int, int], short: int) -> Callable[[], None]:
    """Return a forward and a backward of attention that treats sequences up to `short` as short ones."""
    batch, heads, tokens, size = shape
    config = TransformerConfig(vocab_size=2, width=heads * size, layers=1, heads=heads)
    attend = Attend(config, torch.empty(batch, tokens, config.width, dtype=torch.bfloat16))
    q, k, v = (torch.randn(shape).to(torch.bfloat16).requires_grad_() for _ in range(3))
    upstream = torch.randn(shape).to(torch.bfloat16)

    def run() -> None:
        with patch.object(attention, "SHORT", short):
            attend(q, k, v).backward(upstream)

    return run


def main() -> None:
    """Measure every shape and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="measurements of each (default: 30)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print(f"{'B × H × T × E':>20}  {'bf16 (ms)':>10}  {'float32 (ms)':>12}  ratio  used in training")
    for shape in SHAPES:
        tokens, size = shape[2:]
        narrow, wide = interleaved_medians([step(shape, 0), step(shape, tokens * size)], options.rounds)
        used = "float32" if tokens * size <= attention.SHORT else "bf16"
        name = " × ".join(map(str, shape))
        print(f"{name:>20}  {1e3 * narrow:10.2f}  {1e3 * wide:12.2f}  {wide / narrow:5.2f}  {used}")
        rows.append({"shape": shape, "bf16": narrow, "float32": wide, "used": used})
    print(json.dumps({"rows": rows, "processor": platform.processor(), "torch": torch.__version__}))


if __name__ == "__main__":
    main()
