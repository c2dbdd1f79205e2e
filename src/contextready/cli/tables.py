"""Tables that compare models, one row per model: as text that fits the console, as Markdown, or as CSV."""

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite

NOTHING = "–"
Value = tuple[float, float | None] | None
"""A number and its standard error, or None if a model does not have this figure."""


@dataclass(frozen=True)
class Figure:
    """One column of a comparison, with a value for each model."""

    label: str
    """Its heading in text and Markdown."""
    key: str
    """Its heading in CSV; its standard errors are in `key_error`."""
    values: Sequence[Value]
    digits: int = 2
    meaning: str = ""
    """What the heading means, in one sentence."""

    @property
    def has_errors(self) -> bool:
        """Whether any of the values has a standard error."""
        return any(value is not None and value[1] is not None and isfinite(value[1]) for value in self.values)

    def cells(self) -> list[str]:
        """The values as text, with their standard errors."""
        return [_cell(value, self.digits) for value in self.values]


def as_text(names: Sequence[str], figures: Sequence[Figure], width: int) -> str:
    """Format a text table; columns that do not fit the width follow in further tables with the same rows.

    No cell is ever wrapped or truncated, so a line can be wider than `width` if a single column is.
    """
    first = _column("model", names, left=True)
    blocks = [[first]]
    for figure in figures:
        column = _column(figure.label, figure.cells())
        if len(blocks[-1]) > 1 and sum(_width(c[0]) + 2 for c in (*blocks[-1], column)) - 2 > width:
            blocks.append([first])
        blocks[-1].append(column)
    return "\n\n".join("\n".join(_lines(block)) for block in blocks)


def as_markdown(names: Sequence[str], figures: Sequence[Figure]) -> str:
    """Format one Markdown table."""
    rows = [["model", *(figure.label for figure in figures)], ["---", *("---:" for _ in figures)]]
    rows += [[name, *cells] for name, *cells in zip(names, *(figure.cells() for figure in figures), strict=True)]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows)


def as_csv(names: Sequence[str], figures: Sequence[Figure]) -> str:
    """Format CSV with a header and plain numbers; a missing number is an empty field."""
    columns: list[list[str]] = [["model", *names]]
    for figure in figures:
        columns.append([figure.key, *(_plain(None if value is None else value[0]) for value in figure.values)])
        if figure.has_errors:
            errors = (_plain(None if value is None else value[1]) for value in figure.values)
            columns.append([f"{figure.key}_error", *errors])
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(zip(*columns, strict=True))
    return text.getvalue().rstrip("\n")


def _cell(value: Value, digits: int) -> str:
    if value is None:
        return NOTHING
    number, error = value
    shown = "" if error is None or not isfinite(error) else f" ± {error:,.{digits}f}"
    return f"{number:,.{digits}f}{shown}"


def _plain(number: float | None) -> str:
    return "" if number is None or not isfinite(number) else repr(number)


def _column(label: str, cells: Sequence[str], left: bool = False) -> list[str]:
    """The heading and the cells, padded to one width."""
    widest = max(map(_width, (label, *cells)))
    padding = [" " * (widest - _width(cell)) for cell in (label, *cells)]
    return [cell + pad if left else pad + cell for cell, pad in zip((label, *cells), padding, strict=True)]


def _lines(columns: Sequence[Sequence[str]]) -> Iterator[str]:
    heading, *rows = ("  ".join(cells).rstrip() for cells in zip(*columns, strict=True))
    yield heading
    yield "─" * max(map(_width, (heading, *rows)))
    yield from rows


def _width(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(text)
