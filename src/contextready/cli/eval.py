"""`crt eval`: models side by side, on validation data or on the tasks of lm-evaluation-harness."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from contextready.cli.console import make_console
from contextready.cli.options import Verbs, parse_numbers, verb
from contextready.errors import ContextReadyError
from contextready.files import to_json

if TYPE_CHECKING:
    from contextready.evaluate.evaluate import Evaluation
    from contextready.evaluate.harness import TaskScore
    from contextready.measure.perplexity import Score


def add(verbs: Verbs) -> None:
    """Describe `crt eval`."""
    evaluate = verb(
        verbs,
        "eval",
        "perplexity by K and sequentially, or tasks of lm-evaluation-harness",
        "Score runs or checkpoints on their validation data: perplexity and bits per byte after K\n"
        "parallel passes and streaming, what the correction contributes, and the empirical\n"
        "contraction rate, with standard errors. With --tasks: on tasks of lm-evaluation-harness.",
        "examples:\n"
        "  crt eval runs/mini-d1 runs/mini-n1-ffn\n"
        "  crt eval runs/mini-d1 --passes 1,5 --tokens 65536 --json\n"
        "  crt eval smollm2 smollm2-crt --tasks lambada=lambada_test.jsonl --limit 500",
    )
    evaluate.add_argument("runs", nargs="+", type=Path, help="folders of runs or checkpoints, or of Hugging Face")
    evaluate.add_argument("--data", type=Path, help="prepared data (default: what the model was trained on)")
    evaluate.add_argument("--best", action="store_true", help="of each run the best checkpoint, not the newest")
    evaluate.add_argument("--passes", default="1,2,3,5,10", help="values of K (default: 1,2,3,5,10)")
    evaluate.add_argument("--block-size", type=int, help="tokens in a sequence (default: as trained)")
    evaluate.add_argument("--tokens", type=int, help="only the first of this many tokens (default: all)")
    evaluate.add_argument("--no-sequential", action="store_true", help="leave streaming out")
    evaluate.add_argument("--device", default="auto", help="cpu, cuda, mps or auto (default: auto)")
    evaluate.add_argument("--json", action="store_true", help="print one JSON line instead of a table")
    _add_task_options(evaluate.add_argument_group("tasks of lm-evaluation-harness"))
    evaluate.set_defaults(run=_run)


def _add_task_options(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--tasks",
        metavar="TASK,…",
        help="score these tasks of lm-evaluation-harness instead, by name (lambada_openai,arc_easy), or on a local "
        "file: lambada=FILE, arc_easy=FILE, bits=FILE",
    )
    parser.add_argument("--tasks-path", type=Path, metavar="FOLDER", help="folder with tasks of your own (YAML)")
    parser.add_argument("--limit", type=int, help="only the first of this many documents of each task (default: all)")
    parser.add_argument("--shots", type=int, help="examples before each question (default: the task's)")
    parser.add_argument("--batch-size", type=int, default=8, help="texts scored at once (default: 8)")


def _run(options: argparse.Namespace) -> None:
    if options.tasks is None:
        run_eval(
            options.runs,
            data_folder=options.data,
            best=options.best,
            passes=parse_numbers("--passes", options.passes, "1,2,5"),
            block_size=options.block_size,
            tokens=options.tokens,
            sequential=not options.no_sequential,
            device=options.device,
            as_json=options.json,
        )
        return
    names = [str(model) for model in options.runs]
    scores = score_tasks(
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
            {"model": name, "tasks": [one.as_record() for one in of_model]}
            for name, of_model in zip(names, scores, strict=True)
        ]
        print(to_json({"evaluations": records}))
    else:
        print_scores(names, scores)


def run_eval(
    runs: Sequence[Path],
    *,
    data_folder: Path | None = None,
    best: bool = False,
    passes: Sequence[int] = (1, 2, 3, 5, 10),
    block_size: int | None = None,
    tokens: int | None = None,
    sequential: bool = True,
    device: str = "auto",
    as_json: bool = False,
) -> None:
    """Evaluate runs or checkpoints and print them side by side, or as one JSON line."""
    from rich.progress import Progress

    from contextready.device import find_device
    from contextready.evaluate.evaluate import evaluate_checkpoint
    from contextready.runs.checkpoint import data_of, open_trained

    where = find_device(device)
    checkpoints = [open_trained(run, best) for run in runs]
    # Everything is opened before anything is computed: a wrong folder is told at once.
    all_data = [data_of(checkpoint, data_folder) for checkpoint in checkpoints]
    console = make_console(stderr=True)
    evaluations = []
    for run, checkpoint, data in zip(runs, checkpoints, all_data, strict=True):
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task(str(run), total=None)
            evaluations.append(
                evaluate_checkpoint(
                    checkpoint,
                    data,
                    where,
                    block_size,
                    passes=passes,
                    sequential=sequential,
                    tokens=tokens,
                    advance=lambda done, of, bar=bar, task=task: bar.update(task, total=of, advance=done),
                )
            )
    if as_json:
        records = [
            {"run": str(run), "checkpoint": checkpoint.folder.name, "data": str(data.folder)} | one.as_record()
            for run, checkpoint, data, one in zip(runs, checkpoints, all_data, evaluations, strict=True)
        ]
        print(to_json({"evaluations": records}))
    else:
        print_evaluation([str(run) for run in runs], evaluations)


def print_evaluation(names: Sequence[str], evaluations: "Sequence[Evaluation]") -> None:
    """A column for each model: the paper's depth progression, with standard errors."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE)
    table.add_column("perplexity (bits per byte)", no_wrap=True)
    for name in names:
        table.add_column(Text(name), justify="right", overflow="fold")

    def add_row(label: str, cells: Sequence[str]) -> None:
        if any(cells):
            table.add_row(label, *cells)

    for k in sorted({k for one in evaluations for k in one.parallel}):
        add_row(f"parallel K={k}", [_score(one, one.parallel.get(k)) for one in evaluations])
    add_row("sequential", [_score(one, one.sequential) for one in evaluations])
    add_row("Corr.: K=1 less K=5", [_gap(one.correction, 2) for one in evaluations])
    add_row("sequential less largest K", [_gap(one.sequential_gap, 4) for one in evaluations])
    add_row("L̂, any position", ["" if one.rate is None else f"{one.rate:.2f}" for one in evaluations])
    add_row("L̂, largest changes", ["" if one.norm_rate is None else f"{one.norm_rate:.2f}" for one in evaluations])
    add_row("tokens", [f"{one.tokens:,}" for one in evaluations])
    make_console(tables=True).print(table)


