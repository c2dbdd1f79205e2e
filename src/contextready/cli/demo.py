"""`crt demo`: one context-ready layer against the transformer of the same cost, trained in minutes."""

import argparse
from math import exp
from pathlib import Path
from typing import TYPE_CHECKING

from contextready.cli.console import make_console
from contextready.cli.data import run_prepare
from contextready.cli.eval import print_evaluation
from contextready.cli.options import Verbs, verb
from contextready.errors import ContextReadyError

if TYPE_CHECKING:
    from contextready.data.tokenizer import Tokenizer
    from contextready.evaluate.curves import Curve
    from contextready.evaluate.evaluate import Evaluation
    from contextready.model.context_ready import ContextReady

VOCABULARY = 1024
VALIDATION = 0.05
RECIPES = {"transformer": "demo-n1-ffn", "context-ready": "demo-d1"}
PROMPT = "The people of the United States"


def add(verbs: Verbs) -> None:
    """Describe `crt demo`."""
    demo = verb(
        verbs,
        "demo",
        "train a small model and its transformer, and compare",
        "Train one context-ready layer and the transformer of the same cost on text that comes\n"
        "with the installation, evaluate both, draw their curves and stream a sample: a few\n"
        "minutes on two cores.",
    )
    demo.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder of the runs (default: runs/demo)")
    demo.add_argument("--steps", type=int, help="updates of each model (default: the recipe's)")
    demo.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    return run_demo(options.out, options.steps)


def run_demo(out: Path, steps: int | None = None) -> int:
    """Prepare the default corpus, train both models, evaluate, draw, stream a sample; goes on where it stopped."""
    from contextready.cli.display import ConsoleDisplay
    from contextready.data.prepare import Preparation
    from contextready.data.shards import Data
    from contextready.device import find_device
    from contextready.evaluate.curves import draw, read_curve
    from contextready.evaluate.evaluate import evaluate_checkpoint
    from contextready.runs.checkpoint import open_checkpoint
    from contextready.runs.recipes import resolve
    from contextready.train.trainer import train

    console = make_console(tables=True)
    folder = out / "data"
    if not folder.exists():
        run_prepare(folder, Preparation(["default"], [], VALIDATION, VOCABULARY))
    changes = [] if steps is None else [f"steps={steps}"]
    for name, recipe in RECIPES.items():
        config = resolve(recipe, [f"data={folder}", f"out={out / name}", *changes])
        result = train(config, ConsoleDisplay(console))
        if result.stopped_by is not None:
            console.print("Stopped; the same command goes on from here.")
            return 128 + result.stopped_by

    data, device = Data(folder, verify=["val"]), find_device("auto")
    trained = {name: open_checkpoint(out / name) for name in RECIPES}
    evaluations = {name: evaluate_checkpoint(checkpoint, data, device) for name, checkpoint in trained.items()}
    print_evaluation(list(evaluations), list(evaluations.values()))

    plain, ready = (read_curve(out / name) for name in ("transformer", "context-ready"))
    plain_macs, ready_macs = (read_curve(out / name, "macs") for name in ("transformer", "context-ready"))
    console.print(at_equal_tokens(plain, ready))
    console.print(at_equal_compute(plain_macs, ready_macs))
    console.print(observation(evaluations["context-ready"]))
    try:
        draw([plain, ready], out / "curves.png", title="Same cost per generated token, equal training tokens")
        console.print(f"The curves: {out / 'curves.png'}\n")
    except ContextReadyError as error:
        console.print(f"No picture: {error}\n")

    tokenizer = data.tokenizer()
    assert tokenizer is not None
    console.print("A sample, streamed exactly, one pass per token:\n")
    console.print(sample(trained["context-ready"].model(), tokenizer, PROMPT))
    return 0


def at_equal_tokens(plain: "Curve", ready: "Curve") -> str:
    """Which model is ahead after the same tokens, and where they changed places."""
    from contextready.evaluate.curves import crossover, short

    after = min(plain.x[-1], ready.x[-1])
    ours, theirs = exp(ready.at(after)), exp(plain.at(after))
    cross = crossover(ready, plain)
    if cross is not None and cross.below == ready.name:
        passing = f"It passed it at {short(cross.x)} tokens."
    elif ours < theirs:
        passing = "It was ahead from the first validation on."
    else:
        passing = "It has not passed it in this run; the paper's curves cross later in training."
    return (
        f"Equal tokens: after {short(after)} the context-ready layer is at perplexity {ours:.1f}, the transformer with "
        f"the same multiply-accumulates per generated token at {theirs:.1f}. {passing}"
    )


def at_equal_compute(plain: "Curve", ready: "Curve") -> str:
    """What the K passes of training cost, and where the context-ready model stood at the transformer's budget."""
    budget = min(plain.x[-1], ready.x[-1])
    return (
        f"Equal training compute: K passes cost {ready.x[-1] / plain.x[-1]:.1f} × the transformer's training. At the "
        f"transformer's budget the context-ready layer stood at {exp(ready.at(budget)):.1f}, the transformer at "
        f"{exp(plain.at(budget)):.1f}."
    )


def observation(evaluation: "Evaluation") -> str:
    """The paper's two observations that the table shows: what the correction brings, and that streaming is exact."""
    assert evaluation.correction is not None
    assert evaluation.sequential_gap is not None
    k = max(evaluation.parallel)
    return (
        f"The paper: the correction carries much of the model, and streaming equals many parallel passes. Here K=1 to "
        f"K=5 gains {evaluation.correction[0]:.1f} perplexity, and streaming differs from K={k} by "
        f"{100 * evaluation.sequential_gap[0] / evaluation.parallel[k].perplexity:+.4f} %."
    )


def sample(model: "ContextReady", tokenizer: "Tokenizer", prompt: str, tokens: int = 120, seed: int = 0) -> str:
    """The prompt and a continuation drawn at temperature 0.8, streamed token by token."""
    from contextready.infer.generate import GenerationSettings, generate
    from contextready.infer.sampling import Sampling
    from contextready.infer.torch_engine import torch_engine

    ids = tokenizer.encode_batch([prompt])[0]
    settings = GenerationSettings(Sampling(temperature=0.8), max_tokens=tokens - len(ids), seed=seed)
    (done,) = generate(torch_engine(model, capacity=tokens), [ids], settings, tokenizer=tokenizer)
    return prompt + done.text
