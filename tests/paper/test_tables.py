"""The tables as data: every figure is the one that the paper prints, and belongs to the model that it names."""

import re

import paper_helpers
import pytest

from contextready import ContextReadyError, ModelConfig
from contextready.paper.tables import FOLDER, NAMES, figures_of, model_of_shape, table, tables
from contextready.runs.catalog import entries, millions
from contextready.runs.paper_models import PAPER_MODELS

needs_source = pytest.mark.skipif(not paper_helpers.SOURCE.is_file(), reason=paper_helpers.REASON)


def cells(name):
    """The rows of a table as dictionaries."""
    return [table(name).cells(row) for row in table(name).rows]


def number(text):
    """The number in a printed figure: -1.38, 46.66*, ~1,032M."""
    return float(re.search(r"[+-]?\d[\d,]*\.?\d*", text)[0].replace(",", ""))


@needs_source
def test_there_is_one_file_for_every_table_of_the_paper_in_its_order():
    printed = [(one.number, one.label, one.section) for one in paper_helpers.tables()]
    assert [(one.number, one.label, one.section) for one in tables()] == printed


@needs_source
@pytest.mark.parametrize("position", range(len(NAMES)), ids=NAMES)
def test_every_row_is_printed_in_the_paper(position):
    ours, printed = table(NAMES[position]), paper_helpers.tables()[position]
    assert [column.heading for column in ours.columns] == printed.headings
    assert [list(row.figures) for row in ours.rows] == printed.rows


def test_the_files_are_the_tables():
    assert {path.stem for path in FOLDER.iterdir()} == set(NAMES)
    assert [one.name for one in tables()] == list(NAMES)


def test_columns_have_keys_of_their_own_and_models_exist():
    for one in tables():
        keys = [column.key for column in one.columns]
        assert len(set(keys)) == len(keys)
        for row in one.rows:
            assert {row.model, *row.models.values()} - {None} <= set(PAPER_MODELS), one.name
            assert not (row.model and row.models), one.name
    # Only the table of settings is about no model in particular.
    without = {one.name for one in tables() for row in one.rows if not (row.model or row.models)}
    assert without == {"hyperparameters"}


def test_metrics_say_which_values_are_better():
    metrics = ("perplexity", "accuracy", "levels", "contraction rate", "tokens per second", "milliseconds per token")
    judged = [
        (unit, row.better or column.better)
        for one in tables()
        for row in one.rows
        for column in one.columns
        if (unit := row.unit or column.unit) in metrics
    ]
    assert set(judged) == {
        ("perplexity", "lower"),
        ("contraction rate", "lower"),
        ("milliseconds per token", "lower"),
        ("accuracy", "higher"),
        ("levels", "higher"),
        ("tokens per second", "higher"),
    }


def test_rows_name_models_of_the_shape_that_their_text_gives():
    """D=5 C=1120 is a context-ready model of that shape, Roformer N=3 a transformer."""
    checked = 0
    for one in tables():
        for row in one.rows:
            for name in {*row.models.values(), row.model} - {None}:
                config, text = PAPER_MODELS[name].config, " ".join(filter(None, row.figures))
                depth = "N" if config.correction is None else "D"
                for letter, value in (("C", config.width), (depth, config.layers)):
                    said = [int(figure) for figure in re.findall(rf"\b{letter}=(\d+)", text)]
                    assert not said or value in said, (one.name, name)
                    checked += bool(said)
    assert checked == 84


def test_widths_and_layers_of_rows_are_those_of_their_models():
    checked = 0
    for one in tables():
        for row in one.rows:
            printed = one.cells(row)
            for name in {*row.models.values(), row.model} - {None}:
                for key in {"width", "layers"} & set(printed):
                    assert number(printed[key]) == getattr(PAPER_MODELS[name].config, key), (one.name, name)
                    checked += 1
    assert checked == 36


def test_costs_are_those_of_the_models():
    checked = {"multiply-accumulates per token": 0, "C²": 0, "parameters": 0}
    for one in tables():
        for column in one.columns:
            for row in one.rows:
                printed = one.cells(row).get(column.key)
                if column.unit not in checked or printed is None:
                    continue
                (entry,) = entries([row.model])
                ours = {
                    "multiply-accumulates per token": millions(entry.paper_macs, printed),
                    "C²": f"{entry.account.width_squared_coefficient:g}C²",
                    "parameters": millions(entry.account.parameters, printed),
                }
                assert printed == ours[column.unit], (one.name, row.model)
                checked[column.unit] += 1
    assert checked == {"multiply-accumulates per token": 15, "C²": 16, "parameters": 4}
    assert all(
        round(config.width / config.layers) == int(printed["ratio"])
        for row, printed in zip(table("main").rows, cells("main"), strict=True)
        for config in [PAPER_MODELS[row.model].config]
    )


