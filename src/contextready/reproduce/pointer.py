"""The runs of the pointer-chasing tables: which are still to make, and what the others came to."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from contextready.errors import ContextReadyError
from contextready.reproduce.jobs import Job
from contextready.reproduce.pointer_rows import Row
from contextready.settings import parse_assignments
from contextready.train.config import RunConfig
from contextready.train.pointer import Outcome, outcome, resolve_pointer


@dataclass(frozen=True)
class Result:
    """A row with what each seed came to; a seed that has not run is absent."""

    row: Row
    config: RunConfig
    outcomes: dict[int, Outcome]


def jobs_of(rows: Sequence[Row], seeds: Sequence[int], out: Path, changes: Sequence[str]) -> list[Job]:
    """The runs that are not finished yet: the first seed of every row, then the next."""
    jobs = []
    for seed in seeds:
        for row in rows:
            words = with_changes(row.words(seed, out), changes)
            folder, steps = row.folder(seed, out), resolve_pointer(words).train.steps
            if not is_finished(folder, steps):
                jobs.append(Job(f"{row.answers} {row.name}, seed {seed}", folder, ("pointer", *words), steps))
    return jobs


def with_changes(words: Sequence[str], changes: Sequence[str]) -> tuple[str, ...]:
    """Words with the user's settings in the place of a row's own of the same key."""
    changed = set(parse_assignments(changes))
    for key in sorted(changed & {"out", "seed", "answers", "task", "layers", "correction", "gradient", "passes"}):
        raise ContextReadyError(f"{key} is what the rows differ in; leave {key} out (or run one row with crt pointer).")
    return (*(word for word in words if word.partition("=")[0] not in changed), *changes)


def is_finished(run: Path, steps: int) -> bool:
    """Whether a run has solved everything or used its steps."""
    found = outcome(run)
    return found is not None and (found.solved or found.step >= steps)


def results_of(rows: Sequence[Row], seeds: Sequence[int], out: Path, changes: Sequence[str]) -> list[Result]:
    """What the runs came to, as far as they have."""
    results = []
    for row in rows:
        config = resolve_pointer(with_changes(row.words(seeds[0], out), changes))
        found = {seed: done for seed in seeds if (done := outcome(row.folder(seed, out))) is not None}
        results.append(Result(row, config, found))
    return results
