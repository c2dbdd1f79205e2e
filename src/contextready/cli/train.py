"""`crt train`: train a recipe, and report how the run ended."""

import argparse
import os
import signal
from typing import TYPE_CHECKING, Any

from contextready.cli.console import make_console
from contextready.cli.options import Verbs, verb
from contextready.errors import ContextReadyError
from contextready.files import to_json

if TYPE_CHECKING:
    from contextready.runs.config import RunConfig
    from contextready.train.trainer import Result

SYMBOLS = """\
symbols from the paper:
  K                 passes: how many times a context-ready model runs its blocks
                    over a sequence during training
  D                 layers of a context-ready model
  N                 layers of a transformer
  C                 width
  T                 block_size"""

AUTHORS = """\
recipes from the paper:
  authors=true      apply the settings of the author's own runs, which the paper
                    does not state (--dry-run prints them all)"""


def add(verbs: Verbs) -> None:
    """Describe `crt train`."""
    train = verb(
        verbs,
        "train",
        "train a model, or resume training it",
        "Train a context-ready model or a transformer. A recipe is a named set of settings, such as the\n"
        "width of the model or the number of steps; each key=value after it changes one setting. Run the\n"
        "same command again to resume an interrupted run.",
        "crt train mini-d1\n"
        "crt train mini-d1 data=data/mine out=runs/mine steps=4000\n"
        "crt train owt-d5-c1120 precision=bf16 compile=true                  a model from the paper\n"
        "crt train owt-d5-c1120 --dry-run                                    its settings and its cost\n"
        "crt train owt-d5-c1120 authors=true                                 with the author's settings\n"
        "crt train convert pretrained=smollm2-crt data=data/mine tune=lora   a Hugging Face model",
        notes=_notes,
    )
    train.add_argument("recipe", nargs="?", help="name of a recipe (see --list), or a YAML file with settings")
    train.add_argument("settings", nargs="*", metavar="key=value", help="settings to change; they are listed below")
    train.add_argument("--list", action="store_true", help="list all recipes")
    train.add_argument(
        "--dry-run", action="store_true", help="print the settings and the cost as JSON, without training"
    )
    train.add_argument("--json", action="store_true", help="with --list: print JSON (--dry-run always does)")
    train.set_defaults(run=_run, more_words="settings")


def _notes() -> str:
    from contextready.model.config import ModelConfig
    from contextready.model.correction import describe_corrections
    from contextready.runs.config import PretrainedModelConfig, TrainConfig
    from contextready.settings import describe_settings

    return "\n\n".join(
        (
            SYMBOLS,
            f"training settings (defaults apply unless the recipe sets a value):\n{describe_settings(TrainConfig)}",
            f"model settings (vocab_size defaults to that of the data):\n{describe_settings(ModelConfig)}",
            "corrections, where e_t is the embedding of a token, x_t the input and z_t the output of the\n"
            f"blocks at its position:\n{describe_corrections()}",
            f"settings of a pretrained Hugging Face model:\n{describe_settings(PretrainedModelConfig)}",
            AUTHORS,
            "For the settings of pointer chasing, see crt pointer --help.",
        )
    )


def _run(options: argparse.Namespace) -> int:
    from contextready.cli.pointer import run_pointer
    from contextready.runs.recipes import check_inputs, resolve

    if options.list:
        print_recipes(options.json)
        return 0
    if options.recipe is None:
        raise ContextReadyError("Name a recipe, for example: crt train mini-d1 (crt train --list shows all).")
    if options.json and not options.dry_run:
        raise ContextReadyError("--json works with --list or --dry-run; leave it out to train.")
    config = resolve(options.recipe, options.settings)
    check_inputs(options.recipe, options.settings, config, missing_ok=options.dry_run)
    if options.dry_run:
        print_settings(config)
        return 0
    return run_train(config) if config.task is None else run_pointer(config)


def run_train(config: "RunConfig") -> int:
    """Train in the foreground. The exit code is 0, or 128 + the number of the signal that interrupted the run."""
    from contextready.cli.display import ConsoleDisplay
    from contextready.train.trainer import train

    check_fits(config)
    console = make_console()
    result = train(config, ConsoleDisplay(console))
    if result.speaks:
        console.print(ending(result))
    return 0 if result.stopped_by is None else 128 + result.stopped_by


