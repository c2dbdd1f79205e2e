"""What the paper prints: its tables, the figures of single models, and its perplexities beside measured ones."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from contextready.cli.console import make_console

if TYPE_CHECKING:
    from contextready.evaluate.evaluate import Evaluation
    from contextready.paper.tables import Printed, Table
    from contextready.runs.checkpoint import Checkpoint

CAVEAT = "Tokenizer, split and evaluation differ from the paper's, so absolute perplexities are not comparable."
NOTEBOOKS = "Public notebooks are the experiment notes that the author of the paper has published."
NO_MATCH = "None of these runs has the shape of a model in the paper's tables, so the paper has no figures for them."


def print_table(name: str | None) -> None:
    """Print one table of the paper with its notes, or the list of all tables."""
    from contextready.paper.tables import table, tables

    if name is None:
        _print_list(tables())
    else:
        _print_whole(table(name))


def table_records(name: str | None) -> list[dict[str, Any]]:
    """Return one table, or all of them, as plain JSON values."""
    from dataclasses import asdict

    from contextready.paper.tables import table, tables

    return [asdict(one) for one in (tables() if name is None else (table(name),))]


def print_figures(models: Sequence[str]) -> None:
    """Print which tables of the paper list these models, and the figures there."""
    from rich import box
    from rich.table import Table as RichTable

    from contextready.paper.tables import NAME, figures_of

    shown = RichTable(box=box.SIMPLE, title="Printed in the paper", title_justify="left")
    for heading in ("model", "table", "figures"):
        shown.add_column(heading, no_wrap=heading == "model")
    for model in models:
        printed = figures_of(model)
        for i, one in enumerate(printed):
            figures = [
                figure if column.unit == NAME else f"{column.heading} {figure}".strip()
                for column, figure in zip(one.columns, one.figures.values(), strict=True)
            ]
            shown.add_row(model if i == 0 else "", one.table.reference, ", ".join(figures))
        if not printed:
            shown.add_row(model, "–", "no figures in the tables")
    console = make_console(tables=True)
    console.print(shown)
    console.print("crt info --table NAME prints a whole table and what its columns mean.")


def figure_records(model: str) -> list[dict[str, Any]]:
    """Return what the tables of the paper print for a model, as plain JSON values."""
    from contextready.paper.tables import figures_of

    return [_record(one) for one in figures_of(model)]


def paper_model(checkpoint: "Checkpoint") -> str | None:
    """Return the paper's model that has the shape of a native run's model, if any."""
    from contextready.model.config import ModelConfig
    from contextready.paper.tables import model_of_shape

    # A folder in Hugging Face format has no settings.
    config = checkpoint.model_config if checkpoint.config["model"] else None
    return model_of_shape(config) if isinstance(config, ModelConfig) else None


def perplexity_record(model: str | None) -> dict[str, Any] | None:
    """Return the rows of the paper's tables that have perplexities of a model, as plain JSON values."""
    if model is None:
        return None
    return {"model": model, "caveat": CAVEAT, "rows": [_record(one) for one in _with_perplexities(model)]}


def print_perplexities(names: Sequence[str], models: Sequence[str | None], evaluations: "Sequence[Evaluation]") -> None:
    """Print the paper's perplexities beside the measured ones of runs that have the shape of a paper model."""
    from rich import box
    from rich.table import Table as RichTable

    shown = RichTable(box=box.SIMPLE, title="Perplexity beside the paper's", title_justify="left")
    for heading in ("model", "measured", "same shape", "printed in the paper"):
        shown.add_column(heading)
    for name, model, evaluation in zip(names, models, evaluations, strict=True):
        printed = [] if model is None else _with_perplexities(model)
        for i, one in enumerate(printed):
            first = (name, _measured(evaluation), model) if i == 0 else ("", "", "")
            figures = ", ".join(f"{heading} {figure}" for heading, figure in one.perplexities.items())
            shown.add_row(*first, f"{one.table.reference}: {_context(one)}{figures}")
    console = make_console(tables=True)
    if shown.row_count == 0:
        console.print(NO_MATCH)
        return
    console.print(shown)
    console.print(CAVEAT)


def _with_perplexities(model: str) -> "list[Printed]":
    from contextready.paper.tables import figures_of

    return [one for one in figures_of(model) if one.perplexities]


def _measured(evaluation: "Evaluation") -> str:
    if evaluation.sequential is not None:
        return f"streaming {evaluation.sequential.perplexity:,.2f}"
    k = max(evaluation.parallel)
    return f"K={k} {evaluation.parallel[k].perplexity:,.2f}"


def _context(one: "Printed") -> str:
    """The cells that tell this row from others of the same model, such as the block size or the steps."""
    from contextready.paper.tables import NAME

    keys = [
        figure if column.unit == NAME else f"{column.heading} {figure}"
        for column, figure in zip(one.columns, one.figures.values(), strict=True)
        if column.key in ("name", "block_size", "steps")
    ]
    return f"{', '.join(keys)}: " if keys else ""


def _record(one: "Printed") -> dict[str, Any]:
    return {"table": one.table.name, "number": one.table.number, "figures": one.figures}


def _print_list(tables: "Sequence[Table]") -> None:
    from rich import box
    from rich.table import Table as RichTable

    shown = RichTable(box=box.SIMPLE, title="Tables of the paper", title_justify="left")
    for heading in ("name", "number", "content"):
        shown.add_column(heading, no_wrap=heading != "content")
    for one in tables:
        shown.add_row(one.name, one.number or "–", one.title)
    console = make_console(tables=True)
    console.print(shown)
    console.print("crt info --table NAME prints one of them. – = without a number in the paper.")


def _print_whole(table: "Table") -> None:
    from rich import box
    from rich.table import Table as RichTable

    from contextready.paper.tables import NAME

    # Narrow gaps, because the widest table has twelve columns.
    shown = RichTable(box=box.SIMPLE, title=table.reference, title_justify="left", padding=(0, 1, 0, 0))
    for column in table.columns:
        shown.add_column(column.heading)
    for row in table.rows:
        shown.add_row(*(figure or "–" for figure in row.figures))
    console = make_console(tables=True)
    console.print(f"{table.title}.")
    console.print(shown)
    for column in table.columns:
        unit = None if column.unit == NAME or (column.unit or "") in column.meaning else column.unit
        console.print(f"{column.heading or 'first column'}: {_explained(column.meaning, unit, column.better)}.")
    for row in table.rows:
        if row.unit is not None:
            console.print(f"{row.figures[0]}: {_explained(row.unit, None, row.better)}.")
    console.print("\nNotes")
    for note in table.notes:
        console.print(f"- {note}")
    if any("public notebooks" in note for note in table.notes):
        console.print(NOTEBOOKS)


def _explained(meaning: str, unit: str | None, better: str | None) -> str:
    details = [*([unit] if unit else []), *([f"{better} is better"] if better else [])]
    return f"{meaning} ({', '.join(details)})" if details else meaning
