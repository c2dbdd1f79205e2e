"""Measures a training step with K=2 and with K=5 passes, compiled and not, through all passes as in the paper.

The paper compares two compiled passes with five that were not compiled. Here all four take turns, on one thread. The
last line is JSON.

    python benchmarks/passes.py --out docs/results/passes.json
"""

import argparse
import json
import platform
import tempfile
from pathlib import Path

import torch
from timing import interleaved_medians
from train import make_data

from contextready.runs.recipes import resolve
from contextready.train.trainer import Trainer

SHAPES = {"D=2 C=256": ("layers=2", "width=256"), "D=8 C=128": ("layers=8", "width=128")}
PASSES = (2, 5)


def measure(words: tuple[str, ...], data: Path, folder: Path, rounds: int) -> dict[str, float]:
    """Return the seconds of each kind of step."""
    trainers = {}
    for k in PASSES:
        for compiled in (False, True):
            name = f"K={k}{' compiled' if compiled else ''}"
            settings = [f"passes={k}", "gradient=unroll", f"compile={compiled}", f"out={folder / name}"]
            trainers[name] = Trainer(resolve("mini-d1", [*words, *settings, f"data={data}"]))
    times = interleaved_medians([trainer.step for trainer in trainers.values()], rounds, warmups=2)
    return dict(zip(trainers, times, strict=True))


def main() -> None:
    """Measure every shape and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help="steps of each kind (default: 12)")
    parser.add_argument("--quick", action="store_true", help="one round, one shape: a test run, not a measurement")
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    shapes = dict(list(SHAPES.items())[:1]) if options.quick else SHAPES
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = make_data(folder, 1 << 18, 1 << 14)
        rows = {}
        for shape, words in shapes.items():
            rows[shape] = measure(words, data, folder / shape, 1 if options.quick else options.rounds)
            seconds = rows[shape]
            print(
                f"{shape}: K=5 / K=2 = {seconds['K=5'] / seconds['K=2']:.2f}, both compiled "
                f"{seconds['K=5 compiled'] / seconds['K=2 compiled']:.2f}, K=5 / K=2 compiled "
                f"{seconds['K=5'] / seconds['K=2 compiled']:.2f}"
            )
    result = {"benchmark": "passes", "torch": torch.__version__, "machine": platform.machine(), "seconds": rows}
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
