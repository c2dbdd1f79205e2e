"""`crt train`: train by a recipe, say how it ended."""

import argparse
import json
import signal
from typing import TYPE_CHECKING

from contextready.cli.console import make_console
from contextready.cli.options import Verbs, verb
from contextready.errors import ContextReadyError

if TYPE_CHECKING:
    from contextready.runs.config import RunConfig
    from contextready.train.trainer import Result


def add(verbs: Verbs) -> None:
    """Describe `crt train`."""
    from contextready.model.config import ModelConfig
    from contextready.model.correction import describe_corrections
    from contextready.runs.config import PretrainedModelConfig, TrainConfig
    from contextready.settings import describe_settings

    train = verb(
        verbs,
        "train",
        "train a model, or go on training it",
        "Train a context-ready model or a transformer by a recipe. The same command goes on after\nany interruption.",
        f"settings of the training:\n{describe_settings(TrainConfig)}\n\n"
        f"settings of the model:\n{describe_settings(ModelConfig)}\n\n"
        f"corrections:\n{describe_corrections()}\n\n"
        f"settings of a model of Hugging Face:\n{describe_settings(PretrainedModelConfig)}\n\n"
        "examples:\n"
        "  crt train mini-d1\n"
        "  crt train mini-d1 data=data/mine out=runs/mine correction_init=zero steps=4000\n"
        "  crt train owt-d5-c1120 precision=bf16 compile=true\n"
        "  crt train convert pretrained=smollm2-crt data=data/mine tune=lora",
    )
    train.add_argument("recipe", nargs="?", help="name of a recipe, or a YAML file")
    train.add_argument("settings", nargs="*", metavar="key=value", help="settings that change it")
    train.add_argument("--list", action="store_true", help="list the recipes")
    train.add_argument("--dry-run", action="store_true", help="print the settings and the cost, and train nothing")
    train.set_defaults(run=_run, more_words="settings")


def _run(options: argparse.Namespace) -> int:
    from contextready.cli.pointer import run_pointer
    from contextready.runs.recipes import resolve

    if options.list:
        print_recipes()
        return 0
    if options.recipe is None:
        raise ContextReadyError("Name a recipe, for example mini-d1; crt train --list shows all.")
    config = resolve(options.recipe, options.settings)
    if options.dry_run:
        print_settings(config)
        return 0
    return run_train(config) if config.task is None else run_pointer(config)


def run_train(config: "RunConfig") -> int:
    """Train in the foreground; the exit code is 0 at the last step and 128 + signal when one stopped it before."""
    from contextready.cli.display import ConsoleDisplay
    from contextready.train.trainer import train

    console = make_console()
    result = train(config, ConsoleDisplay(console))
    if result.speaks:
        console.print(ending(result))
    return 0 if result.stopped_by is None else 128 + result.stopped_by


def ending(result: "Result") -> str:
    """One sentence on how a run ended and what to do next."""
    from contextready.runs.sharded import METADATA

    if result.stopped_by is not None:
        name = signal.Signals(result.stopped_by).name
        return f"{name} at step {result.step:,}: saved {result.checkpoint}; the same command goes on from there."
    if (result.checkpoint / METADATA).is_file():
        return f"Done at step {result.step:,}: {result.checkpoint}. Next: crt unshard {result.run} OUT, crt eval OUT"
    return f"Done at step {result.step:,}: {result.checkpoint}. Next: crt eval {result.run}"


def print_recipes() -> None:
    """Every recipe with its shape and length."""
    from rich.table import Table

    from contextready.runs.recipes import load_recipe, recipe_names
    from contextready.runs.tasks import split_task, task_keys

    table = Table(box=None, padding=(0, 1, 0, 0))
    for column in ("recipe", "model", "batch × T", "steps", "K"):
        table.add_column(column, justify="left" if column in ("recipe", "model") else "right", no_wrap=True)
    keys = task_keys()
    for name in recipe_names():
        s = load_recipe(name)
        extra = s.get("correction") or ("+ FFN" if s.get("extra_ffn") else "")
        shape = (
            f"{'D' if s.get('correction') else 'N'}={s['layers']} C={s['width']}" if "layers" in s else "pretrained="
        )
        least = s.get("min_passes")
        drawn = "" if least in (None, "none") else f"{least}–"
        passes = f"{drawn}{s['passes']}" if "passes" in s else ""
        batch = s["batch_size"] * s.get("accumulate", 1)
        task, _ = split_task({key: value for key, value in s.items() if key in keys})
        length = s["block_size"] if task is None else task.length
        table.add_row(name, f"{shape} {extra}", f"{batch}×{length}", f"{s['steps']:,}", passes)
    make_console(tables=True).print(table)
    print("A model's name alone, such as owt-d5-c1120, means the first experiment that lists it.")


def print_settings(config: "RunConfig") -> None:
    """The settings a run would have, and its size, as JSON; nothing is trained."""
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
    print(json.dumps(config.as_dict() | {"cost": summary}, indent=1))
