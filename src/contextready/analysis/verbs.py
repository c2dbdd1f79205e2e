"""The verbs `crt eval` and `crt plot`."""

import argparse
from pathlib import Path

from contextready.verbs import Verbs, verb


def add_eval(verbs: Verbs) -> None:
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
    evaluate.add_argument("--block-size", type=int, help="tokens in a window (default: as trained)")
    evaluate.add_argument("--tokens", type=int, help="only the first of this many tokens (default: all)")
    evaluate.add_argument("--no-sequential", action="store_true", help="leave streaming out")
    evaluate.add_argument("--device", default="auto", help="cpu, cuda, mps or auto (default: auto)")
    evaluate.add_argument("--json", action="store_true", help="print one JSON line instead of a table")
    tasks = evaluate.add_argument_group("tasks of lm-evaluation-harness")
    _add_task_options(tasks)
    evaluate.set_defaults(run=_eval)


def add_plot(verbs: Verbs) -> None:
    """Describe `crt plot`."""
    plot = verb(
        verbs,
        "plot",
        "draw learning curves and where they cross",
        "Draw the validation curves of runs into one picture and print where they cross.",
        "example:\n  crt plot runs/mini-d1 runs/mini-n1-ffn --out curves.svg",
    )
    plot.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    plot.add_argument("--out", type=Path, default=Path("curves.png"), help=".png, .svg or .pdf (default: curves.png)")
    plot.add_argument(
        "--x", choices=["tokens", "steps", "macs", "seconds"], default="tokens", help="what to draw against"
    )
    plot.add_argument("--title", help="a line above the picture")
    plot.set_defaults(run=_plot)


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


def _eval(options: argparse.Namespace) -> int:
    if options.tasks is not None:
        from contextready.analysis.harness_console import run

        return run(options)
    from contextready.analysis.console import run_eval

    run_eval(
        options.runs,
        data_folder=options.data,
        best=options.best,
        passes=options.passes,
        block_size=options.block_size,
        tokens=options.tokens,
        sequential=not options.no_sequential,
        device=options.device,
        as_json=options.json,
    )
    return 0


def _plot(options: argparse.Namespace) -> None:
    from contextready.analysis.console import run_plot

    run_plot(options.runs, options.out, options.x, options.title)
