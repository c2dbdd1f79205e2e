"""`crt pointer`: train a model on pointer chasing, watch its levels being solved, draw the wave."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from contextready.analysis.pointer_plots import draw_waves, level_records, read_wave
from contextready.errors import ContextReadyError
from contextready.model.build import ModelConfig
from contextready.settings import parse_assignments
from contextready.train.config import RunConfig
from contextready.train.console import ending
from contextready.train.metrics import FILE
from contextready.train.pointer_display import PointerDisplay
from contextready.train.recipes import load_recipe, resolve
from contextready.train.trainer import train

RECIPE = "pointer-mini"


class Outcome(NamedTuple):
    """Where a run on pointer chasing stands."""

    step: int
    seconds: float
    """Spent on updates."""
    accuracy: list[float]
    levels_solved: int
    solved: bool
    """Whether all levels are."""


def outcome(run: Path) -> Outcome | None:
    """The newest validation of a run; none if it has none yet."""
    if not (run / FILE).is_file():
        return None
    records = level_records(run)
    return Outcome(*(records[-1][key] for key in Outcome._fields)) if records else None


def resolve_pointer(words: Sequence[str]) -> RunConfig:
    """`[RECIPE] [key=value …]` as a run on pointer chasing."""
    named = bool(words) and "=" not in words[0]
    recipe, changes = (words[0], words[1:]) if named else (RECIPE, words)
    given = parse_assignments(changes).get("task")
    if given == "text":
        raise ContextReadyError("task=text is not pointer chasing; leave task out, or learn text with crt train.")
    if given is None and load_recipe(recipe).get("task") != "pointer":
        raise ContextReadyError(f"{recipe} learns text, not pointer chasing; train it with crt train {recipe}.")
    return resolve(recipe, changes)


def run_pointer(config: RunConfig) -> int:
    """Train in the foreground and say which levels were solved; the exit code is that of `crt train`."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, soft_wrap=True)
    result = train(config, PointerDisplay(console))
    if result.stopped_by is not None or not result.speaks:
        if result.speaks:
            console.print(ending(result))
        return 128 + result.stopped_by if result.stopped_by is not None else 0
    found = outcome(result.run)
    assert config.task is not None
    if found is None:
        raise ContextReadyError(
            f"{result.run} has made all its steps, but {FILE}, where its validations stood, is gone or empty; put it "
            "back, or choose another out=."
        )
    console.print(describe_outcome(found, config.task.levels))
    try:
        written = draw_waves([read_wave(result.run)], result.run / "wave", 1 / config.task.values)
        console.print(f"The wave: {' and '.join(map(str, written))}")
    except ContextReadyError as error:
        console.print(f"No picture: {error}")
    return 0


def describe_outcome(found: Outcome, levels: int) -> str:
    """One sentence on what was solved, and when."""
    accuracy = " ".join(f"{part:.3f}" for part in found.accuracy)
    if found.solved:
        return f"All {levels} levels solved at step {found.step:,}, after {found.seconds:,.0f} s of updates: {accuracy}"
    return (
        f"{found.levels_solved} of {levels} levels solved after all {found.step:,} steps ({found.seconds:,.0f} s of "
        f"updates): {accuracy}"
    )


def print_example(config: RunConfig) -> None:
    """The first sequence that a run learns from, as the paper prints it."""
    task = config.task
    assert task is not None
    assert isinstance(config.model, ModelConfig)
    print(
        f"{task.length} tokens, {task.vocab_size} kinds of them, answers {task.answers}, window "
        f"{config.model.window or 'none'}:"
    )
    print(task.shown(task.batch("train", config.train.seed, 0, 1)))