def _score(one: "Evaluation", score: "Score | None") -> str:
    if score is None:
        return ""
    bits = "" if one.bytes_per_token is None else f" ({score.bits_per_byte(one.bytes_per_token)[0]:.4f})"
    return f"{score.perplexity:.2f} ± {score.perplexity_error:.2f}{bits}"


def _gap(gap: tuple[float, float] | None, digits: int) -> str:
    return "" if gap is None else f"{gap[0]:.{digits}f} ± {gap[1]:.{digits}f}"


def score_tasks(
    models: Sequence[str],
    tasks: Sequence[str],
    *,
    include: Path | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    device: str = "auto",
    shots: int | None = None,
) -> "list[list[TaskScore]]":
    """Score each model on tasks of lm-evaluation-harness, all of which are opened before the first model is."""
    from contextready.device import find_device
    from contextready.evaluate.harness import open_tasks, score

    for name, value, least in (("limit", limit, 1), ("batch-size", batch_size, 1), ("shots", shots, 0)):
        if value is not None and value < least:
            raise ContextReadyError(f"--{name} {value} is impossible; give at least {least}.")
    opened = open_tasks(tasks, include, shots)
    where = str(find_device(device))
    from contextready.hf.load import load_model

    return [score(*load_model(model, device=where), opened, limit=limit, batch_size=batch_size) for model in models]


def print_scores(names: Sequence[str], scores: "Sequence[Sequence[TaskScore]]") -> None:
    """A row for each metric of each task, a column for each model, with standard errors."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE)
    table.add_column("task", overflow="fold")
    table.add_column("metric", no_wrap=True)
    for name in names:
        table.add_column(Text(name), justify="right", overflow="fold")
    table.add_column("documents", justify="right")
    for row in zip(*scores, strict=True):
        first = row[0]
        documents = "" if first.documents is None else f"{first.documents:,}"
        better = {True: " ↑", False: " ↓", None: ""}[first.higher_is_better]
        table.add_row(Text(first.task), Text(first.metric + better), *(_cell(one) for one in row), documents)
    make_console(tables=True).print(table)


def _cell(one: "TaskScore") -> str:
    digits = 4 if one.value < 100 else 2
    error = "" if one.stderr is None else f" ± {one.stderr:.{digits}f}"
    return f"{one.value:.{digits}f}{error}"
