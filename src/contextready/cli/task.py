"""`crt task`: train a model on a state-tracking task, and show the accuracy at longer and longer lengths."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from contextready.cli.console import make_console
from contextready.cli.options import Verbs, verb
from contextready.cli.train import check_fits, ending
from contextready.errors import ContextReadyError

if TYPE_CHECKING:
    from contextready.runs.config import RunConfig
    from contextready.state.lengths import Lengths

DESCRIPTION = """\
Train a model on a task in which every symbol changes a state, and the state is asked for after
each. A transformer of fixed depth can follow such a state only so far. Training stops when every
length is solved, or after the last step; then the model is tested on sequences up to eight times
as long. Run the same command again to resume."""
EXAMPLES = """\
crt task s5 --show                                     # print an example
crt task s5                                            # train one context-ready layer
crt task s5 window=4 out=runs/s5-w4                    # attention over four positions only
crt task s5 correction=none layers=4 out=runs/s5-n4    # train a four-layer transformer
crt task s5 --gru out=runs/s5-gru                      # a plain GRU, as a control
crt task parity gradient=unroll passes=2..16 out=runs/parity-k16
crt task assign pretrained=stories15M out=runs/assign-stories   # a pretrained model"""
NAMES = """\
tasks:
  s5, a5            Multiply permutations one by one (the word problem of the group); the
                    answer is the product so far. These need depth that grows with the length.
  z60               The same with addition modulo 60, which does not.
  parity, count     Count ones modulo 2 and modulo 10.
  word              The word problem of any group: group=S4, group=Z7, …
  assign            Variables get values or each other's values, and are asked for: x=3; y=x; y?
  stack             Push and pop symbols; the answer is the symbol on top.
  pointer           Pointer chasing, the paper's task; the same as crt pointer.

A length is solved if the accuracy there, and at all shorter lengths, is at least 0.99. The accuracy
at a length is that of the last quarter of the symbols up to it."""


def add(verbs: Verbs) -> None:
    """Add `crt task`."""
    task = verb(verbs, "task", "train a model on a state-tracking task", DESCRIPTION, EXAMPLES, _notes)
    task.add_argument("task", metavar="NAME", help="the task (see below)")
    task.add_argument("settings", nargs="*", metavar="key=value", help="settings of the task, model and training")
    task.add_argument("--show", action="store_true", help="print an example sequence and exit without training")
    task.add_argument("--gru", action="store_true", help="train a plain GRU with the same width and layers instead")
    task.set_defaults(run=_run, more_words="settings")


def _notes() -> str:
    from contextready.settings import describe_settings
    from contextready.state.assign import AssignTask
    from contextready.state.stack import StackTask
    from contextready.state.word import WordTask

    parts = [NAMES]
    for title, cls in (("word problems", WordTask), ("assign", AssignTask), ("stack", StackTask)):
        parts.append(f"settings of {title}:\n{describe_settings(cls)}")
    return "\n\n".join([*parts, "For the settings of the model and the training, see crt train --help."])


def _run(options: argparse.Namespace) -> int:
    from contextready.state.names import POINTER, resolve_task

    if options.task == POINTER:
        return _pointer(options)
    config = resolve_task(options.task, options.settings)
    if options.show:
        print_example(config)
        return 0
    return run_task(config, gru=options.gru)


def _pointer(options: argparse.Namespace) -> int:
    from contextready.cli import pointer
    from contextready.pointer.outcome import resolve_pointer

    if options.gru:
        raise ContextReadyError("--gru is not for pointer chasing; leave it out.")
    config = resolve_pointer(options.settings)
    if options.show:
        pointer.print_example(config)
        return 0
    return pointer.run_pointer(config)


def run_task(config: "RunConfig", gru: bool = False) -> int:
    """Train in the foreground, test, and report; the exit code is that of `crt train`."""
    from pathlib import Path

    from contextready.cli.task_display import TaskDisplay
    from contextready.state.control import build_control, train_control
    from contextready.state.lengths import measure
    from contextready.state.tokens import tokens_of
    from contextready.train.trainer import train

    check_fits(config)
    # Before a folder is created.
    tokens_of(config)
    console = make_console()
    if gru:
        build_control(config)
        stopped, speaks = train_control(config, TaskDisplay(console)), True
        if stopped is not None:
            console.print("Interrupted. A GRU is trained in one go; run the same command again to start over.")
    else:
        result = train(config, TaskDisplay(console))
        stopped, speaks = result.stopped_by, result.speaks
        if speaks and stopped is not None:
            console.print(ending(result))
    if stopped is not None or not speaks:
        return 128 + stopped if stopped is not None else 0
    console.print(describe_lengths(measure(Path(config.train.out))), soft_wrap=True)
    return 0


def describe_lengths(found: "Lengths") -> str:
    """Describe the accuracy at each length of the test, how far the model got, and what it could reach at best."""

    def cells(accuracy: Sequence[float]) -> str:
        return ", ".join(f"{n}: {value:.3f}" for n, value in zip(found.lengths, accuracy, strict=True))

    text = (
        f"Step {found.step:,}. Accuracy by length: {cells(found.accuracy)}. Longest length solved: {found.solved} of "
        f"{found.lengths[-1]}. Guessing: {found.chance:.3f}."
    )
    if found.best is not None:
        text += f" At best with this window: {cells(found.best)}."
    return text


def print_example(config: "RunConfig") -> None:
    """Print the first training sequence of a run."""
    from contextready.state.task import StateTask

    task = config.task
    assert isinstance(task, StateTask)
    print(f"{task.title}: {task.tokens} tokens, vocabulary of {task.vocab_size}; chance {task.guess(task.length):.3g}:")
    print(task.shown(task.batch("train", config.train.seed, 0, 1)))
