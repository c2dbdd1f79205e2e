"""What the paper prints, in `crt info` and beside measured perplexities in `crt eval`."""

import json

import pytest
import train_helpers

from contextready.cli.main import main
from contextready.cli.paper import CAVEAT, NO_MATCH
from contextready.paper.tables import NAMES, table, tables


@pytest.fixture
def crt(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")

    def run(*words):
        code = main([str(word) for word in words])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory, data):
    """Two untrained models: one of the paper's smallest shape, and one that the paper does not have."""
    folder = tmp_path_factory.mktemp("runs")
    tiny = {"steps": 1, "layers": 1, "correction": "blind"}
    train_helpers.run(data, folder / "wiki", width=50, heads=1, vocab_size=16_000, **tiny)
    train_helpers.run(data, folder / "other", **tiny)
    return folder


def test_info_prints_the_figures_of_named_models(crt):
    code, out, _ = crt("info", "owt-n6-c1088", "wiki-d1-c50-tied", "--paper")
    assert code == 0
    costs, printed = out.split("Printed in the paper")
    rows = [" ".join(line.split()) for line in printed.splitlines()]
    assert "owt-n6-c1088 main (Table 1) Roformer N=6 C=1088, FLOPs/tok 120M, C/N 181, Val PPL 37.76, Δ -1.38" in rows
    assert "block-size (Table A9) Block size 512, N=6 PPL 30.11, Gap +0.46" in rows
    assert "wiki-d1-c50-tied – no figures in the tables" in rows
    assert crt("info", "owt-n6-c1088", "wiki-d1-c50-tied")[1] == costs


def test_info_has_the_figures_as_json_too(crt):
    _, out, _ = crt("info", "owt-d5-c1120", "--paper", "--json")
    (model,) = json.loads(out)["models"]
    main_row, timing = model.pop("paper_figures")
    assert main_row["figures"] == {"name": "D=5 C=1120", "flops": "121M", "ratio": "224", "ppl": "36.38"}
    assert (timing["table"], timing["number"], timing["figures"]["speed"]) == ("timing", "A13", "349")
    assert json.loads(crt("info", "owt-d5-c1120", "--json")[1]) == {"models": [model]}


def test_info_lists_the_tables(crt):
    code, out, _ = crt("info", "--table")
    assert code == 0
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    for one in tables():
        assert one.title in rows[one.name]
    _, out, _ = crt("info", "--table", "--json")
    assert [one["name"] for one in json.loads(out)["tables"]] == list(NAMES)


def test_info_prints_a_table_with_its_columns_and_notes(crt):
    code, out, _ = crt("info", "--table", "timing")
    assert code == 0
    rows = [" ".join(line.split()) for line in out.splitlines()]
    assert "Model Params tok/s ms/tok Speedup" in rows
    assert "Roformer N=6 C=1088 155M 351 2.85 –" in rows
    assert "ms/tok: time for one token (milliseconds per token, lower is better)." in rows
    assert "- The public notebooks: eager PyTorch, random weights" in out
    assert "Public notebooks are the experiment notes that the author of the paper has published." in rows
    assert "Empirical L: contraction rate (lower is better)." in crt("info", "--table", "k_min")[1]
    _, out, _ = crt("info", "--table", "k_min", "--json")
    (one,) = json.loads(out)["tables"]
    assert one["rows"][3]["figures"] == ["Empirical L", "0.72", "0.94"]


@pytest.mark.parametrize("name", NAMES)
def test_no_figure_is_cut_in_80_columns(name, crt, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = crt("info", "--table", name)
    printed = out.split()
    for row in table(name).rows:
        for figure in filter(None, row.figures):
            assert set(figure.split()) <= set(printed)
    assert "…" not in out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["info", "--table", "tming"], "There is no table 'tming' of the paper; did you mean 'timing'?"),
        (["info", "owt-d5-c1120", "--table"], "leave out --paper and the names of models"),
        (["info", "--table", "main", "--paper"], "leave out --paper and the names of models"),
        (["info", "owt-d5-c1120", "layers=4", "--paper"], "which exist for unchanged models only"),
        (["eval", "runs/a", "--paper", "--csv"], "leave out --tasks, --markdown and --csv"),
        (["eval", "runs/a", "--paper", "--tasks", "bits=a"], "leave out --tasks, --markdown and --csv"),
    ],
)
def test_what_does_not_go_together_is_refused(crt, words, sentence):
    code, out, err = crt(*words)
    assert (code, out) == (2, "")
    assert sentence in err


def test_eval_prints_the_papers_perplexities_of_the_same_shape(crt, runs):
    words = ["eval", runs / "wiki", runs / "other", "--passes", "1,2", "--tokens", "64", "--device", "cpu"]
    _, plain, _ = crt(*words)
    code, out, _ = crt(*words, "--paper")
    assert code == 0
    assert out.startswith(plain)
    beside = [" ".join(line.split()) for line in out.removeprefix(plain).splitlines()]
    streamed = json.loads(crt(*words, "--json")[1])["evaluations"][0]["sequential"]["perplexity"]
    first = "k_min (Table A5): Val PPL (K = 10): k_min = 2 84.32, No k_min 84.16"
    assert f"wiki streaming {streamed:,.2f} wiki-d1-c50-blind {first}" in beside
    assert "k_min (Table A5): Seq K = 1: k_min = 2 84.61, No k_min 84.19" in beside
    assert CAVEAT in beside
    assert not any("other" in line or "0.72" in line for line in beside)


def test_eval_says_if_no_run_has_a_shape_of_the_paper(crt, runs):
    words = ["eval", runs / "other", "--passes", "1", "--no-sequential", "--tokens", "64", "--device", "cpu"]
    _, out, _ = crt(*words, "--paper")
    assert out.rstrip().endswith(NO_MATCH)
    assert CAVEAT not in out


def test_eval_has_the_papers_rows_as_json_too(crt, runs):
    words = ["eval", runs / "wiki", runs / "other", "--passes", "1", "--no-sequential", "--tokens", "64", "--json"]
    _, out, _ = crt(*words, "--paper")
    wiki, other = json.loads(out)["evaluations"]
    assert other["paper"] is None
    assert (wiki["paper"]["model"], wiki["paper"]["caveat"]) == ("wiki-d1-c50-blind", CAVEAT)
    assert [row["figures"]["random"] for row in wiki["paper"]["rows"]] == ["84.32", "84.61", "118.35"]
    assert all("paper" not in one for one in json.loads(crt(*words)[1])["evaluations"])
