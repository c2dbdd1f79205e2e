"""`crt export`: writes a model as one file for the ggml engine, and reports what its precision costs in perplexity."""

import argparse
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from contextready.cli.options import Verbs, verb, whole_number
from contextready.cli.progress import ProgressReport
from contextready.files import to_json
from contextready.formats.limits import check_count

if TYPE_CHECKING:
    from contextready.infer.ggml.export import ExportReport

EXAMPLES = """
crt export runs/mini-d1 mini.gguf --type q8_0
crt export runs/mini-d1 mini-f32.gguf --type f32 --tokens 0     # skip measuring
crt export smollm2-crt smollm2.gguf --type q8_0 --data data/smollm2
"""


MOST_TOKENS = 10**12


def add(verbs: Verbs) -> None:
    """Describe `crt export`."""
    export = verb(
        verbs,
        "export",
        "write a model for the fast CPU engine",
        "Write a run, a checkpoint or a converted model as a GGUF file for the ggml engine. The file\n"
        "contains weights, settings and tokenizer, and runs without torch. Then measure on the\n"
        "validation data how much the precision of the file costs in perplexity.",
        EXAMPLES,
    )
    export.add_argument(
        "run_folder",
        metavar="run",
        type=Path,
        help="run (its newest checkpoint is used), checkpoint, or Hugging Face folder that runs natively",
    )
    export.add_argument("out", type=Path, help="file to write, with the extension .gguf")
    export.add_argument("--type", default="f16", help="type of the matrices: f32, f16, q8_0, q4_0 or q4_k")
    export.add_argument(
        "--tokens",
        type=whole_number,
        default=4096,
        help="number of validation tokens to measure on; 0 measures nothing",
    )
    export.add_argument("--data", type=Path, help="prepared data (default: the data that the model was trained on)")
    export.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
    export.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    export.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    from contextready.infer.ggml.export import Export

    check_count("--tokens", options.tokens, 0, MOST_TOKENS)
    export = Export(
        options.run_folder, options.out, options.type, options.tokens, options.data, overwrite=options.overwrite
    )
    with ProgressReport("bytes") as progress:
        report = export.write(progress.advance)
    # Printed before measuring, which takes longer, and between the bars, because a live bar redirects standard output.
    if not options.json:
        print_written(report)
    if options.tokens:
        with ProgressReport("tokens") as progress:
            report = export.measure(report, progress.advance)
    if options.json:
        print(to_json(report.as_record()))
    else:
        print_cost(report)


def print_written(report: "ExportReport") -> None:
    """Print what was written and what to do next."""
    rest = f" ({report.in_f16} of {report.matrices} in f16, whose rows do not divide into blocks)"
    print(
        f"Wrote {report.out}: {report.bytes / 1e6:.1f} MB, matrices in {report.type}{rest if report.in_f16 else ''}. "
        f"Next: crt generate {report.out} 'Once upon a time'",
        flush=True,
    )


def print_cost(report: "ExportReport") -> None:
    """Print how much the precision costs in perplexity, if that was measured."""
    if report.cost is None or report.original is None or report.exported is None:
        return
    cost, error = report.cost
    percent = 100 * cost / report.original.perplexity
    # A single sequence has no standard error.
    uncertainty = f" ± {error:.4f}" if isfinite(error) else ""
    print(
        f"Perplexity on {report.tokens:,} validation tokens: {report.exported.perplexity:.3f} (original: "
        f"{report.original.perplexity:.3f}). {report.type} costs {cost:+.4f}{uncertainty} ({percent:+.3f} %)."
    )