def check_fits(config: "RunConfig") -> None:
    """Refuse a run that this machine's memory cannot hold, before anything is created."""
    from contextready.device import find_device
    from contextready.runs.run_checks import check_run_memory

    # torchrun tells every process how many there are.
    processes = os.environ.get("WORLD_SIZE", "1")
    count = int(processes) if processes.isdecimal() else 1
    check_run_memory(config, max(1, count), on_cpu=find_device(config.train.device).type == "cpu")


def ending(result: "Result") -> str:
    """Describe how a run ended and what to do next."""
    from contextready.runs.sharded import METADATA

    if result.stopped_by is not None:
        name = signal.Signals(result.stopped_by).name
        return (
            f"Interrupted by {name} at step {result.step:,}; saved {result.checkpoint}. "
            "Run the same command again to resume."
        )
    if (result.checkpoint / METADATA).is_file():
        return f"Done at step {result.step:,}: {result.checkpoint}. Next: crt unshard {result.run} OUT, crt eval OUT"
    return f"Done at step {result.step:,}: {result.checkpoint}. Next: crt eval {result.run}"


def print_recipes(as_json: bool = False) -> None:
    """Print every recipe with the shape of its model and the length of its training, as a table or as JSON."""
    from rich.table import Table

    from contextready.runs.recipes import recipe_names

    records = [_describe_recipe(name) for name in recipe_names()]
    if as_json:
        print(to_json({"recipes": records}, indent=1))
        return
    table = Table(box=None, padding=(0, 1, 0, 0))
    for column in ("recipe", "model", "batch × T", "steps", "K"):
        table.add_column(column, justify="left" if column in ("recipe", "model") else "right", no_wrap=True)
    for r in records:
        symbol = "D" if r["correction"] else "N"
        shape = "pretrained=" if r["layers"] is None else f"{symbol}={r['layers']} C={r['width']}"
        extra = r["correction"] or ("+ FFN" if r["extra_ffn"] else "")
        batch = f"{r['sequences_per_step']}×{r['block_size']}"
        table.add_row(r["recipe"], f"{shape} {extra}", batch, f"{r['steps']:,}", r["passes"] or "")
    make_console(tables=True).print(table)
    print("D: layers of a context-ready model. N: layers of a transformer. C: width. T: tokens per sequence.")
    print("K: passes of the blocks over a sequence (2..5: drawn from 2 to 5 at each step).")
    print("The name of a model alone, such as owt-d5-c1120, means the first experiment that lists it.")


def _describe_recipe(name: str) -> dict[str, Any]:
    """Return the settings that `crt train --list` shows."""
    from contextready.runs.recipes import load_recipe
    from contextready.runs.tasks import split_task, task_keys

    s, keys = load_recipe(name), task_keys()
    task, _ = split_task({key: value for key, value in s.items() if key in keys})
    return {
        "recipe": name,
        "layers": s.get("layers"),
        "width": s.get("width"),
        "correction": s.get("correction"),
        "extra_ffn": s.get("extra_ffn", False),
        "sequences_per_step": s["batch_size"] * s.get("accumulate", 1),
        "block_size": s["block_size"] if task is None else task.tokens,
        "steps": s["steps"],
        "passes": s.get("passes"),
        "gradient": s.get("gradient"),
        "data": s.get("data"),
        "task": None if task is None else task.name,
    }


def print_settings(config: "RunConfig") -> None:
    """Print the settings and the cost that a run would have, as JSON."""
    from contextready.runs.models import cost_of
    from contextready.train.cost import step_macs

    cost, t = cost_of(config.model), config.train
    per_step = step_macs(cost, t)
    summary = {
        "parameters": cost.parameters,
        "tokens": t.steps * t.tokens_per_step,
        "macs_per_step": round(per_step),
        "macs": round(per_step * t.steps),
    }
    print(to_json(config.as_dict() | {"cost": summary}, indent=1))
