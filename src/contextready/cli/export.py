"""`crt export`: a model as one file for the engine ggml, and what its precision costs in perplexity."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from contextready.cli.options import Verbs, verb

if TYPE_CHECKING:
    from contextready.infer.ggml.export import ExportReport


def add(verbs: Verbs) -> None:
    """Describe `crt export`."""
    export = verb(
        verbs,
        "export",
        "write a model for the fast CPU engine",
        "Write a run or checkpoint as a GGUF file for the engine ggml: weights, settings and\n"
        "tokenizer in one file that is run without torch. Says what the file's precision costs in\n"
        "perplexity, measured on the validation data.",
        "example:\n  crt export runs/mini-d1 mini.gguf --type q8_0",
    )
    export.add_argument(
        "run_folder", metavar="run", type=Path, help="run (its newest checkpoint is used) or checkpoint"
    )
    export.add_argument("out", type=Path, help="file to write, ending in .gguf")
    export.add_argument("--type", default="f16", help="f32, f16, q8_0 or q4_0 (default: f16)")
    export.add_argument(
        "--tokens", type=int, default=4096, help="validation tokens to measure on, 0: none (default: 4096)"
    )
    export.add_argument("--data", type=Path, help="prepared data (default: what the model was trained on)")
    export.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    from contextready.infer.ggml.export import export

    # Told as soon as it is written: measuring takes longer.
    print_cost(
        export(options.run_folder, options.out, options.type, options.tokens, options.data, written=print_written)
    )


def print_written(report: "ExportReport") -> None:
    """Say what was written and what to do next."""
    print(
        f"Wrote {report.out}: {report.bytes / 1e6:.1f} MB, matrices in {report.type}. "
        f"Next: crt generate {report.out} 'Once upon a time'"
    )


def print_cost(report: "ExportReport") -> None:
    """Say what the precision costs, if that was measured."""
    if report.original is None or report.exported is None:
        return
    cost, error = report.exported.perplexity_above(report.original)
    share = 100 * cost / report.original.perplexity
    print(
        f"Perplexity on {report.tokens:,} validation tokens: {report.exported.perplexity:.3f}, the original's "
        f"{report.original.perplexity:.3f}; {report.type} costs {cost:+.4f} ± {error:.4f} ({share:+.3f} %)."
    )
