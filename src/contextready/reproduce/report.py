"""The tables in miniature as Markdown, each with the rows of the paper above ours."""

from collections.abc import Sequence
from statistics import fmean

from contextready.paper.tables import table
from contextready.reproduce.lines import MINIATURES, OF_OUR_OWN, Column, Line, Miniature
from contextready.reproduce.measures import Record, Records
from contextready.study.tables import spread
from contextready.train.trials import aligned

LEGEND = """\
Lines in italics are the paper's rows, with the figures that it prints; the lines below them are our miniatures of
them. Lines without one are controls that the paper lacks. PPL is the validation perplexity, for context-ready models
after as many parallel passes as in training. ± is the standard deviation over seeds. The data, sizes and numbers of
tokens are not the paper's, so only differences within a table can be compared."""


def table_markdown(name: str, records: Records) -> str | None:
    """One table; None if nothing of it has been run."""
    miniature = MINIATURES[name]
    measured = [(line, _cells(line, miniature.columns, records)) for line in miniature.lines]
    if not any(any(cells) for _, cells in measured):
        return None
    lines = []
    for line, cells in measured:
        if line.row is not None:
            lines.append(_of_paper(name, miniature, line.row))
        lines.append([line.name, *cells, _seeds(line, records)])
    head = ["model", *(column.heading for column in miniature.columns), "seeds"]
    return aligned([head, *lines])


def tables_markdown(names: Sequence[str], records: Sequence[Record]) -> dict[str, str]:
    """All of these tables of which something has been run."""
    by_run = Records(records)
    found = {name: table_markdown(name, by_run) for name in names}
    return {name: text for name, text in found.items() if text is not None}


def title(name: str) -> str:
    """The heading of a table."""
    return OF_OUR_OWN[name] if name in OF_OUR_OWN else f"{table(name).reference}: {table(name).title}"


def as_markdown(names: Sequence[str], records: Sequence[Record]) -> str:
    """All of these tables with titles, notes and an explanation."""
    parts = []
    for name, text in tables_markdown(names, records).items():
        parts += [f"### {title(name)}", text, *MINIATURES[name].notes]
    return "\n\n".join([*parts, LEGEND])


def _cells(line: Line, columns: Sequence[Column], records: Records) -> list[str]:
    cells = []
    for column in columns:
        measure = line.measures.get(column.key)
        values = [] if measure is None else list(measure.of(records).values())
        cells.append(_number(values, column))
    return cells


def _number(values: Sequence[float], column: Column) -> str:
    if column.digits < 0 and values:
        return f"{fmean(values) / 1000:,.0f}k"
    if column.digits == 0:
        # A cost, which is the same for every seed.
        return f"{values[0]:,.0f}" if values else ""
    return spread(values, column.digits, column.signed)


def _seeds(line: Line, records: Records) -> str:
    counts = {len(measure.of(records)) for measure in line.measures.values()}
    return str(max(counts, default=0)) if counts - {0} else "not run"


def row_name(name: str, miniature: Miniature, row: int) -> str:
    """What the paper calls a row of a table."""
    printed = table(name)
    cells = printed.cells(printed.rows[row])
    label = cells.get(miniature.name_column, "")
    if miniature.name_column != "name":
        heading = next(c.heading for c in printed.columns if c.key == miniature.name_column)
        label = f"{heading}{'=' if len(heading) == 1 else ' '}{label}"
    if name == "seq":
        label += f", block {cells['block_size']}"
    elif name == "variants":
        label = f"D={cells['layers']} {label}"
    elif name == "depth-d1":
        label += f", {cells['steps']} steps"
    return label


def _of_paper(name: str, miniature: Miniature, row: int) -> list[str]:
    printed = table(name)
    cells = printed.cells(printed.rows[row])
    figures = (cells.get(column.key, "") for column in miniature.columns)
    return [f"*{row_name(name, miniature, row)}*", *figures, ""]
