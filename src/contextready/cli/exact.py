"""`crt exact`: check on a small random model that streaming and parallel passes compute the same outputs."""

import argparse
from math import log10

from contextready.cli.console import make_console
from contextready.cli.options import Verbs, verb, whole_number
from contextready.files import to_json
from contextready.formats.limits import check_count

MOST_LAYERS = 128
LARGEST_WIDTH = 4096
"""The model is built for real, so it must be small."""
SHOWN = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
"""Passes that get a row in the table, in addition to the last one."""
EXAMPLES = """
crt exact
crt exact --tokens 64 --layers 3 --seed 1
crt exact --json
"""


def add(verbs: Verbs) -> None:
    """Describe `crt exact`."""
    exact = verb(
        verbs,
        "exact",
        "check that streaming and parallel passes agree, on a random model",
        "Stream random tokens through a small random model, one pass per token. Then compute the\n"
        "same outputs for all positions at once in parallel passes, and show how the passes\n"
        "converge to the streamed outputs. Takes a few seconds.",
        EXAMPLES,
    )
    exact.add_argument("--tokens", type=whole_number, default=48, metavar="T", help="sequence length, from 8 to 2048")
    exact.add_argument("--layers", type=whole_number, default=1, metavar="D", help="number of blocks")
    exact.add_argument(
        "--width", type=whole_number, default=64, metavar="C", help="number of channels, a multiple of 8"
    )
    exact.add_argument("--seed", type=whole_number, default=0, metavar="N", help="seed of the weights and tokens")
    exact.add_argument("--json", action="store_true", help="print one line of JSON instead of a table")
    exact.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    print_exact(options.tokens, options.layers, options.width, options.seed, as_json=options.json)


def print_exact(tokens: int, layers: int, width: int, seed: int, *, as_json: bool = False) -> None:
    """Compare parallel passes with streaming and print the result."""
    from dataclasses import asdict

    from rich import box
    from rich.table import Table

    from contextready.measure.exactness import run_exact

    check_count("--layers", layers, 1, MOST_LAYERS)
    check_count("--width", width, 8, LARGEST_WIDTH)
    measured, T = run_exact(tokens, layers, width, seed), tokens
    if as_json:
        print(to_json({"layers": layers, "width": width, "seed": seed} | asdict(measured)))
        return
    console = make_console(tables=True)
    console.print(
        f"A random context-ready model (layers D={layers}, width C={width}, correction add, float64) reads T={T} "
        "random tokens. Streamed from left to right, it is a recurrent network that makes one pass per token. The "
        "table shows parallel passes over all positions at once, compared with the streamed outputs z."
    )
    table = Table(box=box.SIMPLE)
    for column in ("pass K", "change", "error", "exact positions"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("error, log scale", no_wrap=True)
    for k in sorted({*(k for k in SHOWN if k <= T), T + 1}):
        change, error = "" if k == 1 else f"{measured.changes[k - 2]:.1e}", measured.errors[k - 1]
        table.add_row(str(k), change, f"{error:.1e}", f"{measured.exact[k - 1]} of {T}", "█" * _decades(error))
    console.print(table)
    console.print(
        "change = how much this pass changed z. error = how far z still is from streaming. Both are relative to the "
        "norm of z, at the worst position. exact positions = how many of the first positions equal streaming.\n\n"
        f"After K passes, the first K - 1 positions are exact. After T + 1 = {T + 1} passes, all positions are, up to "
        f"rounding ({measured.errors[-1]:.0e}). So streaming and the fixed point of the passes are one function.\n\n"
        "L̂ = contraction rate: how much one pass changes the correction, relative to the pass before; below 1, the "
        f"changes shrink. At the fifth correction it is {measured.rate:.2f} at the worst position (the paper's L̂) and "
        f"{measured.norm_rate:.2f} for the largest change over all positions. These weights are random; the paper "
        "reports 0.50 to 0.72 after training with a random number of passes.\n\n"
        "The cumulative (ResNet-like) form, which adds every correction to the previous input, ends "
        f"{measured.cumulative_error:.1f} times the norm of z away from streaming with the same weights. Only the "
        "non-cumulative form computes in parallel what streaming computes.\n\n"
        "Next: crt info lists what every model from the paper costs."
    )


def _decades(error: float) -> int:
    """Powers of ten above 1e-16, rounded."""
    return max(0, round(16 + log10(error))) if error > 0 else 0
