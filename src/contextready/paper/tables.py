"""The tables of the paper: columns, rows with the figures exactly as printed, and notes."""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

from contextready.errors import ContextReadyError, nearest
from contextready.formats.limits import shown
from contextready.formats.record import read_record
from contextready.formats.yaml_file import read_yaml
from contextready.model.config import ModelConfig
from contextready.runs.paper_models import PAPER_MODELS

FOLDER = Path(__file__).parent / "data" / "tables"
NAMES = (
    "main",
    "efficiency",
    "width",
    "d1",
    "pointer",
    "seq",
    "pointer-wave",
    "hyperparameters",
    "correction",
    "variants",
    "scale",
    "k_min",
    "k10",
    "depth-d1",
    "depth-deep",
    "block-size",
    "token-matched",
    "fine-tuning",
    "wikipedia",
    "timing",
)
"""The tables in the order of the paper; each is a file."""

PERPLEXITY, NAME = "perplexity", "name"
"""Units of columns: a perplexity; a name or remark, which is not a figure."""

Better = Literal["lower", "higher"]


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    key: str
    """A short name for programs."""
    heading: str
    """The heading as printed, without TeX."""
    meaning: str
    unit: str | None = None
    better: Better | None = None
    """Which values are better, if the column is a metric."""


@dataclass(frozen=True)
class Row:
    """One row of a table."""

    figures: tuple[str | None, ...]
    """One cell for each column, as printed, without TeX; None where the paper prints nothing or a dash."""
    model: str | None = None
    """The model in `PAPER_MODELS` whose row this is."""
    models: dict[str, str] = field(default_factory=dict)
    """Instead of `model`, if a row compares models: the model of each column that belongs to one."""
    unit: str | None = None
    """The unit of all figures, if a table has one metric per row."""
    better: Better | None = None


@dataclass(frozen=True)
class Table:
    """One table of the paper."""

    name: str
    title: str
    """What it compares, in our words."""
    number: str | None
    """Its number in the paper; a table without a caption has none."""
    label: str | None
    """Its label in the paper's source, if it has one."""
    section: str
    """The label of its section."""
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    """What a reader of the figures should know, mostly from the author's public notebooks."""

    def __post_init__(self) -> None:
        keys = [column.key for column in self.columns]
        for i, row in enumerate(self.rows):
            if len(row.figures) != len(keys):
                raise ContextReadyError(
                    f"row {i} has {len(row.figures)} figures, but the table has {len(keys)} columns."
                )
            if not set(row.models) <= set(keys):
                raise ContextReadyError(f"row {i} names models for columns that the table does not have.")

    @property
    def reference(self) -> str:
        """How the paper refers to it, with our name for it."""
        return f"{self.name} (no number)" if self.number is None else f"{self.name} (Table {self.number})"

    def cells(self, row: Row) -> dict[str, str]:
        """Return the printed figures of a row by the key of their column, without empty cells."""
        return {
            column.key: figure for column, figure in zip(self.columns, row.figures, strict=True) if figure is not None
        }


@dataclass(frozen=True)
class Printed:
    """What one row of a table prints for one model."""

    table: Table
    row: Row
    model: str

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of this row that say something about the model, and those that all its models have in common."""
        printed = self.table.cells(self.row)
        return tuple(
            column
            for column in self.table.columns
            if column.key in printed and self.row.models.get(column.key, self.model) == self.model
        )

    @property
    def figures(self) -> dict[str, str]:
        """The printed figures by the key of their column."""
        printed = self.table.cells(self.row)
        return {column.key: printed[column.key] for column in self.columns}

    @property
    def perplexities(self) -> dict[str, str]:
        """The printed perplexities of this model, by the heading of their column."""
        printed = self.table.cells(self.row)
        return {
            column.heading: printed[column.key]
            for column in self.columns
            if column.unit != NAME and (self.row.unit or column.unit) == PERPLEXITY
        }


@cache
def table(name: str) -> Table:
    """Return a table by its name."""
    if name not in NAMES:
        raise ContextReadyError(f"There is no table '{shown(name)}' of the paper; {nearest(name, NAMES)}")
    path = FOLDER / f"{name}.yaml"
    return read_record(Table, read_yaml(path), str(path))


def tables() -> tuple[Table, ...]:
    """Return all tables in the order of the paper."""
    return tuple(table(name) for name in NAMES)


def figures_of(model: str) -> tuple[Printed, ...]:
    """Return every row of every table that prints figures of a model; a model that is only mentioned has none."""
    if model not in PAPER_MODELS:
        raise ContextReadyError(
            f"There is no model '{shown(model)}' in the paper; {nearest(model, list(PAPER_MODELS))}"
        )
    return tuple(
        Printed(one, row, model)
        for one in tables()
        for row in one.rows
        if model == row.model or model in row.models.values()
    )


def model_of_shape(config: ModelConfig) -> str | None:
    """Return the paper's model with these layers, width, correction, extra FFN and vocabulary, if there is one.

    Heads, biases and rotary positions are not compared, because the paper does not give them for all models.
    """
    return next((name for name, paper in PAPER_MODELS.items() if _shape(paper.config) == _shape(config)), None)


def _shape(config: ModelConfig) -> tuple[object, ...]:
    return config.vocab_size, config.width, config.layers, config.correction, config.extra_ffn
