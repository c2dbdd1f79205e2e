"""`crt pointer`: train a model on pointer chasing, show which levels it solves, and plot them over training."""

import argparse
from typing import TYPE_CHECKING

from contextready.cli.console import make_console
from contextready.cli.options import Verbs, verb
from contextready.cli.train import check_fits, ending
from contextready.errors import ContextReadyError

if TYPE_CHECKING:
    from contextready.pointer.outcome import Outcome
    from contextready.runs.config import RunConfig

DESCRIPTION = """\
Train a model on pointer chasing, the paper's task that measures how many lookups in a row a
model can make. Training stops when every level is solved (at least 0.99 of the answers are
right on 2,000 fresh sequences) or after the last step. Run the same command again to resume.
The folder of the run also gets a plot of all levels over training, wave.png and wave.svg."""
EXAMPLES = """\
crt pointer --show hops=2 answers=visible          # print an example in the paper's format
crt pointer                                        # train one context-ready layer
crt pointer --show pointer-d1-c256                 # the layout of the author's runs
crt pointer correction=none layers=2 out=runs/n2   # train a two-layer transformer
crt pointer correction=none layers=1 extra_ffn=true out=runs/n1-ffn
crt pointer gradient=unroll passes=10 out=runs/k10
crt pointer gradient=implicit passes=20 out=runs/implicit
crt pointer pointer-d1-c256                        # train at the paper's scale"""
TERMS = """\
terms:
  hops              A base table maps keys to values. Each hop adds a table that
                    maps new keys to the keys of the table before it.
  level             A query at level n follows n pointers and then reads a value.
  window            How many tokens a token attends to, itself included. The
                    default is 6 · keys + 8: a query sees its own level and
                    nothing before the previous one. With queries=none there is
                    no window by default.
  masked answers    If the input shows the answer after each query (visible), a
                    query only has to copy an answer from the level before. With
                    masked answers it has to follow all pointers.
  absent answers    Nothing follows a query, as in the runs behind the paper's table
                    (hops=9). The final query asks for the last level once more
                    and counts as one more level."""


def add(verbs: Verbs) -> None:
    """Add `crt pointer`."""
    pointer = verb(
        verbs,
        "pointer",
        "train a model on pointer chasing, the paper's test of effective depth",
        DESCRIPTION,
        EXAMPLES,
        _notes,
    )
    pointer.add_argument(
        "settings",
        nargs="*",
        metavar="RECIPE|key=value",
        help="a recipe (default: pointer-mini) and settings that change it",
    )
    pointer.add_argument("--show", action="store_true", help="print an example sequence and exit without training")
    pointer.set_defaults(run=_run, more_words="settings")


def _notes() -> str:
    from contextready.pointer.task import PointerTask
    from contextready.settings import describe_settings

    return (
        f"{TERMS}\n\n"
        f"settings of the task (the recipe pointer-mini has hops=4 keys=3):\n{describe_settings(PointerTask)}\n\n"
        "For the settings of the model and the training, see crt train --help."
    )


def _run(options: argparse.Namespace) -> int:
    from contextready.pointer.outcome import resolve_pointer

    config = resolve_pointer(options.settings)
    if options.show:
        print_example(config)
        return 0
    return run_pointer(config)


def run_pointer(config: "RunConfig") -> int:
    """Train in the foreground and report which levels were solved; the exit code is that of `crt train`."""
    from contextready.cli.pointer_display import PointerDisplay
    from contextready.pointer.outcome import outcome
    from contextready.pointer.plots import draw_waves, read_wave
    from contextready.pointer.task import PointerTask
    from contextready.runs.metrics import FILE
    from contextready.train.trainer import train

    check_fits(config)
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
            f"The run {result.run} is finished, but its file {FILE} with the validations is missing or empty. Restore "
            "the file, or train again with another out=."
        )
    console.print(describe_outcome(newest, config.task.levels))
    try:
        written = draw_waves([read_wave(result.run)], result.run / "wave", 1 / config.task.values)
        console.print(f"Plot of all levels over training: {' and '.join(map(str, written))}")
    except ContextReadyError as error:
        console.print(f"The plot was not drawn. {error}")
    return 0


def describe_outcome(outcome: "Outcome", levels: int) -> str:
    """Describe which levels were solved, and when."""
    accuracy = " ".join(f"{part:.3f}" for part in outcome.accuracy)
    if outcome.solved:
        return (
            f"All {levels} levels solved at step {outcome.step:,}, after {outcome.seconds:,.0f} s of updates. "
            f"Accuracy by level: {accuracy}"
        )
    return (
        f"{outcome.levels_solved} of {levels} levels solved after all {outcome.step:,} steps "
        f"({outcome.seconds:,.0f} s of updates). Accuracy by level: {accuracy}"
    )


def print_example(config: "RunConfig") -> None:
    """Print the first training sequence of a run in the format of the paper."""
    from contextready.model.config import ModelConfig
    from contextready.pointer.task import PointerTask

    task = config.task
    assert isinstance(task, PointerTask)
    assert isinstance(config.model, ModelConfig)
    print(
        f"{task.tokens} tokens, vocabulary of {task.vocab_size}, answers {task.answers}, attention window "
        f"{config.model.window or 'none'}:"
    )
    print(task.shown(task.batch("train", config.train.seed, 0, 1)))
