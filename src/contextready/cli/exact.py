"""`crt exact`: the method on a small random model, in a few seconds."""

import argparse
from math import log10

from contextready.cli.console import make_console
from contextready.cli.options import Verbs, verb

SHOWN = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)
"""Passes that have a row in the table, besides the last."""


def add(verbs: Verbs) -> None:
    """Describe `crt exact`."""
    exact = verb(
        verbs,
        "exact",
        "see streaming and parallel passes agree on a random model",
        "Stream tokens one by one through a small randomly initialised model, solve for all of\n"
        "them at once in parallel passes, and show that both are one function.",
    )
    exact.add_argument("--tokens", type=int, default=48, help="length of the sequence (default: 48)")
    exact.add_argument("--layers", type=int, default=1, help="D, the number of blocks (default: 1)")
    exact.add_argument("--width", type=int, default=64, help="C, a multiple of 8 (default: 64)")
    exact.add_argument("--seed", type=int, default=0, help="seed of the weights and tokens (default: 0)")
    exact.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    print_exact(options.tokens, options.layers, options.width, options.seed)


def print_exact(tokens: int, layers: int, width: int, seed: int) -> None:
    """Measure and show it."""
    from rich import box
    from rich.table import Table

    from contextready.measure.exactness import run_exact

    measured, T = run_exact(tokens, layers, width, seed), tokens
    console = make_console(tables=True)
    console.print(
        f"A random context-ready model (D={layers}, C={width}, correction add, float64) reads {T} random tokens. "
        "Left to right it is a recurrent network: one pass per token, exact. Below, the same outputs are solved for "
        "all positions at once, pass by pass, and compared with that stream."
    )
    table = Table(box=box.SIMPLE)
    for column in ("pass K", "change by it", "error left", "exact positions"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("error by decades", no_wrap=True)
    for k in sorted({*(k for k in SHOWN if k <= T), T + 1}):
        change, error = "" if k == 1 else f"{measured.changes[k - 2]:.1e}", measured.errors[k - 1]
        table.add_row(str(k), change, f"{error:.1e}", f"{measured.exact[k - 1]} of {T}", "█" * _decades(error))
    console.print(table)
    console.print(
        f"After K passes the first K - 1 positions are exact; after T + 1 = {T + 1} all are, to rounding "
        f"({measured.errors[-1]:.0e}). Streaming and the fixed point are one function.\n\n"
        f"Empirical rate at the fifth correction: {measured.rate:.2f} at the worst position (the paper's L̂), "
        f"{measured.norm_rate:.2f} for the largest change. These are random weights; the paper reports 0.50 to 0.72 "
        "after training with random depth.\n\n"
        f"The cumulative (resnet) unroll of the same weights ends {measured.cumulative_error:.1f} times the size of z "
        "away from the stream: only the non-cumulative form trains what streaming computes.\n\n"
        "Next: `crt info` lists what every model of the paper costs."
    )


def _decades(error: float) -> int:
    """Decades above 1e-16."""
    return max(0, round(16 + log10(error))) if error > 0 else 0
