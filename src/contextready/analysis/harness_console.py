"""`crt eval --tasks`: models side by side on the tasks of lm-evaluation-harness."""

import argparse
from collections.abc import Sequence

from contextready.analysis.harness import TaskScore, run_tasks
from contextready.files import to_json


def run(options: argparse.Namespace) -> int:
    """Score and print a table, or one JSON line."""
    names = [str(model) for model in options.runs]
    found = run_tasks(
        names,
        [name.strip() for name in options.tasks.split(",")],
        include=options.tasks_path,
        limit=options.limit,
        batch_size=options.batch_size,
        device=options.device,
        shots=options.shots,
    )
    if options.json:
        records = [
            {"model": name, "tasks": [one.as_record() for one in scores]}
            for name, scores in zip(names, found, strict=True)
        ]
        print(to_json({"evaluations": records}))
    else:
        print_scores(names, found)
    return 0


def print_scores(names: Sequence[str], found: Sequence[Sequence[TaskScore]]) -> None:
    """A row for each metric of each task, a column for each model, with standard errors."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE)
    table.add_column("task", overflow="fold")
    table.add_column("metric", no_wrap=True)
    for name in names:
        table.add_column(Text(name), justify="right", overflow="fold")
    table.add_column("documents", justify="right")
    for row in zip(*found, strict=True):
        first = row[0]
        documents = "" if first.documents is None else f"{first.documents:,}"
        better = {True: " ↑", False: " ↓", None: ""}[first.higher_is_better]
        table.add_row(Text(first.task), Text(first.metric + better), *(_cell(one) for one in row), documents)
    Console(highlight=False).print(table)


def _cell(one: TaskScore) -> str:
    digits = 4 if one.value < 100 else 2
    error = "" if one.stderr is None else f" ± {one.stderr:.{digits}f}"
    return f"{one.value:.{digits}f}{error}"
