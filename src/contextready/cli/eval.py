"""`crt eval`: compare models on validation data or on tasks from lm-evaluation-harness."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from contextready.cli.console import make_console
from contextready.cli.eval_seeds import print_over_seeds
from contextready.cli.options import Verbs, check_most, parse_numbers, verb, whole_number
from contextready.cli.paper import paper_model, perplexity_record, print_perplexities
from contextready.cli.progress import ProgressReport
from contextready.cli.tables import Figure, Value, as_csv, as_markdown, as_text
from contextready.errors import ContextReadyError
from contextready.files import to_json
from contextready.formats.limits import check_count
from contextready.hf.trust import add_trust_option

if TYPE_CHECKING:
    from rich.console import Console

    from contextready.evaluate.evaluate import Evaluation
    from contextready.evaluate.harness import TaskScore
    from contextready.measure.perplexity import Score

EXAMPLES = """
crt eval runs/mini-d1 runs/mini-n1-ffn
crt eval runs/mini-d1 --passes 1,5 --tokens 65536 --csv
crt eval runs/mini-d1 --sample 20
crt eval smollm2 smollm2-crt --tasks lambada=lambada_test.jsonl --limit 500
"""
MOST = {"block-size": 2**24, "tokens": 10**12, "sample": 10**6, "limit": 10**9, "shots": 1000, "batch-size": 2**16}
"""The largest value of each option."""
ERRORS = "± = standard error over the validation windows of one trained model, not over seeds."
MISSING = "– = does not apply to a plain transformer, which makes a single pass and no correction."


def add(verbs: Verbs) -> None:
    """Describe `crt eval`."""
    evaluate = verb(
        verbs,
        "eval",
        "compare perplexity by number of passes and in streaming mode, or scores on tasks",
        "Evaluate runs, checkpoints or Hugging Face models on validation data: perplexity after K\n"
        "parallel passes and in streaming mode (one pass per token, as in generation), what the\n"
        "correction contributes, and how fast the passes converge, with standard errors. With\n"
        "--tasks, score the models on tasks from lm-evaluation-harness instead.",
        EXAMPLES,
    )
    evaluate.add_argument("runs", nargs="+", type=Path, help="folders of runs, checkpoints or Hugging Face models")
    evaluate.add_argument(
        "--data",
        type=Path,
        metavar="FOLDER",
        help="prepared data to evaluate on (default: the data that each model was trained on)",
    )
    evaluate.add_argument(
        "--best", action="store_true", help="evaluate the best checkpoint of each run instead of the newest"
    )
    evaluate.add_argument(
        "--passes", default="1,2,3,5,10", metavar="K,…", help="values of K, the number of parallel passes"
    )
    evaluate.add_argument(
        "--block-size", type=whole_number, metavar="N", help="tokens per validation window (default: as in training)"
    )
    evaluate.add_argument(
        "--tokens", type=whole_number, metavar="N", help="evaluate only the first N validation tokens (default: all)"
    )
    evaluate.add_argument(
        "--sample",
        type=whole_number,
        metavar="N",
        help="evaluate N random batches of the training batch size instead, always the same ones (the author's runs: "
        "20)",
    )
    evaluate.add_argument("--no-sequential", action="store_true", help="do not evaluate streaming mode")
    evaluate.add_argument("--device", default="auto", help="cpu, cuda, mps or auto")
    evaluate.add_argument(
        "--paper",
        action="store_true",
        help="also print the paper's perplexities of models with the same layers, width, correction and vocabulary",
    )
    layout = evaluate.add_mutually_exclusive_group()
    for name, what in (
        ("json", "one line of JSON"),
        ("markdown", "a Markdown table"),
        ("csv", "CSV with plain numbers; standard errors have their own columns"),
    ):
        layout.add_argument(f"--{name}", dest="layout", action="store_const", const=name, help=f"print {what}")
    _add_task_options(evaluate.add_argument_group("tasks from lm-evaluation-harness"))
    add_trust_option(evaluate, _run)


def _add_task_options(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--tasks",
        metavar="TASK,…",
        help="score the models on these tasks, given by name (lambada_openai,arc_easy) or with a local file: "
        "lambada=FILE, arc_easy=FILE, bits=FILE",
    )
    parser.add_argument("--tasks-path", type=Path, metavar="FOLDER", help="folder with your own tasks (YAML)")
    parser.add_argument(
        "--limit", type=whole_number, metavar="N", help="score only the first N documents of each task (default: all)"
    )
    parser.add_argument(
        "--shots", type=whole_number, metavar="N", help="examples before each question (default: as the task specifies)"
    )
    parser.add_argument(
        "--batch-size", type=whole_number, default=8, metavar="N", help="number of texts scored at once"
    )


def _run(options: argparse.Namespace) -> None:
    for name, most in MOST.items():
        check_most(f"--{name}", getattr(options, name.replace("-", "_")), most)
    if options.paper and (options.tasks is not None or options.layout in ("markdown", "csv")):
        raise ContextReadyError("--paper adds a second table of perplexities; leave out --tasks, --markdown and --csv.")
    if options.tasks is None:
        # Imported here, because it imports torch.
        from contextready.model.checks import MOST_PASSES

        for name in ("block-size", "tokens", "sample"):
            if (value := getattr(options, name.replace("-", "_"))) is not None:
                check_count(f"--{name}", value, 1, MOST[name])
        run_eval(
            options.runs,
            data_folder=options.data,
            best=options.best,
            passes=parse_numbers("--passes", options.passes, "1,2,5", MOST_PASSES),
            block_size=options.block_size,
            tokens=options.tokens,
            sample=options.sample,
            sequential=not options.no_sequential,
            device=options.device,
            layout=options.layout,
            with_paper=options.paper,
        )
        return
    if options.sample is not None:
        raise ContextReadyError("--sample draws batches of validation data, which --tasks does not use; leave it out.")
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
    if options.layout == "json":
        records = [
            {"model": name, "tasks": [one.as_record() for one in of_model]}
            for name, of_model in zip(names, scores, strict=True)
        ]
        print(to_json({"evaluations": records}))
    else:
        print_scores(names, scores, options.layout)


def run_eval(
    runs: Sequence[Path],
    *,
    data_folder: Path | None = None,
    best: bool = False,
    passes: Sequence[int] = (1, 2, 3, 5, 10),
    block_size: int | None = None,
    tokens: int | None = None,
    sample: int | None = None,
    sequential: bool = True,
    device: str = "auto",
    layout: str | None = None,
    with_paper: bool = False,
) -> None:
    """Evaluate runs or checkpoints and print them as a table, or in the layout json, markdown or csv.

    `with_paper` adds the paper's perplexities of models with the same shape, to the table and to JSON.
    """
    from contextready.device import find_device
    from contextready.evaluate.evaluate import evaluate_checkpoint
    from contextready.evaluate.names import short_names
    from contextready.evaluate.summary import as_record, summarize
    from contextready.runs.checkpoint import data_of, open_trained

    where = find_device(device)
    checkpoints = [open_trained(run, best) for run in runs]
    # Everything is opened before anything is computed, so that a wrong folder is reported at once.
    all_data = [data_of(checkpoint, data_folder) for checkpoint in checkpoints]
    evaluations = []
    with ProgressReport("tokens") as report:
        for run, checkpoint, data in zip(runs, checkpoints, all_data, strict=True):
            evaluations.append(
                evaluate_checkpoint(
                    checkpoint,
                    data,
                    where,
                    block_size,
                    passes=passes,
                    sequential=sequential,
                    tokens=tokens,
                    sample=sample,
                    advance=lambda done, total, run=run: report.advance(str(run), total, done),
                )
            )
    paper_models = [paper_model(checkpoint) for checkpoint in checkpoints] if with_paper else []
    if layout == "json":
        records = [
            {"run": str(run), "checkpoint": checkpoint.folder.name, "data": str(data.folder)} | one.as_record()
            for run, checkpoint, data, one in zip(runs, checkpoints, all_data, evaluations, strict=True)
        ]
        if with_paper:
            printed = [perplexity_record(model) for model in paper_models]
            records = [record | {"paper": one} for record, one in zip(records, printed, strict=True)]
        found = summarize(runs, evaluations)
        print(to_json({"evaluations": records} | ({"over_seeds": as_record(found)} if found else {})))
        return
    names = [str(run) for run in runs]
    print_evaluation(names, evaluations, layout)
    if layout is None:
        print_over_seeds(summarize(runs, evaluations))
    if with_paper:
        print_perplexities(short_names(names), paper_models, evaluations)


def print_evaluation(names: Sequence[str], evaluations: "Sequence[Evaluation]", layout: str | None = None) -> None:
    """Print one row per model and what the columns mean; in the layouts markdown and csv, only the table."""
    figures = _figures(evaluations)
    if layout is not None:
        _print_layout(names, figures, layout)
        return
    console = make_console(tables=True)
    extents = {(one.tokens, one.block_size, one.sample) for one in evaluations}
    if len(extents) == 1:
        tokens, block_size, sample = extents.pop()
        what = "" if sample is None else f"a sample of {sample:,} random batches, "
        console.print(f"Validation perplexity on {what}{tokens:,} tokens in windows of {block_size:,}\n")
        figures = [figure for figure in figures if figure.key != "tokens"]
    else:
        console.print("Validation perplexity\n")
    _print_text(names, figures, console)
    meanings = [figure.meaning for figure in figures if figure.meaning]
    if any(figure.has_errors for figure in figures):
        meanings.append(ERRORS)
    if any(one.rate is None for one in evaluations) and any(one.rate is not None for one in evaluations):
        meanings.append(MISSING)
    for meaning in dict.fromkeys(meanings):
        console.print(meaning)


def _figures(evaluations: "Sequence[Evaluation]") -> list[Figure]:
    """All figures of these evaluations, except those that none of them has."""
    passes = sorted({k for one in evaluations for k in one.parallel})
    # A table without a heading must show too that these are not perplexities of the whole split.
    sampled = any(one.sample is not None for one in evaluations)
    note, prefix = (" (sample)", "sample_") if sampled else ("", "")

    def perplexity(score: "Score | None") -> Value:
        return None if score is None else (score.perplexity, score.perplexity_error)

    def bits(one: "Evaluation") -> Value:
        score = one.sequential or one.parallel[max(one.parallel)]
        return None if one.bytes_per_token is None else score.bits_per_byte(one.bytes_per_token)

    def alone(number: float | None) -> Value:
        return None if number is None else (number, None)

    figures = [
        *(
            Figure(
                f"K={k}{note}",
                f"{prefix}perplexity_k{k}",
                [perplexity(one.parallel.get(k)) for one in evaluations],
                meaning="K=n = perplexity after n parallel passes; at K=1 there is no correction.",
            )
            for k in passes
        ),
        Figure(
            f"streaming{note}",
            f"{prefix}perplexity_streaming",
            [perplexity(one.sequential) for one in evaluations],
            meaning="streaming = perplexity with one pass per token, as in generation.",
        ),
        Figure(
            "Corr.",
            "correction",
            [one.correction for one in evaluations],
            meaning="Corr. = perplexity at K=1 minus perplexity at K=5: what the correction contributes.",
        ),
        Figure(
            f"streaming − K={passes[-1]}",
            "streaming_gap",
            [one.sequential_gap for one in evaluations],
            digits=4,
            meaning=f"streaming − K={passes[-1]} = difference of the two perplexities; near 0 if the passes have "
            "converged.",
        ),
        Figure(
            "L̂",
            "rate",
            [alone(one.rate) for one in evaluations],
            meaning="L̂ = contraction rate: the factor by which each extra pass shrinks the remaining change of the "
            "correction, at the worst position; below 1, the passes converge.",
        ),
        Figure(
            "L̂ (norm)",
            "norm_rate",
            [alone(one.norm_rate) for one in evaluations],
            meaning="L̂ (norm) = the same rate for the largest change over all positions: never above L̂, and steadier.",
        ),
        Figure(
            "L̂ (channel)",
            "channel_rate",
            [alone(one.channel_rate) for one in evaluations],
            meaning="L̂ (channel) = the same rate for the largest change of any channel, as in the author's runs.",
        ),
        Figure(
            "bits/byte",
            "bits_per_byte",
            [bits(one) for one in evaluations],
            digits=4,
            meaning="bits/byte = loss in bits per byte of text, streaming if evaluated, otherwise at the largest K.",
        ),
        Figure("tokens", "tokens", [alone(one.tokens) for one in evaluations], digits=0),
    ]
    return [figure for figure in figures if any(value is not None for value in figure.values)]


def _print_text(names: Sequence[str], figures: Sequence[Figure], console: "Console") -> None:
    from contextready.evaluate.names import short_names

    console.print(as_text(short_names(names), figures, console.width), "", sep="\n", soft_wrap=True)


def _print_layout(names: Sequence[str], figures: Sequence[Figure], layout: str) -> None:
    from contextready.evaluate.names import short_names

    print(as_csv(names, figures) if layout == "csv" else as_markdown(short_names(names), figures))


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
    """Score each model on tasks from lm-evaluation-harness; all tasks are opened before the first model."""
    from contextready.device import find_device
    from contextready.evaluate.harness import open_tasks, score

    for name, value, least in (("limit", limit, 1), ("batch-size", batch_size, 1), ("shots", shots, 0)):
        if value is not None and value < least:
            raise ContextReadyError(f"--{name} must be at least {least}, but got {value}.")
    opened = open_tasks(tasks, include, shots)
    where = str(find_device(device))
    from contextready.hf.load import load_model

    return [score(*load_model(model, device=where), opened, limit=limit, batch_size=batch_size) for model in models]


def print_scores(names: Sequence[str], scores: "Sequence[Sequence[TaskScore]]", layout: str | None = None) -> None:
    """Print one table per task, with one row per model; in the layouts markdown and csv, one table in all."""
    by_task: dict[str, list[Sequence[TaskScore]]] = {}
    for same in zip(*scores, strict=True):
        by_task.setdefault(same[0].task, []).append(same)
    console, figures = make_console(tables=True), list[Figure]()
    for task, metrics in by_task.items():
        documents = metrics[0][0].documents
        columns = [_metric(task, same, heading="" if layout is None else f"{task} ") for same in metrics]
        if layout is None:
            console.print(task if documents is None else f"{task}, {documents:,} documents", end="\n\n")
            _print_text(names, columns, console)
        figures += columns
        if documents is not None:
            count = [(documents, None)] * len(names)
            figures.append(Figure(f"{task} documents", f"{task} documents", count, digits=0))
    if layout is not None:
        _print_layout(names, figures, layout)
    else:
        console.print("↑ = higher is better, ↓ = lower is better, ± = standard error over documents.")


def _metric(task: str, same: "Sequence[TaskScore]", heading: str) -> Figure:
    """One metric of a task, for every model."""
    better = {True: " ↑", False: " ↓", None: ""}[same[0].higher_is_better]
    return Figure(
        f"{heading}{same[0].metric}{better}",
        f"{task} {same[0].metric}",
        [(one.value, one.stderr) for one in same],
        digits=4 if all(one.value < 100 for one in same) else 2,
    )
