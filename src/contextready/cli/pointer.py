"""`crt pointer`: train a model on pointer chasing, watch its levels being solved, draw the wave."""

import argparse
from typing import TYPE_CHECKING

from contextready.cli.console import make_console
from contextready.cli.options import Verbs, verb
from contextready.cli.train import ending
from contextready.errors import ContextReadyError

if TYPE_CHECKING:
    from contextready.pointer.outcome import Outcome
    from contextready.runs.config import RunConfig


def add(verbs: Verbs) -> None:
    """Describe `crt pointer`."""
    from contextready.pointer.task import PointerTask
    from contextready.settings import describe_settings

    pointer = verb(
        verbs,
        "pointer",
        "pointer chasing: train a model, watch its levels being solved",
        "Train a model on pointer chasing, the task on which depth can be counted, until every level\n"
        "is solved (0.99 of the answers right on 2,000 fresh sequences) or its steps are made. The\n"
        "same command goes on after any interruption. Writes the wave of levels as a picture.",
        f"settings of the task (the recipe pointer-mini has hops=4 keys=3):\n{describe_settings(PointerTask)}\n\n"
        "settings of model and training: see crt train --help.\n\n"
        "examples:\n"
        "  crt pointer --show hops=2 answers=visible                    as the paper prints it\n"
        "  crt pointer                                                  one context-ready layer\n"
        "  crt pointer correction=none layers=2 out=runs/n2             a transformer of two layers\n"
        "  crt pointer correction=none layers=1 extra_ffn=true out=runs/n1-ffn\n"
        "  crt pointer gradient=unroll passes=10 min_passes=none out=runs/k10\n"
        "  crt pointer gradient=implicit passes=20 min_passes=none out=runs/implicit\n"
        "  crt pointer pointer-d1-c256                                  the paper's",
    )
    pointer.add_argument(
        "settings", nargs="*", metavar="RECIPE|key=value", help="a recipe (default: pointer-mini), and changes to it"
    )
    pointer.add_argument("--show", action="store_true", help="print an example, and train nothing")
    pointer.set_defaults(run=_run, more_words="settings")


def _run(options: argparse.Namespace) -> int:
    from contextready.pointer.outcome import resolve_pointer

    config = resolve_pointer(options.settings)
    if options.show:
        print_example(config)
        return 0
    return run_pointer(config)


def run_pointer(config: "RunConfig") -> int:
    """Train in the foreground and say which levels were solved; the exit code is that of `crt train`."""
    from contextready.cli.pointer_display import PointerDisplay
    from contextready.pointer.outcome import outcome
    from contextready.pointer.plots import draw_waves, read_wave
    from contextready.pointer.task import PointerTask
    from contextready.runs.metrics import FILE
    from contextready.train.trainer import train

    console = make_console()
    result = train(config, PointerDisplay(console))
    if result.stopped_by is not None or not result.speaks:
        if result.speaks:
            console.print(ending(result))
        return 128 + result.stopped_by if result.stopped_by is not None else 0
    newest = outcome(result.run)
    assert isinstance(config.task, PointerTask)
    if newest is None:
        raise ContextReadyError(
            f"{result.run} has made all its steps, but {FILE}, where its validations stood, is gone or empty; put it "
            "back, or choose another out=."
        )
    console.print(describe_outcome(newest, config.task.levels))
    try:
        written = draw_waves([read_wave(result.run)], result.run / "wave", 1 / config.task.values)
        console.print(f"The wave: {' and '.join(map(str, written))}")
    except ContextReadyError as error:
        console.print(f"No picture: {error}")
    return 0


def describe_outcome(outcome: "Outcome", levels: int) -> str:
    """One sentence on what was solved, and when."""
    accuracy = " ".join(f"{part:.3f}" for part in outcome.accuracy)
    if outcome.solved:
        return (
            f"All {levels} levels solved at step {outcome.step:,}, after {outcome.seconds:,.0f} s of updates: "
            f"{accuracy}"
        )
    return (
        f"{outcome.levels_solved} of {levels} levels solved after all {outcome.step:,} steps "
        f"({outcome.seconds:,.0f} s of updates): {accuracy}"
    )


def print_example(config: "RunConfig") -> None:
    """The first sequence that a run learns from, as the paper prints it."""
    from contextready.model.config import ModelConfig
    from contextready.pointer.task import PointerTask

    task = config.task
    assert isinstance(task, PointerTask)
    assert isinstance(config.model, ModelConfig)
    print(
        f"{task.length} tokens, {task.vocab_size} kinds of them, answers {task.answers}, window "
        f"{config.model.window or 'none'}:"
    )
    print(task.shown(task.batch("train", config.train.seed, 0, 1)))
