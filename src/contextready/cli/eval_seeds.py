"""What `crt eval` prints about several seeds: means with their spread, and differences paired by seed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from contextready.cli.console import make_console
from contextready.cli.tables import Figure, Value, as_text

if TYPE_CHECKING:
    from contextready.evaluate.summary import Summary

ERRORS = "± = standard deviation over seeds."


def print_over_seeds(summaries: "Sequence[Summary]") -> None:
    """Print one row per configuration, and how the first compares with the others; nothing without several seeds."""
    from contextready.evaluate.summary import differences, spread

    if not summaries:
        return
    passes = sorted({k for one in summaries for evaluation in one.by_seed.values() for k in evaluation.parallel})
    columns: list[tuple[str, int | None]] = [*((f"K={k}", k) for k in passes), ("streaming", None)]

    def cell(summary: "Summary", k: int | None) -> Value:
        values = summary.perplexities(k)
        return spread(values) if values else None

    figures = [Figure(label, label, [cell(one, k) for one in summaries]) for label, k in columns]
    figures.append(Figure("seeds", "seeds", [(len(one.by_seed), None) for one in summaries], digits=0))
    shown = [figure for figure in figures if any(value is not None for value in figure.values)]
    console = make_console(tables=True)
    console.print("\nMeans over seeds\n")
    console.print(as_text([one.name for one in summaries], shown, console.width), "", sep="\n", soft_wrap=True)
    console.print(ERRORS)
    for one in differences(summaries):
        mean, deviation = spread(list(one.by_seed.values()))
        about = "" if deviation is None else f" ± {deviation:.2f}"
        each = ", ".join(f"seed {seed}: {value:+.2f}" for seed, value in one.by_seed.items())
        console.print(f"{one.first} minus {one.second}, as they generate: {mean:+.2f}{about} ({each})", soft_wrap=True)
