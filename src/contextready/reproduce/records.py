"""The runs of the miniature on disk: which are missing, and the result file that is made from the others."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from contextready.errors import ContextReadyError
from contextready.evaluate.evaluate import evaluate_checkpoint
from contextready.files import read_json, write_json
from contextready.model.config import ModelConfig
from contextready.reproduce.measures import Record
from contextready.reproduce.runs import RUNS, Run, with_starts
from contextready.runs.checkpoint import data_of, newest_checkpoint, open_checkpoint
from contextready.runs.config import RunConfig, with_new_names
from contextready.runs.metrics import read_metrics
from contextready.runs.passes import parse_passes
from contextready.runs.recipes import check_inputs, resolve
from contextready.runs.run_checks import check_same_run
from contextready.settings import parse_assignments
from contextready.study.results import PLACES, newest_step
from contextready.train.cost import run_macs
from contextready.train.jobs import Job
from contextready.train.trials import settings_of, with_changes

FILE = "record.json"
"""The record of a run, in its folder."""
PASSES = (1, 2, 3, 5, 10)
EVALUATED_TOKENS = 1 << 15
MAY_CHANGE = ("data", "steps", "lr", "warmup", "precision", "eval_every", "eval_tokens", "save_every", "device", "keep")
"""Settings that no row of a table is about."""


def check_changes(changes: Sequence[str]) -> None:
    """Refuse settings in which the rows differ."""
    for key in with_new_names(parse_assignments(changes)):
        if key not in MAY_CHANGE:
            raise ContextReadyError(
                f"{key} cannot be set here, because the rows differ in it or depend on it; these can: "
                f"{', '.join(MAY_CHANGE)}."
            )


def words_of(run: Run, seed: int, out: Path, changes: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments of `crt train` for a run."""
    words = with_changes(run.words(seed, out), changes)
    if run.length != 1.0:
        # Without the run that it starts from, which may not exist yet.
        plain = [word for word in words[1:] if not word.startswith("init_from=")]
        words = with_changes(words, [f"steps={max(1, round(run.length * resolve(words[0], plain).train.steps))}"])
    return words


def jobs_of(
    keys: Sequence[str], seeds: Sequence[int], out: Path, changes: Sequence[str], missing_ok: bool = False
) -> tuple[list[Job], int]:
    """List the runs that are not finished yet, the first seed of all of them first, and count all runs.

    With `missing_ok`, the data may be missing.
    """
    check_changes(changes)
    runs = with_starts(keys)
    for run in runs:
        for seed in set(run.seeds(out)) - set(seeds):
            # Runs of other seeds share a table with the new ones.
            _check_made(run, seed, out, changes)
    jobs = []
    for seed in seeds:
        for run in runs:
            words, folder = words_of(run, seed, out, changes), run.folder(seed, out)
            config = resolve(words[0], words[1:])
            if not missing_ok:
                check_data(words, config)
            done = _check_made(run, seed, out, changes)
            if done < config.train.steps:
                after = None if run.start is None else out / f"{run.start}-seed{seed}"
                name, macs = f"{run.name}, seed {seed}", run_macs(config, done)
                jobs.append(Job(name, folder, ("train", *words), config.train.steps, after, macs))
    return jobs, len(runs) * len(seeds)


def _check_made(run: Run, seed: int, out: Path, changes: Sequence[str]) -> int:
    """Return how many steps a run has made; refuse one that was made with other settings."""
    folder = run.folder(seed, out)
    newest = newest_checkpoint(folder)
    if newest is None:
        return 0
    words = words_of(run, seed, out, changes)
    check_same_run(settings_of(folder).as_dict(), resolve(words[0], words[1:]), str(folder))
    return int(newest.name.removeprefix("step-"))


def check_data(words: Sequence[str], config: RunConfig) -> None:
    """Raise an error if the data of a run is missing; the run that it starts from may still have to be trained."""
    from_new = replace(config, train=replace(config.train, init_from=None))
    check_inputs(words[0], [word for word in words[1:] if not word.startswith("init_from=")], from_new)


def is_finished(folder: Path) -> bool:
    """Whether a run has made all its steps."""
    return newest_checkpoint(folder) is not None and newest_step(folder)[0] >= settings_of(folder).train.steps


def record_of(run: Run, seed: int, out: Path) -> Record:
    """Return the record of a finished run, which is made once and kept in its folder.

    It contains no times and no paths, so it is the same however often the run was interrupted.
    """
    folder = run.folder(seed, out)
    newest = newest_checkpoint(folder)
    assert newest is not None
    if (folder / FILE).is_file():
        known: Record = read_json(folder / FILE)
        if known.get("checkpoint") == newest.name:
            return known
    checkpoint, config = open_checkpoint(newest), settings_of(folder)
    assert isinstance(config.model, ModelConfig)
    found = evaluate_checkpoint(
        checkpoint, data_of(checkpoint, None), torch.device("cpu"), passes=PASSES, tokens=EVALUATED_TOKENS
    )
    curve = [r for r in read_metrics(folder) if r.get("val_loss") is not None]
    record = {
        "key": run.key,
        "seed": seed,
        "checkpoint": newest.name,
        "precision": checkpoint.progress.precision,
        "passes": None if config.train.passes is None else parse_passes(config.train.passes).most,
        "model": asdict(config.model),
        "train": {key: value for key, value in asdict(config.train).items() if key not in PLACES},
        "curve": {key: [r[key] for r in curve] for key in ("step", "tokens", "macs", "val_loss")},
        "evaluation": _short(found.as_record()),
    }
    write_json(folder / FILE, record)
    return record


def _short(evaluation: dict[str, Any]) -> dict[str, Any]:
    """Keep what the tables need."""

    def score(one: dict[str, Any] | None) -> dict[str, Any] | None:
        return None if one is None else {"perplexity": one["perplexity"], "perplexity_error": one["perplexity_error"]}

    kept = {key: evaluation[key] for key in ("tokens", "rate", "norm_rate", "channel_rate")}
    parallel = {k: score(one) for k, one in evaluation["parallel"].items()}
    return kept | {"parallel": parallel, "sequential": score(evaluation["sequential"])}


def finished_runs(out: Path) -> list[tuple[Run, int]]:
    """List the runs of the miniature in a folder that have made all their steps."""
    return [(run, seed) for run in RUNS.values() for seed in run.seeds(out) if is_finished(run.folder(seed, out))]


def read_records(out: Path, evaluating: Callable[[str], None] = lambda name: None) -> list[Record]:
    """Return the records of all finished runs in a folder; runs that are not evaluated yet are evaluated now."""
    records = []
    for run, seed in finished_runs(out):
        if not (run.folder(seed, out) / FILE).is_file():
            evaluating(f"{run.name}, seed {seed}")
        records.append(record_of(run, seed, out))
    return sorted(records, key=lambda record: (record["key"], record["seed"]))
