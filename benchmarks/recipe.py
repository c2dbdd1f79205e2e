"""Measures a training step of `crt train`'s recipe, in units of a step of the transformers that it is compared with.

The shapes are those of `crt reproduce training`. Steps with K = 1, 2 and 3 and those of the transformers take turns, in
the precision that training would choose and on one thread, as in that study. The mean over the recipe's stages is
compared with the prediction from multiply-accumulates. The last line is JSON.

    python benchmarks/recipe.py --out docs/results/steps.json
"""

import argparse
import json
import platform
import tempfile
from pathlib import Path

import torch
from timing import interleaved_medians
from train import make_data

from contextready.model.cost import account
from contextready.runs.config import PASSES_FROM_SCRATCH
from contextready.runs.passes import parse_passes
from contextready.runs.recipes import resolve
from contextready.study.trials import CONTROLS, SHAPES, Shape, trials_of
from contextready.train.cost import step_macs
from contextready.train.trainer import Trainer

STAGES = parse_passes(PASSES_FROM_SCRATCH).stages
CHANCES = {
    k: sum(stage.fraction / len(stage.depths) for stage in STAGES if k in stage.depths)
    for k in sorted({k for stage in STAGES for k in stage.depths})
}
"""How often the recipe makes each number of passes."""


def measure(shape: Shape, data: Path, folder: Path, rounds: int) -> dict[str, object]:
    """Time the steps of one shape, all kinds in turns."""
    trials = {t.key: t for t in trials_of(["controls"]) if t.shape == shape}
    ready = trials[f"d{shape.key}"]
    words = {k: (*ready.words(0, folder / str(k)), f"passes={k}") for k in CHANCES}
    plain = {kind: trials[f"{kind}{shape.key}"].words(0, folder) for kind in CONTROLS}
    runs = {key: resolve(w[0], [*w[1:], f"data={data}"]) for key, w in (words | plain).items()}
    trainers = {key: Trainer(run) for key, run in runs.items()}
    times = interleaved_medians([trainer.step for trainer in trainers.values()], rounds, warmups=2)
    seconds = dict(zip(trainers, times, strict=True))
    macs = {key: step_macs(account(run.model), run.train) for key, run in runs.items()}
    row: dict[str, object] = {"shape": shape.key, "precision": trainers[1].progress.precision, "seconds": seconds}
    for kind in CONTROLS:
        row[kind] = {
            "time": sum(chance * seconds[k] for k, chance in CHANCES.items()) / seconds[kind],
            "predicted": sum(chance * macs[k] for k, chance in CHANCES.items()) / macs[kind],
        }
    return row


def main() -> None:
    """Measure every shape and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="steps of each kind (default: 20)")
    parser.add_argument("--quick", action="store_true", help="one round, one shape: a test run, not a measurement")
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    shapes, rounds = (SHAPES[:1], 1) if options.quick else (SHAPES, options.rounds)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = make_data(folder, 1 << 18, 1 << 14)
        rows = []
        for shape in shapes:
            rows.append(measure(shape, data, folder / shape.key, rounds))
            for kind, added in CONTROLS.items():
                found = rows[-1][kind]
                assert isinstance(found, dict)
                print(
                    f"{shape.name}: {found['time']:.3f} steps of the transformer ({added}), "
                    f"{found['predicted']:.3f} predicted"
                )
    result = {"benchmark": "recipe", "torch": torch.__version__, "machine": platform.machine(), "rows": rows}
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
