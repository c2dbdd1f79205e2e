"""The runs of the study on disk: which are missing, and what each one gave."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from contextready.data.shards import Data
from contextready.errors import ContextReadyError
from contextready.evaluate.evaluate import evaluate_checkpoint
from contextready.files import read_json, write_json
from contextready.measure.perplexity import PARALLEL_TOKENS
from contextready.runs.checkpoint import data_of, newest_checkpoint, open_checkpoint
from contextready.runs.config import with_new_names
from contextready.runs.metrics import FILE, read_metrics
from contextready.runs.recipes import resolve
from contextready.runs.run_checks import check_same_run
from contextready.settings import parse_assignments
from contextready.solve.unroll import unroll
from contextready.study.trials import Trial
from contextready.train.jobs import Job
from contextready.train.trials import settings_of, with_changes

EVALUATION = "evaluation.json"
PASSES = (1, 2, 3, 5, 10)
EVALUATED_TOKENS = 1 << 16
"""Validation tokens of the evaluation, as many as the recipes score during training."""
TOLERANCES = (1e-1, 1e-2, 1e-3)
"""Largest relative changes of z at which a prompt counts as read."""
PROMPT_ROWS = 16
MOST_PROMPT_PASSES = 40
OF_TRIALS = {
    *("out", "seed", "layers", "width", "correction", "passes", "gradient"),
    *("convergence_weight", "correction_init", "correction_scale", "correction_gain"),
}
"""Settings in which the rows differ."""
PLACES = ("data", "out", "init_from")
"""Settings that only matter on the machine where a run was made."""

Record = dict[str, Any]
"""One run: its row, seed and settings, its learning curve, and its evaluation."""


def jobs_of(trials: Sequence[Trial], seeds: Sequence[int], out: Path, changes: Sequence[str]) -> list[Job]:
    """List the runs that are not finished yet: the first seed of every trial, then the next seed."""
    changed = set(with_new_names(parse_assignments(changes)))
    for key in sorted(changed & OF_TRIALS):
        raise ContextReadyError(
            f"{key} cannot be set here, because the rows differ in it; train one row with crt train."
        )
    jobs = []
    for seed in seeds:
        for trial in trials:
            words = with_changes(trial.words(seed, out), changes)
            folder, config = trial.folder(seed, out), resolve(words[0], words[1:])
            newest = newest_checkpoint(folder)
            if newest is not None:
                check_same_run(settings_of(folder).as_dict(), config, str(folder))
            if newest is None or int(newest.name.removeprefix("step-")) < config.train.steps:
                jobs.append(Job(f"{trial.name}, seed {seed}", folder, ("train", *words), config.train.steps))
    return jobs


def newest_step(run: Path) -> tuple[int, float | None]:
    """Return the newest step of a run that was validated, and its validation loss."""
    records = [r for r in read_metrics(run) if r.get("val_loss") is not None] if (run / FILE).is_file() else []
    return (records[-1]["step"], records[-1]["val_loss"]) if records else (0, None)


def evaluate_run(run: Path) -> Record:
    """Evaluate a run once: perplexity by K and streamed, contraction, and passes that a prompt needs."""
    path = run / EVALUATION
    newest = newest_checkpoint(run)
    assert newest is not None
    if path.is_file():
        known: Record = read_json(path)
        if known.get("checkpoint") == newest.name:
            return known
    checkpoint = open_checkpoint(newest)
    data = data_of(checkpoint, None)
    device = torch.device("cpu")
    found = evaluate_checkpoint(checkpoint, data, device, passes=PASSES, tokens=EVALUATED_TOKENS).as_record()
    found |= {"checkpoint": newest.name, "prompt_passes": _prompt_passes(checkpoint, data)}
    write_json(path, found)
    return found


@torch.inference_mode()
def _prompt_passes(checkpoint: Any, data: Data) -> dict[str, float] | None:
    """Return how many passes reading a prompt takes until no position changes by more than each tolerance, on average.

    A prompt is as long as a training sequence. One that has not settled after many passes counts as that many.
    """
    model = checkpoint.model().eval()
    if not model.is_recurrent:
        return None
    T = checkpoint.config["train"]["block_size"]
    rows = min(PROMPT_ROWS, (len(data.tokens("val")) - 1) // T, PARALLEL_TOKENS // T)
    ids = data.tokens("val").read(0, rows * T).astype("int64").reshape(rows, T)
    _, info = unroll(model, torch.from_numpy(ids), min(MOST_PROMPT_PASSES, T + 1))
    largest_KB = info.changes_KBT.amax(dim=2)
    found = {}
    for tolerance in TOLERANCES:
        # The first of passes 2, 3, … that changes little confirms the one before it.
        settled_KB = largest_KB <= tolerance
        needed = [int(s.float().argmax()) + 2 if bool(s.any()) else info.passes for s in settled_KB.unbind(1)]
        found[f"{tolerance:g}"] = sum(needed) / len(needed)
    return found


def finished_runs(trials: Sequence[Trial], out: Path) -> list[tuple[Trial, int]]:
    """List the trials and seeds whose runs in this folder have made all their steps."""
    found = []
    for trial in trials:
        for seed in trial.seeds(out):
            run = trial.folder(seed, out)
            if newest_checkpoint(run) is not None and newest_step(run)[0] >= settings_of(run).train.steps:
                found.append((trial, seed))
    return found


def read_records(
    trials: Sequence[Trial], out: Path, evaluating: Callable[[str], None] = lambda name: None
) -> list[Record]:
    """Collect all finished runs of these trials in a folder, and evaluate those that are not evaluated yet."""
    records = []
    for trial, seed in finished_runs(trials, out):
        run = trial.folder(seed, out)
        config = settings_of(run)
        curve = [r for r in read_metrics(run) if r.get("val_loss") is not None]
        if not (run / EVALUATION).is_file():
            evaluating(run.name)
        records.append(
            {
                "key": trial.key,
                "seed": seed,
                "precision": open_checkpoint(run, verify=False).progress.precision,
                "model": {key: value for key, value in asdict(config.model).items() if key != "pretrained"},
                "train": {key: value for key, value in asdict(config.train).items() if key not in PLACES},
                "curve": {key: [r[key] for r in curve] for key in ("step", "tokens", "macs", "seconds", "val_loss")},
                "evaluation": evaluate_run(run),
            }
        )
    return records
