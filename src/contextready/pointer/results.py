"""The runs behind the pointer-chasing tables: which ones are still missing, and the results of the others."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from contextready.errors import ContextReadyError
from contextready.pointer.outcome import Outcome, outcome, resolve_pointer
from contextready.pointer.trials import Trial
from contextready.runs.config import RunConfig, with_new_names
from contextready.runs.run_checks import check_same_run
from contextready.settings import parse_assignments
from contextready.train.cost import run_macs
from contextready.train.jobs import Job
from contextready.train.trials import settings_of, with_changes

OF_TRIALS = {"out", "seed", "answers", "task", "layers", "correction", "gradient", "passes"}
"""Settings that define a trial and that its name states."""
MAY_CHANGE = {"steps", "batch_size", "eval_every"}
"""Settings that only some trials have and that no name states, so the user may change them for all."""


@dataclass(frozen=True)
class Result:
    """A trial with the outcome of each seed."""

    trial: Trial
    config: RunConfig
    """The settings of the first seed's run, as saved in its folder."""
    outcomes: dict[int, Outcome]
    unfinished: frozenset[int]
    """Seeds whose runs have neither solved all levels nor made all their steps."""


def jobs_of(trials: Sequence[Trial], seeds: Sequence[int], out: Path, changes: Sequence[str]) -> list[Job]:
    """List the runs that are not finished yet: the first seed of every trial, then the next seed.

    Runs that already exist must have the same settings, even those of other seeds, because they share a table.
    """
    changed = set(with_new_names(parse_assignments(changes)))
    own = {word.partition("=")[0] for trial in trials for word in trial.settings}
    if any(trial.part == "growth" for trial in trials):
        own |= {"hops", "keys", "values", "queries", "window", "width"}
    for key in sorted(changed & (OF_TRIALS | own - MAY_CHANGE)):
        raise ContextReadyError(
            f"{key} cannot be set here, because the rows differ in it; train one row with crt pointer."
        )
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
            folder, config = trial.folder(seed, out), resolve_pointer(words)
            newest, steps = outcome(folder), config.train.steps
            if not is_finished(newest, steps):
                # Most runs solve all levels and stop earlier, so this is what is left at most.
                name, macs = (
                    f"{trial.answers} {trial.name}, seed {seed}",
                    run_macs(config, newest.step if newest else 0),
                )
                jobs.append(Job(name, folder, ("pointer", *words), steps, macs=macs))
    return jobs


def is_finished(newest: Outcome | None, steps: int) -> bool:
    """Whether a run has solved all levels or made all its steps."""
    return newest is not None and (newest.solved or newest.step >= steps)


def results_of(trials: Sequence[Trial], out: Path) -> list[Result]:
    """Collect the results of the runs in a folder, finished or not; trials without runs are left out."""
    results = []
    for trial in trials:
        folders = {seed: trial.folder(seed, out) for seed in trial.seeds(out)}
        outcomes = {seed: done for seed, folder in folders.items() if (done := outcome(folder)) is not None}
        if outcomes:
            made = {seed: settings_of(folders[seed]) for seed in outcomes}
            unfinished = {seed for seed in outcomes if not is_finished(outcomes[seed], made[seed].train.steps)}
            results.append(Result(trial, made[min(outcomes)], outcomes, frozenset(unfinished)))
    return results
