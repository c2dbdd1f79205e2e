"""The runs behind the tables of state tracking: which ones are still missing, and the results of the others."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contextready.errors import ContextReadyError
from contextready.model.config import ModelConfig
from contextready.runs.config import RunConfig, with_new_names
from contextready.runs.metrics import FILE, Record, read_metrics
from contextready.runs.run_checks import check_same_run
from contextready.settings import parse_assignments
from contextready.state.lengths import read_lengths
from contextready.state.names import resolve_task
from contextready.state.task import StateTask
from contextready.state.text import check_text, read_text
from contextready.state.trials import Trial
from contextready.train.cost import run_macs
from contextready.train.jobs import Job
from contextready.train.trials import settings_of, with_changes

OF_TRIALS = {"out", "seed", "task", "group", "layers", "correction", "gradient", "passes", "tune", "convergence_weight"}
"""Settings in which the rows differ."""
POINTS = 64
"""The number of lengths whose accuracy a result keeps for a plot."""


def jobs_of(trials: Sequence[Trial], seeds: Sequence[int], out: Path, changes: Sequence[str]) -> list[Job]:
    """List the runs that are not finished yet: the first seed of every trial, then the next seed."""
    changed = set(with_new_names(parse_assignments(changes)))
    for key in sorted(changed & OF_TRIALS):
        raise ContextReadyError(f"{key} cannot be set here, because the rows differ in it; train one with crt task.")
    if any(trial.part == "convert" for trial in trials) and "pretrained" not in changed:
        raise ContextReadyError("Part convert needs a pretrained model; set pretrained=FOLDER.")
    if "pretrained" in changed and any(trial.part != "convert" for trial in trials):
        raise ContextReadyError("pretrained= is for --part convert only; leave it out.")
    jobs = []
    for seed in seeds:
        for trial in trials:
            words, folder = with_changes(trial.words(seed, out), changes), trial.folder(seed, out)
            config = resolve_task(words[0], words[1:])
            newest = newest_validation(folder)
            if newest is not None:
                check_same_run(settings_of(folder).as_dict(), config, str(folder))
            if not is_finished(folder, config):
                done = 0 if newest is None else int(newest["step"])
                name = f"{trial.task} {trial.name}, seed {seed}"
                command = ("task", *words, *(("--gru",) if trial.gru else ()))
                jobs.append(Job(name, folder, command, config.train.steps, macs=run_macs(config, done)))
    return jobs


def split_text(changes: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Separate `text=FOLDER`, prepared text for `measure_text`, from the settings of the runs."""
    texts = [Path(word.removeprefix("text=")) for word in changes if word.startswith("text=")]
    if texts:
        check_text(texts[-1])
    return (texts[-1] if texts else None), [word for word in changes if not word.startswith("text=")]


def newest_validation(run: Path) -> Record | None:
    """Return the newest validation of a run, if there is one."""
    if not (run / FILE).is_file():
        return None
    return next((record for record in reversed(list(read_metrics(run))) if "solved_length" in record), None)


def is_finished(run: Path, config: RunConfig) -> bool:
    """Whether a run has solved its task or made all its steps, and was tested."""
    newest = newest_validation(run)
    if newest is None or read_lengths(run) is None:
        return False
    return bool(newest["solved"]) or newest["step"] >= config.train.steps


def records_of(trials: Sequence[Trial], out: Path) -> list[dict[str, Any]]:
    """Return the finished runs in a folder as plain values for JSON."""
    records = []
    for trial in trials:
        for seed in trial.seeds(out):
            run = trial.folder(seed, out)
            if (run / "config.json").is_file() and is_finished(run, config := settings_of(run)):
                records.append(_record(trial, seed, run, config))
    return records


def _record(trial: Trial, seed: int, run: Path, config: RunConfig) -> dict[str, Any]:
    newest, found, task = newest_validation(run), read_lengths(run), config.task
    assert newest is not None
    assert found is not None
    assert isinstance(task, StateTask)
    first = next(record for record in read_metrics(run) if "solved_length" in record)
    longest = found.lengths[-1]
    on_text = read_text(run)
    shown = sorted({max(1, round(longest * i / POINTS)) for i in range(1, POINTS + 1)} | set(range(1, 9)))
    return {
        **{"key": trial.key, "task": trial.task, "name": trial.name, "part": trial.part, "seed": seed},
        **{"ready": trial.ready, "layers": trial.layers, "gru": trial.gru, "length": task.length},
        **{"chance": found.chance, "best_passes": found.best_passes, "model": _shape(config.model)},
        **{"step": newest["step"], "steps": config.train.steps, "seconds": round(newest["seconds"], 1)},
        **{"solved_in_training": newest["solved_length"], "accuracy_before": first["accuracy"][-1]},
        **{"solved": found.solved, "lengths": found.lengths, "accuracy": found.accuracy, "passes": found.passes},
        "text": None if on_text is None else [on_text.before, on_text.after],
        "curve": {str(n): found.curve[n - 1] for n in shown if n <= longest},
    }


def _shape(model: Any) -> dict[str, Any]:
    """The size of a native model, or the name of a pretrained one."""
    if isinstance(model, ModelConfig):
        return {"width": model.width, "layers": model.layers, "heads": model.heads, "window": model.window}
    return {"pretrained": Path(model.pretrained).name, "tune": model.tune}
