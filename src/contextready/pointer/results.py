"""The runs of the pointer-chasing tables: which are still to make, and what the others came to."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from contextready.errors import ContextReadyError
from contextready.files import read_json
from contextready.pointer.outcome import Outcome, outcome, resolve_pointer
from contextready.pointer.trials import Trial
from contextready.runs.config import RunConfig, check_same_run, with_new_names
from contextready.settings import parse_assignments
from contextready.train.jobs import Job

OF_TRIALS = {"out", "seed", "answers", "task", "layers", "correction", "gradient", "passes", "min_passes"}
"""What trials differ in by their names."""
MAY_CHANGE = {"steps", "batch_size", "eval_every"}
"""What some trials set and others do not, and no name tells."""


@dataclass(frozen=True)
class Result:
    """A trial with what each seed came to."""

    trial: Trial
    config: RunConfig
    """Of the first seed, as its run says itself."""
    outcomes: dict[int, Outcome]
    unfinished: frozenset[int]
    """Seeds that have neither solved everything nor used their steps."""


def jobs_of(trials: Sequence[Trial], seeds: Sequence[int], out: Path, changes: Sequence[str]) -> list[Job]:
    """The runs that are not finished yet: the first seed of every trial, then the next.

    Runs that are there must have been made with the same settings, also those of other seeds: they share a table.
    """
    changed = set(with_new_names(parse_assignments(changes)))
    own = {word.partition("=")[0] for trial in trials for word in trial.settings}
    if any(trial.part == "growth" for trial in trials):
        own |= {"hops", "values", "width"}
    for key in sorted(changed & (OF_TRIALS | own - MAY_CHANGE)):
        raise ContextReadyError(f"{key} is what the rows differ in; leave {key} out (or run one row with crt pointer).")
    for trial in trials:
        for seed in trial.seeds(out):
            folder = trial.folder(seed, out)
            if outcome(folder) is not None:
                asked = resolve_pointer(with_changes(trial.words(seed, out), changes))
                check_same_run(settings_of(folder).as_dict(), asked, str(folder))
    jobs = []
    for seed in seeds:
        for trial in trials:
            words = with_changes(trial.words(seed, out), changes)
            folder, steps = trial.folder(seed, out), resolve_pointer(words).train.steps
            if not is_finished(outcome(folder), steps):
                jobs.append(Job(f"{trial.answers} {trial.name}, seed {seed}", folder, ("pointer", *words), steps))
    return jobs


def with_changes(words: Sequence[str], changes: Sequence[str]) -> tuple[str, ...]:
    """Words with the user's settings in the place of a trial's own of the same key."""
    changed = set(parse_assignments(changes))
    return (*(word for word in words if word.partition("=")[0] not in changed), *changes)


def is_finished(newest: Outcome | None, steps: int) -> bool:
    """Whether a run has solved everything or used its steps."""
    return newest is not None and (newest.solved or newest.step >= steps)


def settings_of(run: Path) -> RunConfig:
    """The settings that a run was made with, as its folder says."""
    saved = read_json(run / "config.json")
    try:
        return RunConfig.from_dict(saved)
    except (KeyError, TypeError, AttributeError):
        raise ContextReadyError(f"{run / 'config.json'} does not hold the settings of a run: it is damaged.") from None


def results_of(trials: Sequence[Trial], out: Path) -> list[Result]:
    """What the runs in a folder came to, as far as they have; trials without any are left out."""
    results = []
    for trial in trials:
        folders = {seed: trial.folder(seed, out) for seed in trial.seeds(out)}
        outcomes = {seed: done for seed, folder in folders.items() if (done := outcome(folder)) is not None}
        if outcomes:
            made = {seed: settings_of(folders[seed]) for seed in outcomes}
            unfinished = {seed for seed in outcomes if not is_finished(outcomes[seed], made[seed].train.steps)}
            results.append(Result(trial, made[min(outcomes)], outcomes, frozenset(unfinished)))
    return results