def test_the_costs_of_the_catalog_are_those_of_the_tables():
    """`PAPER_MODELS` has them too, for `crt info`."""
    in_text = {("owt-d1-c2048", "149M")}
    for name, paper in PAPER_MODELS.items():
        printed = {figure for one in figures_of(name) for figure in one.figures.values()}
        coefficient = None if paper.coefficient is None else f"{paper.coefficient}C²"
        for figure in (paper.flops, paper.parameters, coefficient):
            assert figure is None or figure in printed or (name, figure) in in_text, (name, figure)


@pytest.mark.parametrize(
    ("name", "context_ready", "transformer"),
    [
        ("width", "ppl_d", "ppl_n"),
        ("scale", "ppl_d", "ppl_n"),
        ("k10", "ppl_d", "ppl_n"),
        ("block-size", "ppl_d", "ppl_n"),
        ("token-matched", "ppl_d", "ppl_n"),
        ("seq", "k1", "k5"),
    ],
)
def test_differences_are_those_of_the_printed_perplexities(name, context_ready, transformer):
    key = "correction" if name == "seq" else "delta"
    for printed in cells(name):
        difference = number(printed[context_ready]) - number(printed[transformer])
        # Both were rounded before: 52.2 - 53.0 is printed as -0.7.
        assert difference == pytest.approx(number(printed[key]), abs=0.11)


def test_figures_that_two_tables_print_agree():
    deep = {row["layers"]: row for row in cells("depth-deep")}
    wide = {(row["block_size"], row["k1"]): row for row in cells("depth-d1")}
    for row in cells("seq"):
        other = deep.get(row["layers"]) or wide[row["block_size"], row["k1"]]
        for key in ("k1", "k2", "k3", "k5", "k10", "streaming"):
            assert row[key] == other[key]
    baseline, fixed, *_ = cells("d1")
    assert (baseline["ppl_100k"], fixed["ppl_100k"]) == (cells("k10")[-1]["ppl_n"], cells("k10")[-1]["ppl_d"])


def test_figures_of_a_model_come_from_all_tables():
    found = figures_of("owt-n6-c1088")
    names = [one.table.name for one in found]
    assert names == ["main", "d1", *["k10"] * 5, *["block-size"] * 3, "timing"]
    assert found[0].figures["ppl"] == "37.76"
    # Of a row that compares two models, only this model's figures and what both have in common.
    assert found[2].figures == {"steps": "40K", "ppl_n": "43.24", "delta": "+0.59"}
    assert found[2].perplexities == {"N=6": "43.24"}
    assert figures_of("wiki-d1-c50-tied") == ()


def test_perplexities_are_told_from_other_metrics_of_a_row():
    assert [one.perplexities for one in figures_of("wiki-d1-c50-blind")] == [
        {"k_min = 2": "84.32", "No k_min": "84.16"},
        {"k_min = 2": "84.61", "No k_min": "84.19"},
        {"k_min = 2": "118.35", "No k_min": "130.95"},
        {},
    ]


def test_models_are_found_by_their_shape():
    for name, paper in PAPER_MODELS.items():
        assert model_of_shape(paper.config) == name
    shape = {"vocab_size": 32_000, "width": 1120, "layers": 5, "correction": "add"}
    assert model_of_shape(ModelConfig(heads=8, bias=True, **shape)) == "owt-d5-c1120"
    for change in ({"layers": 4}, {"width": 1024, "layers": 7}, {"vocab_size": 4096}, {"correction": "concat"}):
        assert model_of_shape(ModelConfig(heads=8, **shape | change)) is None
    assert model_of_shape(ModelConfig(heads=8, extra_ffn=True, **shape)) is None


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(ContextReadyError, match=r"^There is no table 'mian' of the paper; did you mean 'main'\?$"):
        table("mian")
    with pytest.raises(ContextReadyError, match="did you mean 'owt-d5-c1120'"):
        figures_of("owt-d5-c1121")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('["1", a]', '["1", a, b]'), "row 0 has 3 figures, but the table has 2 columns"),
        (('["1", a]', "[1, a]"), "rows, item 0, figures, item 0 must be a string, but is a whole number"),
        (("model: x", "models: {q: x}"), "row 0 names models for columns that the table does not have"),
        (("better: lower", "better: less"), "must be lower or higher"),
        (("notes: []", ""), "lacks the key 'notes'"),
        (("rows:", "rows: ["), "is not valid YAML"),
    ],
)
def test_a_damaged_file_is_refused_in_one_sentence(change, message, tmp_path, monkeypatch):
    text = """
name: main
title: t
number: "1"
label: null
section: s
columns: [{key: k, heading: K, meaning: m}, {key: l, heading: L, meaning: m, better: lower}]
rows: [{model: x, figures: ["1", a]}]
notes: []
"""
    assert change[0] in text
    (tmp_path / "main.yaml").write_text(text.replace(*change))
    monkeypatch.setattr("contextready.paper.tables.FOLDER", tmp_path)
    with pytest.raises(ContextReadyError) as refused:
        table.__wrapped__("main")
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
