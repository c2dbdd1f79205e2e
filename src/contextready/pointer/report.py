"""The report on pointer chasing: tables and plots of all runs in a folder, finished or not."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from contextready.files import write_json
from contextready.measure.bounds import receptive_field
from contextready.model.config import ModelConfig
from contextready.pointer.outcome import Outcome, solved_at
from contextready.pointer.plots import Staircase, draw_staircases, draw_waves, read_wave
from contextready.pointer.results import Result
from contextready.pointer.score import best_accuracy, levels_solved, score_levels, score_passes
from contextready.pointer.task import ANSWERS, PointerTask
from contextready.pointer.trials import PASSES
from contextready.runs.checkpoint import newest_checkpoint, open_checkpoint
from contextready.train.trials import aligned

COMPARED_ON = 500
"""Fresh sequences used to compare numbers of passes."""
LEGEND = f"""\
Rows with several seeds list them in ascending order. An asterisk marks runs that are not finished.

- levels solved: levels with at least 0.99 of the answers right on 2,000 fresh sequences
- steps: the step at which all levels were solved, or else the last step of the run
- seconds: the time spent on updates
- accuracy by level: the accuracy of the median seed
- the window allows: the best accuracy that a transformer of this depth can reach with its receptive field
- in K passes: the accuracy of the median seed in the largest K that it was trained with instead of streaming, on \
{COMPARED_ON} fresh sequences
- K passes allow: the best accuracy that this many passes can reach"""
Accuracies = dict[int | None, list[float]]
"""Accuracy by level for each number of passes; the key None means streamed."""


def as_markdown(results: Sequence[Result], out: Path) -> str:
    """Format all tables for which there are runs, with an explanation of their columns."""
    parts = []
    for answers in ANSWERS:
        mine = [r for r in results if r.trial.part in ("table", "layout") and r.trial.answers == answers]
        if mine:
            allowed = {"the window allows": [window_allows(result) for result in mine]}
            again = " (the last level is the final query, which repeats the level before)" * (answers == "absent")
            parts.append(f"Answers {answers}{again}:\n\n{_table(mine, allowed)}")
    if any(r.trial.part == "growth" for r in results):
        parts.append(f"More hops:\n\n{_table([r for r in results if r.trial.belongs_to('growth')])}")
    if any(r.trial.part == "parallel" for r in results):
        parts += _parallel([r for r in results if r.trial.belongs_to("parallel")], out)
    return "\n\n".join([*parts, LEGEND])


def _parallel(results: Sequence[Result], out: Path) -> list[str]:
    """Format the tables of parallel training: its results, and the same models read in other numbers of passes."""
    accuracies = [_accuracies(result, out) for result in results]
    own = []
    for result, seeds in zip(results, accuracies, strict=True):
        passes, middle = _passes(result), seeds.get(_median_seed(result))
        own.append(None if passes is None or middle is None else middle[passes])
    columns = {"in K passes": own, "K passes allow": [passes_allow(result) for result in results]}
    tables = [f"Parallel training:\n\n{_table(results, columns)}"]
    scored = [(result.trial.name, seeds) for result, seeds in zip(results, accuracies, strict=True) if seeds]
    if scored:
        title = "The same models read in K passes; fraction of right answers, averaged over all levels, for each seed"
        tables.append(f"{title}:\n\n{_by_passes(scored)}")
    return tables


def _table(results: Sequence[Result], columns: Mapping[str, Sequence[list[float] | None]] | None = None) -> str:
    """Format one line per row; `columns` are more accuracies by level, and columns without any are left out."""
    head = ["model", "levels solved", "steps", "seconds", "accuracy by level"]
    shown = {title: column for title, column in (columns or {}).items() if any(column)}
    lines = []
    for i in sorted(range(len(results)), key=lambda i: _place(results[i])):
        further = ["" if (accuracy := column[i]) is None else _written(accuracy) for column in shown.values()]
        lines.append([*_line(results[i]), *further])
    return aligned([[*head, *shown], *lines])


def _place(result: Result) -> tuple[bool, bool, int]:
    return result.trial.ready, result.trial.part != "table", result.trial.layers


def _written(accuracy: Sequence[float]) -> str:
    return " ".join(f"{part:.2f}" for part in accuracy)


def _by_passes(models: Sequence[tuple[str, dict[int, Accuracies]]]) -> str:
    """Format the mean accuracy of each model after every number of passes in PASSES, and when it is streamed."""
    head = ["model", *(f"K={k}" for k in PASSES), "streamed"]
    lines = []
    for name, seeds in models:
        cells = [", ".join(f"{fmean(accuracies[k]):.2f}" for accuracies in seeds.values()) for k in (*PASSES, None)]
        lines.append([name, *cells])
    return aligned([head, *lines])


def _accuracies(result: Result, out: Path) -> dict[int, Accuracies]:
    """Score the newest checkpoint of every seed that has one."""
    accuracies = {}
    for seed in result.outcomes:
        if newest_checkpoint(result.trial.folder(seed, out)) is None:
            continue
        checkpoint = open_checkpoint(result.trial.folder(seed, out))
        task, model = task_of(result), checkpoint.model()
        # Validations of the run draw their batches with twice the step, or one more; this batch is a new one.
        batch = task.batch("test", seed, 2 * checkpoint.progress.step + 2, COMPARED_ON)
        mine: Accuracies = {None: score_levels(model, task, batch).accuracy}
        for k, score in score_passes(model, task, batch, [*PASSES, _passes(result) or 1]).items():
            mine[k] = score.accuracy
        accuracies[seed] = mine
    return accuracies


def _median_seed(result: Result) -> int:
    """The median seed; the lower one if their number is even."""
    outcomes = result.outcomes
    seeds = sorted(outcomes, key=lambda s: (outcomes[s].levels_solved, sum(outcomes[s].accuracy)))
    return seeds[(len(seeds) - 1) // 2]


def _line(result: Result) -> list[str]:
    outcomes, levels = result.outcomes, task_of(result).levels
    return [
        result.trial.name,
        ", ".join(f"{o.levels_solved}{'*' * (s in result.unfinished)}" for s, o in outcomes.items()) + f" of {levels}",
        ", ".join(f"{o.step:,}" for o in outcomes.values()),
        ", ".join(f"{o.seconds:,.0f}" for o in outcomes.values()),
        _written(outcomes[_median_seed(result)].accuracy),
    ]


def task_of(result: Result) -> PointerTask:
    """The task that a row was trained on."""
    assert isinstance(result.config.task, PointerTask)
    return result.config.task


def window_allows(result: Result) -> list[float] | None:
    """The best accuracy by level that a transformer's receptive field allows, or None if there is no such bound.

    The bound does not hold for a recurrent model, nor when the input shows the answers of the previous level.
    """
    model = result.config.model
    assert isinstance(model, ModelConfig)
    if model.correction is not None or result.trial.answers == "visible" or model.window is None:
        return None
    return best_accuracy(task_of(result), receptive_field(model.layers, model.window))


def passes_allow(result: Result) -> list[float] | None:
    """The best accuracy by level that K parallel passes of a context-ready model allow."""
    model, passes = result.config.model, _passes(result)
    assert isinstance(model, ModelConfig)
    if passes is None or model.window is None:
        return None
    return best_accuracy(task_of(result), receptive_field(model.layers, model.window, passes))


def _passes(result: Result) -> int | None:
    """The K of a row that was trained by parallel passes, else None."""
    schedule = result.config.train.pass_schedule
    return schedule.most if schedule is not None and result.trial.part == "parallel" else None


def as_record(results: Sequence[Result], out: Path) -> list[dict[str, Any]]:
    """The results as plain values for JSON."""
    return [
        {
            "name": result.trial.name,
            "part": result.trial.part,
            "answers": result.trial.answers,
            "config": result.config.as_dict(),
            "window_allows": window_allows(result),
            "seeds": {
                str(seed): outcome._asdict() | {"solved_at": solved_at(result.trial.folder(seed, out))}
                for seed, outcome in result.outcomes.items()
            },
        }
        for result in results
    ]


def write_report(markdown: str, results: Sequence[Result], out: Path) -> None:
    """Write report.md and report.json."""
    (out / "report.md").write_text(markdown + "\n")
    write_json(out / "report.json", as_record(results, out))


def draw_report(results: Sequence[Result], out: Path) -> list[Path]:
    """Draw the staircases of finished runs and the waves of each row's first seed, as PNG and SVG."""
    written: list[Path] = []
    table = [r for r in results if r.trial.part == "table"]
    stairs = [stair for answers in ANSWERS if (stair := _staircase(table, answers)) is not None]
    if stairs:
        written += draw_staircases(stairs, max(task_of(r).levels for r in table), out / "staircase")
    for name, those in (
        ("wave", [r for r in table if r.trial.answers != "visible"]),
        ("wave-layout", [r for r in results if r.trial.part == "layout"]),
        ("wave-growth", [r for r in results if r.trial.part == "growth"]),
        ("wave-parallel", [r for r in results if r.trial.part == "parallel"]),
    ):
        shown = [(r, min(r.outcomes)) for r in sorted(those, key=lambda r: (not r.trial.ready, r.trial.layers))]
        waves = [
            read_wave(r.trial.folder(seed, out), f"{r.trial.name}, seed {seed}: {_summary(r.outcomes[seed])}")
            for r, seed in shown
            if r.outcomes[seed].step > 0
        ]
        if waves:
            written += draw_waves(waves, out / name, 1 / task_of(those[0]).values)
    return written


def _summary(outcome: Outcome) -> str:
    if outcome.solved:
        return f"all levels solved at step {outcome.step:,}"
    return f"{outcome.levels_solved} of {len(outcome.accuracy)} levels solved after {outcome.step:,} steps"


def _staircase(table: Sequence[Result], answers: str) -> Staircase | None:
    solved: dict[bool, dict[int, list[int]]] = {False: {}, True: {}}
    allowed = {}
    for r in sorted(table, key=lambda r: r.trial.layers):
        done = [o.levels_solved for s, o in r.outcomes.items() if s not in r.unfinished]
        if r.trial.answers == answers and done:
            solved[r.trial.ready][r.trial.layers] = done
            if (best := window_allows(r)) is not None:
                allowed[r.trial.layers] = levels_solved(best)
    if not any(solved.values()):
        return None
    return Staircase(f"answers {answers}", solved[False], solved[True], allowed)
