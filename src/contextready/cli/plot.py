"""`crt plot`: learning curves of runs, and where they cross."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from contextready.cli.options import Verbs, verb


def add(verbs: Verbs) -> None:
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
    plot.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    run_plot(options.runs, options.out, options.x, options.title)


def run_plot(runs: Sequence[Path], out: Path, axis: str, title: str | None) -> None:
    """Draw and print where the curves cross."""
    import numpy as np

    from contextready.evaluate.curves import AXES, draw, read_curve, short

    names = [run.name for run in runs]
    curves = [read_curve(run, axis, run.name if names.count(run.name) == 1 else str(run)) for run in runs]
    crossings = draw(curves, out, axis, title)
    for cross in crossings:
        print(
            f"{cross.below} passes {cross.above} at {short(cross.x)} {AXES[axis]}, perplexity {np.exp(cross.loss):.1f}"
        )
    crossed = {frozenset((cross.below, cross.above)) for cross in crossings}
    for i, one in enumerate(curves):
        for other in curves[i + 1 :]:
            if frozenset((one.name, other.name)) not in crossed:
                end = min(one.x[-1], other.x[-1])
                below, above = sorted((one, other), key=lambda curve: curve.at(end))
                print(f"{below.name} and {above.name} do not cross; {below.name} ends below")
    print(f"Drawn: {out}")
