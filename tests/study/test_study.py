"""The study of training: its rows, real runs of a tiny part of it, and tables that say what the runs gave."""

import importlib.util
import json
import re
import subprocess
import sys
from dataclasses import replace
from math import exp, log
from pathlib import Path

import numpy as np
import pytest
import torch
from train_helpers import make_data

from contextready.cli.main import main
from contextready.model.cost import account
from contextready.runs.checkpoint import open_checkpoint
from contextready.runs.metrics import read_metrics
from contextready.runs.recipes import resolve
from contextready.solve.prefill import prefill
from contextready.solve.unroll import unroll
from contextready.study.results import EVALUATION, TOLERANCES, jobs_of, read_records
from contextready.study.tables import Runs, as_markdown, percent, spread, tables_of
from contextready.study.timing import with_times
from contextready.study.trials import PARTS, SHAPES, WAYS, trials_of
from contextready.train.cost import step_macs

TINY = ["steps=4", "batch_size=2", "block_size=16", "eval_tokens=64", "eval_every=2", "save_every=4"]
TINY += ["precision=fp32", "warmup=1"]


def resolved(trial, out="runs", vocabulary=300):
    words = trial.words(0, out)
    more = ["pretrained=some/model"] if trial.recipe == "convert" else [f"vocab_size={vocabulary}"]
    return resolve(words[0], [*words[1:], *more])


def test_every_row_resolves_and_is_another_run(tmp_path):
    rows = trials_of(PARTS)
    runs = [resolved(trial, tmp_path) for trial in rows]
    same = [replace(run, train=replace(run.train, out="")) for run in runs]
    assert len({str(run.as_dict()) for run in same}) == len(rows) == len({trial.key for trial in rows})


@pytest.mark.parametrize("shape", SHAPES)
def test_the_models_of_a_shape_cost_the_same_per_generated_token(shape, tmp_path):
    rows = {trial.key: resolved(trial, tmp_path, vocabulary=4096) for trial in trials_of(["controls"])}
    ready, plain, wider, bare = (rows[f"{kind}{shape.key}"] for kind in "dnwp")
    cost = account(ready.model).macs
    assert cost == account(plain.model).macs > account(bare.model).macs
    assert account(wider.model).macs == pytest.approx(cost, rel=0.02)
    for other in (plain, bare):
        assert (ready.model.layers, ready.model.width) == (other.model.layers, other.model.width)
    assert (ready.model.layers, ready.model.width) == (shape.layers, shape.width)
    assert wider.model.layers == shape.layers
    for other in (plain, wider, bare):
        changed = {key for key, value in vars(ready.train).items() if getattr(other.train, key) != value}
        assert changed == {"out", "passes", "gradient"}


@pytest.mark.parametrize(("words", "steps"), [([], 2000), (["steps=50"], 50)])
def test_transformers_train_long_enough_to_compare_at_equal_compute(words, steps, tmp_path):
    rows = [trial for trial in trials_of(["controls"]) if trial.shape == SHAPES[0]]
    made = {job.out.name: job for job in jobs_of(rows, [0], tmp_path, ["vocab_size=4096", *words])}
    assert {name: job.steps for name, job in made.items()} == {
        "d1-c128-seed0": steps,
        "n1-c128-seed0": round(1.2 * steps),
        "w1-c128-seed0": round(1.2 * steps),
        "p1-c128-seed0": round(1.3 * steps),
    }
    spent = {}
    for name, job in made.items():
        run = resolve(job.words[1], job.words[2:])
        assert run.train.steps == job.steps
        spent[name] = job.steps * step_macs(account(run.model), run.train)
    assert min(spent, key=spent.__getitem__) == "d1-c128-seed0"


