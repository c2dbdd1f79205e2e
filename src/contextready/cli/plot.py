"""`crt plot`: plot learning curves of runs, averaged over seeds, or the difference between two configurations."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from contextready.cli.options import Verbs, verb
from contextready.errors import ContextReadyError

if TYPE_CHECKING:
    from contextready.evaluate.curves import Crossover, Curve
    from contextready.evaluate.seeds import Difference, Group

EXAMPLES = """
crt plot runs/mini-d1 runs/mini-n1-ffn --out curves.svg
crt plot runs/d1-seed* runs/n1-seed*                 # one curve for each, with a band over seeds
crt plot runs/d1-seed* runs/n1-seed* --difference    # the first minus the second, seed by seed
"""


def add(verbs: Verbs) -> None:
    """Describe `crt plot`."""
    plot = verb(
        verbs,
        "plot",
        "plot learning curves of runs and find where they cross",
        "Plot the validation perplexity of runs during training, and print where the curves cross.\n"
        "Runs whose settings are the same except for the seed become one curve: the mean over\n"
        "seeds with a band (min–max for two seeds, ± standard deviation for three or more).",
        EXAMPLES,
    )
    plot.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    plot.add_argument(
        "--out", type=Path, default=Path("curves.png"), metavar="FILE", help="figure to write, as .png, .svg or .pdf"
    )
    plot.add_argument(
        "--x",
        choices=["tokens", "steps", "macs", "seconds"],
        default="tokens",
        help="horizontal axis: training tokens, training steps, multiply-accumulates or seconds spent on training",
    )
    how = plot.add_mutually_exclusive_group()
    how.add_argument("--each", action="store_true", help="draw every run as its own curve")
    how.add_argument(
        "--difference",
        action="store_true",
        help="plot the validation loss of the first configuration minus that of the second, paired by seed",
    )
    plot.add_argument("--title", metavar="TEXT", help="title of the plot")
    plot.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    if options.difference:
        run_difference(options.runs, options.out, options.x, options.title)
    else:
        run_plot(options.runs, options.out, options.x, options.title, each=options.each)


def run_plot(runs: Sequence[Path], out: Path, axis: str, title: str | None, *, each: bool = False) -> None:
    """Plot one curve per configuration, or with `each` one per run, and print where they cross."""
    from contextready.evaluate.curves import draw, read_curve
    from contextready.evaluate.names import short_names
    from contextready.evaluate.seeds import group_runs, mean_curve

    if each:
        curves = [read_curve(run, axis, name) for run, name in zip(runs, short_names(runs), strict=True)]
    else:
        groups = group_runs(runs)
        curves = [mean_curve(group, axis) for group in groups]
        for group in groups:
            if len(group.runs) > 1:
                print(f"{group.name}: mean of {len(group.runs)} seeds ({_members(group)})")
    _print_crossings(curves, draw(curves, out, axis, title), axis)
    print(f"Wrote {out}")


def run_difference(runs: Sequence[Path], out: Path, axis: str, title: str | None) -> None:
    """Plot the difference in loss between two configurations, and print it at the end of training."""
    from contextready.evaluate.curves import AXES, short
    from contextready.evaluate.seeds import difference, draw_difference, group_runs

    groups = group_runs(runs)
    if len(groups) != 2:
        found = "; ".join(f"{group.name} ({_members(group)})" for group in groups)
        raise ContextReadyError(
            f"--difference needs runs of exactly two configurations that differ in more than the seed, but got "
            f"{len(groups)}: {found}."
        )
    first, second = groups
    result = difference(first, second, axis)
    draw_difference(result, out, axis, title)
    for run in result.unpaired:
        print(f"Left out {run}: the other configuration has no run with the same seed.")
    where = f"{short(result.x[-1])} {AXES[axis]}"
    print(f"Validation loss of {result.first} minus {result.second} at {where}: {_last(result)}")
    print(f"Wrote {out}")


def _members(group: "Group") -> str:
    return ", ".join(run.name for run in group.runs.values())


def _last(result: "Difference") -> str:
    """The difference at the last training position: the mean over seeds, their spread, and each of them."""
    last = result.loss_SX[:, -1]
    mean = f"{last.mean():+.4f}"
    if len(last) == 1:
        return mean
    each = ", ".join(f"seed {seed}: {value:+.4f}" for seed, value in zip(result.seeds, last, strict=True))
    deviation = "" if len(last) == 2 else f" ± {last.std(ddof=1):.4f} (standard deviation over seeds)"
    return f"{mean}{deviation}; {each}"


def _print_crossings(curves: "Sequence[Curve]", crossings: "Sequence[Crossover]", axis: str) -> None:
    import numpy as np

    from contextready.evaluate.curves import AXES, short

    for cross in crossings:
        perplexity = np.exp(cross.loss)
        digits = 1 if perplexity >= 10 else 3
        print(
            f"{cross.below} overtakes {cross.above} at {short(cross.x)} {AXES[axis]}, "
            f"perplexity {perplexity:.{digits}f}"
        )
    crossed = {frozenset((cross.below, cross.above)) for cross in crossings}
    for i, one in enumerate(curves):
        for other in curves[i + 1 :]:
            if frozenset((one.name, other.name)) not in crossed:
                end = min(one.x[-1], other.x[-1])
                below, above = sorted((one, other), key=lambda curve: curve.at(end))
                print(f"{below.name} and {above.name} do not cross; {below.name} ends with the lower perplexity")
