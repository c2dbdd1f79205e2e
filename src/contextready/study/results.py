"""The runs of the study on disk: which are missing, and what each one gave."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from contextready.data.shards import Data
from contextready.errors import ContextReadyError
from contextready.evaluate.evaluate import evaluate_checkpoint
from contextready.files import read_json, write_json
from contextready.model.config import ModelConfig
from contextready.model.transformer import Transformer
from contextready.runs.checkpoint import data_of, newest_checkpoint, open_checkpoint
from contextready.runs.config import PretrainedModelConfig, with_new_names
from contextready.runs.metrics import FILE, read_metrics
from contextready.runs.recipes import resolve
from contextready.runs.run_checks import check_same_run
from contextready.settings import parse_assignments
from contextready.solve.norms import largest_change
from contextready.solve.prefill import prefill
from contextready.study.trials import Trial
from contextready.train.cost import run_macs
from contextready.train.jobs import Job
from contextready.train.trials import settings_of, with_changes

EVALUATION = "evaluation.json"
PASSES = (1, 2, 3, 5, 10)
EVALUATED_TOKENS = 1 << 14
"""Validation tokens of the evaluation; learning curves use those of the recipes."""
TOLERANCES = (1e-1, 1e-2, 1e-3)
"""Tolerances with which prompts are read."""
PARALLEL_SOLVERS = ("jacobi", "sweep")
PROMPTS = 16
SEGMENT = 16
"""Length of sweep's segments, which otherwise depends on the hardware."""
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
            if trial.longer != 1.0:
                words = with_changes(words, [f"steps={round(trial.longer * config.train.steps)}"])
                config = resolve(words[0], words[1:])
            newest = newest_checkpoint(folder)
            if newest is not None:
                check_same_run(settings_of(folder).as_dict(), config, str(folder))
            done = 0 if newest is None else int(newest.name.removeprefix("step-"))
            if done < config.train.steps:
                name, macs = f"{trial.name}, seed {seed}", run_macs(config, done)
                jobs.append(Job(name, folder, ("train", *words), config.train.steps, macs=macs))
    return jobs


def newest_step(run: Path) -> tuple[int, float | None]:
    """Return the newest step of a run that was validated, and its validation loss."""
    records = [r for r in read_metrics(run) if r.get("val_loss") is not None] if (run / FILE).is_file() else []
    return (records[-1]["step"], records[-1]["val_loss"]) if records else (0, None)


def evaluate_run(run: Path) -> Record:
    """Evaluate a run once: perplexity by K and streamed, contraction, and what reading a prompt costs."""
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
    found |= {"checkpoint": newest.name, "prompts": _read_prompts(checkpoint, data)}
    write_json(path, found)
    return found


@torch.inference_mode()
def _read_prompts(checkpoint: Any, data: Data) -> dict[str, dict[str, dict[str, float]]] | None:
    """Read prompts with each parallel solver and tolerance: the cost in plain passes, and the largest error of z.

    A prompt is as long as a training sequence. Costs and errors are means over prompts, and an error is relative to the
    norm of the exact z at its position.
    """
    model = checkpoint.model().eval()
    if not model.is_recurrent or not isinstance(model.backbone, Transformer):
        return None
    T = checkpoint.config["train"]["block_size"]
    rows = min(PROMPTS, (len(data.tokens("val")) - 1) // T)
    tokens_RT = torch.from_numpy(data.tokens("val").read(0, rows * T).astype("int64").reshape(rows, T))
    # Such a state keeps the carried vectors of all positions.
    start = model.init_state(1, history=T)
    exact = [prefill(model, row_T[None], start, solver="sequential").state.carried_BRC for row_T in tokens_RT]
    found: dict[str, dict[str, dict[str, float]]] = {}
    for solver in PARALLEL_SOLVERS:
        for tolerance in TOLERANCES:
            costs, errors = [], []
            for row_T, exact_1RC in zip(tokens_RT, exact, strict=True):
                read = prefill(
                    model, row_T[None], start, solver=solver, tolerance=tolerance, segment=SEGMENT, bf16_passes="off"
                )
                assert read.info.cost is not None
                costs.append(read.info.cost)
                errors.append(largest_change(read.state.carried_BRC[:, -T:], exact_1RC[:, -T:]))
            found.setdefault(solver, {})[f"{tolerance:g}"] = {"cost": fmean(costs), "error": fmean(errors)}
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


def _base(model: ModelConfig | PretrainedModelConfig) -> dict[str, str]:
    """Return the name of the pretrained model, without the path to it."""
    return {} if isinstance(model, ModelConfig) else {"pretrained": Path(model.pretrained).name}


def read_records(
    trials: Sequence[Trial], out: Path, evaluating: Callable[[str], None] = lambda name: None
) -> list[Record]:
    """Collect all finished runs of these trials in a folder, and evaluate those that are not evaluated yet."""
    records = []
    for trial, seed in finished_runs(trials, out):
        run = trial.folder(seed, out)
        config = settings_of(run)
        curve = [r for r in read_metrics(run) if r.get("val_loss") is not None]
        # Pretrained models stream too slowly for an evaluation of every run.
        is_native = isinstance(config.model, ModelConfig)
        if is_native and not (run / EVALUATION).is_file():
            evaluating(run.name)
        records.append(
            {
                "key": trial.key,
                "seed": seed,
                "precision": open_checkpoint(run, verify=False).progress.precision,
                "model": asdict(config.model) | _base(config.model),
                "train": {key: value for key, value in asdict(config.train).items() if key not in PLACES},
                "curve": {key: [r[key] for r in curve] for key in ("step", "tokens", "macs", "seconds", "val_loss")},
                "evaluation": evaluate_run(run) if is_native else None,
            }
        )
    return records