def test_the_recipe_is_what_crt_train_does_without_settings(tmp_path):
    ours = resolved(trials_of(["headline"])[0], tmp_path)
    default = resolve("mini-d1", ["vocab_size=300", f"out={ours.train.out}"])
    assert ours == default
    paper = {trial.key: resolved(trial, tmp_path) for trial in trials_of(["ways"])}["d1-c128-paper"]
    assert (paper.train.gradient, paper.train.passes) == ("unroll", "2..5")
    assert (paper.model.correction_init, paper.model.correction_scale) == ("random", 1.0)
    assert len(trials_of(["ways"])) == 2 * len(SHAPES) + sum(len(way.shapes) for way in WAYS.values())


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Run the headline with two seeds, in processes of their own."""
    folder = tmp_path_factory.mktemp("study")
    data, out = make_data(folder / "corpus"), folder / "runs"
    words = [sys.executable, "-m", "contextready", "reproduce", "training", "--out", str(out), "--seeds", "0,1"]
    done = subprocess.run([*words, *TINY, f"data={data}"], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return out, data, done.stdout


def test_the_runs_are_trained_evaluated_and_reported(made):
    out, _, said = made
    assert "4 of 4 runs are still to train" in said
    newest = read_metrics(out / "d1-c128-seed1")[-1]
    assert f"D=1 C=128, seed 1: validation perplexity {exp(newest['val_loss']):.2f} after 4 steps" in said
    assert (out / "report.md").read_text().strip() in said
    assert re.search(r"^\| D=1 C=128 \| 2 +\|", said, flags=re.MULTILINE)
    assert (out / "compute.png").read_bytes().startswith(b"\x89PNG")
    records = json.loads((out / "report.json").read_text())["runs"]
    assert {(r["key"], r["seed"]) for r in records} == {(k, s) for k in ("d1-c128", "n1-c128") for s in (0, 1)}
    for record in records:
        curve = read_metrics(out / f"{record['key']}-seed{record['seed']}")
        losses = [r["val_loss"] for r in curve if r.get("val_loss") is not None]
        assert record["curve"]["val_loss"] == losses
        assert len(losses) == (3 if record["key"] == "d1-c128" else 4)
        assert str(out) not in json.dumps(record)
        assert (record["evaluation"]["sequential"] is None) == (record["key"] == "n1-c128")


def test_nothing_is_trained_or_evaluated_twice(made, capsys):
    out, data, _ = made
    before = (out / "d1-c128-seed0" / EVALUATION).stat().st_mtime_ns
    assert jobs_of(trials_of(["headline"]), [0, 1], out, [*TINY, f"data={data}"]) == []
    assert len(jobs_of(trials_of(["headline"]), [0, 2], out, [*TINY, f"data={data}"])) == 2
    assert main(["reproduce", "training", "--report", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "Evaluating" not in said
    assert (out / "report.md").read_text().strip() in said
    assert (out / "d1-c128-seed0" / EVALUATION).stat().st_mtime_ns == before


def test_prompts_are_read_with_every_solver_and_their_errors_are_true(made):
    out, data, _ = made
    records = read_records(trials_of(["headline"]), out)
    assert [r["evaluation"]["prompts"] for r in records if r["key"] == "n1-c128"] == [None, None]
    (found,) = [r["evaluation"]["prompts"] for r in records if (r["key"], r["seed"]) == ("d1-c128", 0)]
    model = open_checkpoint(out / "d1-c128-seed0").model().eval()
    ids = np.fromfile(data / "val-00000.bin", "<u2").astype("int64")[: 16 * 16].reshape(16, 16)
    rows = [torch.from_numpy(row[None]) for row in ids]
    with torch.no_grad():
        exact = [model.read(model.backbone.embed(row), model.init_state(1))[0] for row in rows]
    for tolerance in TOLERANCES:
        with torch.no_grad():
            solved = [unroll(model, row, tolerance=tolerance)[0] for row in rows]
        errors = [float((z - e).norm(dim=-1).div(e.norm(dim=-1)).max()) for z, e in zip(solved, exact, strict=True)]
        assert found["jacobi"][f"{tolerance:g}"]["error"] == pytest.approx(np.mean(errors), rel=1e-2, abs=1e-6)
        reader = {"solver": "jacobi", "tolerance": tolerance, "bf16_passes": "off"}
        costs = [prefill(model, row, **reader).info.cost for row in rows]
        assert found["jacobi"][f"{tolerance:g}"]["cost"] == pytest.approx(np.mean(costs))
        # A prompt of one segment is read one token at a time.
        assert found["sweep"][f"{tolerance:g}"]["error"] == pytest.approx(0.0, abs=1e-6)


def test_a_part_that_needs_a_pretrained_model_says_so(tmp_path, capsys):
    assert main(["reproduce", "training", "--part", "conversion", "--out", str(tmp_path / "runs")]) == 2
    assert "pretrained" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--part", "tables"], "training has no part 'tables'; choose one of: headline, compute"),
        (["--scale", "paper"], "training has no runs at scale paper"),
        (["width=64"], "width cannot be set here, because the rows differ in it; train one row with crt train"),
        (["passes=3"], "passes cannot be set here"),
        (["--report"], "There is no run of this experiment"),
    ],
)
def test_bad_input_is_one_sentence(words, message, tmp_path, capsys):
    assert main(["reproduce", "training", "--out", str(tmp_path / "runs"), *words]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


MODEL = {"vocab_size": 8, "width": 4, "layers": 1, "heads": 2}


def record(key, seed, perplexities, macs, streamed=100.0, **more):
    """A made-up run with a curve of one validation per step."""
    steps = list(range(len(perplexities)))
    evaluation = {
        "sequential": {"perplexity": streamed},
        "parallel": {"10": {"perplexity": 100.0}},
        "norm_rate": 0.5,
        "prompts": {
            solver: {f"{tolerance:g}": {"cost": 2.0, "error": 0.5} for tolerance in TOLERANCES}
            for solver in ("jacobi", "sweep")
        },
    }
    curve = {
        "step": steps,
        "tokens": [100 * step for step in steps],
        "macs": [macs * step for step in steps],
        "val_loss": [log(p) for p in perplexities],
    }
    model = {"pretrained": "base"} if key.startswith("convert") else MODEL
    return {"key": key, "seed": seed, "model": model, "curve": curve, "evaluation": evaluation} | more


def test_comparisons_are_at_equal_tokens_and_at_equal_compute():
    """A step of the first model costs twice as much, so at equal compute it has made half as many."""
    records = [
        record("d1-c128", 0, [400, 200, 100], macs=2, streamed=101.0),
        record("n1-c128", 0, [400, 300, 200, 150, 80], macs=1),
        record("d1-c128", 1, [400, 200, 110], macs=2, streamed=99.0),
        record("n1-c128", 1, [400, 300, 200, 150, 100], macs=1),
    ]
    ready, plain = Runs(records, "d1-c128"), Runs(records, "n1-c128")
    assert ready.against(plain, "tokens") == pytest.approx([-50.0, -45.0])
    assert ready.against(plain, "macs") == pytest.approx([25.0, 10.0])
    assert ready.streamed() == pytest.approx([1.0, -1.0])
    table = tables_of(records)["compute"]
    cells = [cell.strip() for cell in table.splitlines()[2].split("|")[1:-1]]
    assert cells == ["D=1 C=128", "2", "2.00 ×", "105.0 ± 7.1", "-47.5 ± 3.5 %", "+17.5 ± 10.6 %", "+0.000 ± 1.414 %"]


def test_tables_without_runs_are_left_out():
    assert tables_of([]) == {}
    assert tables_of([record("d1-c128", 0, [4, 3], macs=1)]) == {}
    assert "Equal training compute" not in as_markdown([])


def test_a_single_seed_has_no_spread():
    assert (spread([2.0]), spread([1.0, 3.0]), spread([])) == ("2.0", "2.0 ± 1.4", "")
    assert (percent([1.25]), percent([])) == ("+1.2 %", "")


def test_every_table_shows_its_rows():
    rows = trials_of(PARTS)
    records = [record(trial.key, seed, [9, 8, 7], macs=1) for trial in rows for seed in (0, 1)]
    tables = tables_of(records)
    assert set(tables) == set(PARTS) - {"headline"} | {"prompts"}
    for trial in rows:
        if trial.part not in ("compute",):
            assert trial.name in tables[trial.part]


def test_conversions_are_compared_with_the_same_model_trained_further():
    """The control makes more steps; its own row shows the step at which the others end."""
    small, large = {"pretrained": "small"}, {"pretrained": "large"}
    records = [
        record("convert-continued", 0, [100, 90, 80, 70, 60, 50], macs=1, model=small),
        record("convert-add", 0, [100, 95, 90, 80, 66], macs=1.25, model=small),
        record("convert-add", 0, [9, 8, 7, 6, 5], macs=1, model=large),
    ]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in tables_of(records)["conversion"].splitlines()]
    assert lines[2][:5] == ["small", "trained further, no correction", "1", "100.000", "60.000"]
    assert lines[3][:7] == ["small", "add", "1", "100.000", "66.000", "+10.00 %", "+32.00 %"]
    assert lines[4][:7] == ["large", "add", "1", "9.000", "5.000", "", ""]


def test_times_follow_the_stages_of_the_recipe_and_give_a_column():
    """K=1 takes 1 s, K=2 takes 2 s and K=3 takes 4 s; the transformer takes 1.5 s."""
    train = {"passes": "1@0.5,2..3@0.5", "steps": 4}
    records = [record("d1-c128", 0, [90, 80, 70, 60, 50], macs=1, train=train)]
    records += [record(f"{kind}1-c128", 0, [95, 85, 75, 65, 55, 45], macs=1, train={}) for kind in "nwp"]
    records += [record("d1-c256", 0, [9, 8], macs=1, train=train)]
    seconds = {"1": 1.0, "2": 2.0, "3": 4.0, "n": 1.5, "w": 2.0, "p": 1.0}
    ready, plain, *_, other = with_times(records, [{"shape": "1-c128", "seconds": seconds}])
    assert ready["curve"]["seconds"] == [0.0, 1.0, 2.0, 5.0, 8.0]
    assert plain["curve"]["seconds"] == [0.0, 1.5, 3.0, 4.5, 6.0, 7.5]
    assert "seconds" not in other["curve"]
    table = tables_of(with_times(records, [{"shape": "1-c128", "seconds": seconds}]))["controls"]
    assert "time of a step" in table
    assert "time of a step" not in tables_of(records)["controls"]
    cells = [cell.strip() for cell in table.splitlines()[2].split("|")[1:-1]]
    # After 7.5 seconds the first model is at 50 to the power 5/6 times 60 to the power 1/6.
    at = exp((5 * log(50) + log(60)) / 6)
    assert cells[-2:] == ["1.33 ×", percent([100 * (at / 45 - 1)])]


def test_new_runs_are_added_to_the_committed_ones(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("results", Path(__file__).parents[2] / "tools" / "results.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    monkeypatch.setattr(tool, "SOURCE", tmp_path / "training.json")
    old = [record("d1-c128", 0, [3, 2], macs=1), record("d1-c128", 1, [4, 3], macs=1)]
    (tmp_path / "training.json").write_text(json.dumps({"runs": old}))
    new = [record("d1-c128", 1, [5, 4], macs=1), record("convert-add", 1, [6, 5], macs=1)]
    (tmp_path / "report.json").write_text(json.dumps({"runs": new}))
    tool.add_runs(tmp_path / "report.json")
    found = json.loads((tmp_path / "training.json").read_text())["runs"]
    assert [(r["key"], r["seed"]) for r in found] == [("convert-add", 1), ("d1-c128", 0), ("d1-c128", 1)]
    assert found[2]["curve"] == new[0]["curve"]
