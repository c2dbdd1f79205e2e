"""The experiment on state tracking: its rows, resuming, its report, and what it refuses."""

import json
from pathlib import Path

import pytest
from train_helpers import finish

from contextready.cli.main import main
from contextready.state.report import as_markdown, tables_of
from contextready.state.results import jobs_of, records_of
from contextready.state.trials import CONVERTED, DEPTHS, PARTS, READY, TABLE, WAYS, WAYS_ON, trials_of

MODEL = Path(__file__).parents[2] / ".." / "shared" / "models" / "stories260K-hf"
QUICK = ["width=16", "heads=2", "batch_size=8", "length=4", "steps=4", "eval_every=2", "eval_tokens=100"]


@pytest.fixture(autouse=True)
def _few_tests(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def test_the_rows():
    rows = trials_of(PARTS)
    assert len({trial.key for trial in rows}) == len(rows)
    table = trials_of(["table"])
    assert len(table) == len(TABLE) * (len(READY) + len(DEPTHS) + 1)
    assert len(trials_of(["ways"])) == len(WAYS_ON) * len(WAYS)
    assert {trial.task for trial in trials_of(["convert"])} == set(CONVERTED)
    assert [trial.key for trial in trials_of(["headline"])] == ["s5-d1", "s5-n2", "s5-n4"]
    assert set(trials_of(["headline"])) <= set(table)


def test_every_row_can_be_planned(tmp_path):
    rows = [trial for trial in trials_of(PARTS) if trial.part != "convert"]
    jobs = jobs_of(rows, [0, 1], tmp_path, [])
    assert len(jobs) == 2 * len(rows)
    assert all(job.macs > 0 for job in jobs)
    assert {job.words[0] for job in jobs} == {"task"}
    assert sum("--gru" in job.words for job in jobs) == 2 * len(TABLE)


def test_a_small_experiment_from_end_to_end(tmp_path, capsys):
    words = ["state", "--part", "headline", "--seeds", "0,1", "--jobs", "2", "--out", str(tmp_path / "out")]
    code, _, err = finish("reproduce", *words, *QUICK)
    assert code == 0, err
    records = json.loads((tmp_path / "out" / "report.json").read_text())["runs"]
    assert [(r["key"], r["seed"]) for r in records] == [(f"s5-{m}", s) for m in ("d1", "n2", "n4") for s in (0, 1)]
    for record in records:
        assert record["lengths"] == [4, 8, 16, 32]
        assert record["steps"] == 4
        assert set(record["curve"]) >= {"1", "4", "32"}
        assert record["passes"].keys() == ({"2", "4", "8", "16", "32"} if record["ready"] else set())
    assert (tmp_path / "out" / "lengths.png").stat().st_size > 10_000
    assert (tmp_path / "out" / "depths.svg").is_file()
    assert records_of(trials_of(PARTS), tmp_path / "out") == records
    # Nothing is left to train, and other settings are refused.
    assert main(["reproduce", *words, *QUICK, "--dry-run"]) == 0
    assert "0 of 6 runs are still to train" in capsys.readouterr().out
    assert main(["reproduce", *words, *QUICK[1:], "width=32"]) == 2
    assert "was trained with width=16, not width=32" in capsys.readouterr().err


def record(key="s5-d1", part="table", seed=0, **changes):
    plain = {
        **{"key": key, "task": key.split("-")[0], "name": key, "part": part, "seed": seed, "ready": True},
        **{"layers": 1, "gru": False, "length": 8, "chance": 0.1, "best_passes": {"2": [0.25, 0.1]}},
        **{"model": {}, "step": 100, "steps": 100, "seconds": 1.0, "solved_in_training": 8, "text": None},
        **{"accuracy_before": 0.25, "solved": 16, "lengths": [8, 16], "accuracy": [1.0, 0.5]},
        **{"passes": {"2": [0.75, 0.5]}, "curve": {"8": 1.0, "16": 0.5}},
    }
    return plain | changes


def test_tables_have_means_spreads_and_every_seed():
    records = [record(), record(seed=1, solved=4, accuracy=[0.8, 0.1], step=200), record("s5-n2", name="N=2")]
    lines = tables_of(records)["table-s5"].splitlines()
    assert len({len(line) for line in lines}) == 1
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert cells[0] == ["model", "solved, of 16", "n=8", "n=16", "steps"]
    assert cells[2] == ["s5-d1", "16, 4", "0.90 ± 0.14", "0.30 ± 0.28", "100, 200"]
    assert cells[3] == ["N=2", "16", "1.00", "0.50", "100"]


def test_ways_are_compared_with_the_row_of_the_table():
    records = [record(), record("s5-d1-k8", "ways", name="K=2..8", solved=2)]
    cells = [[c.strip() for c in line.split("|")[1:-1]] for line in tables_of(records)["ways-s5"].splitlines()]
    assert cells[0][-1] == "K=2"
    assert [row[0] for row in cells[2:]] == ["BPTT, curriculum, window 4", "K=2..8", "at best in so many passes"]
    assert [row[-1] for row in cells[2:]] == ["0.75", "0.75", "0.25"]


def test_converted_models_show_what_they_knew_before():
    records = [record("parity-plain", "convert", ready=False), record("parity-converted", "convert")]
    assert "| before | perplexity on text |" in as_markdown(records)
    assert "| 0.25   |                    |" in as_markdown(records)
    with_text = [record("parity-plain", "convert", text=[4.0, 9.0]), record("parity-plain", "convert", text=[4.0, 7.0])]
    assert "| 4.00 → 8.00 ± 1.41 |" in as_markdown(with_text)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["state", "layers=3"], "layers cannot be set here, because the rows differ in it; train one with crt task."),
        (["state", "--part", "convert"], "Part convert needs a pretrained model; set pretrained=FOLDER."),
        (["state", "text=missing"], "No prepared data exists at missing."),
        (["state", "pretrained=x"], "pretrained= is for --part convert only; leave it out."),
        (
            ["state", "--part", "growth"],
            "state has no part 'growth'; choose one of: headline, table, ways, convert, all.",
        ),
        (["state", "--scale", "paper"], "state has no runs at scale paper"),
        (["state", "--report"], "There is no run of this experiment in"),
    ],
)
def test_bad_input_is_refused(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(not MODEL.is_dir(), reason="the model stories260K is missing")
def test_pretrained_models_are_scored_on_text_before_and_after(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("Once upon a time there was a little girl who liked to play.\n" * 400)
    prepare = [str(tmp_path / "text"), str(tmp_path / "text.txt"), "--val", str(tmp_path / "text.txt")]
    assert main(["data", "prepare", *prepare, "--tokenizer", str(MODEL), "--end-token", "<s>"]) == 0
    words = ["state", "--part", "convert", "--jobs", "1", "--out", str(tmp_path / "out")]
    words += [f"pretrained={MODEL}", f"text={tmp_path / 'text'}"]
    quick = ["length=4", "steps=2", "batch_size=4", "eval_every=2", "eval_tokens=60", "lr=1e-2", "warmup=0"]
    code, out, err = finish("reproduce", *words, *quick)
    assert code == 0, err
    assert "Perplexity on text:" in out
    records = json.loads((tmp_path / "out" / "report.json").read_text())["runs"]
    assert {r["key"].partition("-")[2] for r in records} == {"plain", "converted", "correction"}
    before = {round(r["text"][0], 4) for r in records}
    assert len(before) == 1
    assert all(r["text"][1] != r["text"][0] for r in records)
    # Training on a task costs more on text if all weights change.
    after = {r["key"]: r["text"][1] for r in records}
    assert after["parity-correction"] < after["parity-converted"]
