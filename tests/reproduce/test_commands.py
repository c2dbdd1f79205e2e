"""`crt reproduce TABLE` for real, on a tiny corpus and a few steps: trained, resumed, reported, drawn, interrupted."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from math import exp

import pytest
from train_helpers import make_data

from contextready.cli.main import main
from contextready.reproduce.lines import MINIATURES
from contextready.reproduce.plots import draw_tables
from contextready.reproduce.records import read_records
from contextready.runs.metrics import read_metrics
from contextready.train.jobs import Job, run_jobs

from .test_ledger import made_up

TINY = ["steps=4", "eval_tokens=256", "eval_every=2", "save_every=2", "precision=fp32", "warmup=1"]


def command(out, data, *words, table="k_min", settings=TINY):
    words = ["reproduce", table, "--out", str(out), f"data={data}", *settings, *words]
    return [sys.executable, "-m", "contextready", *words]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("corpus"))


def test_a_table_from_training_to_the_ledger(data, tmp_path, capsys):
    """One test, because each part needs the runs of the one before."""
    out = tmp_path / "runs"
    done = subprocess.run(
        command(out, data, "--seeds", "0,1", "--jobs", "2"), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    check_report(out, done.stdout)
    check_second_call(out, data, capsys)
    settings = ["steps=8" if word == "steps=4" else word for word in TINY]
    assert main(command(out, data, settings=[*settings, "lr=0.5"])[3:]) == 2
    assert re.search(r"was trained with lr=0\.002, not lr=0\.5", capsys.readouterr().err)
    # Another seed shares the table.
    assert main(command(out, data, "--seeds", "2", settings=[*TINY, "lr=0.5"])[3:]) == 2
    assert re.search(r"seed[01] was trained with lr=0\.002, not lr=0\.5", capsys.readouterr().err)


def check_report(out, said):
    assert "6 of 6 runs are still to train, 2 at a time" in said
    assert "6 of 6" in said
    assert "about 0 min left" in said
    found = json.loads((out / "results.json").read_text())["runs"]
    assert [(r["key"], r["seed"]) for r in found] == [
        (key, seed) for key in ("d1-c50-k10", "d1-c50-k10-term", "d1-c50-k2-10") for seed in (0, 1)
    ]
    for record in found:
        curve = [r for r in read_metrics(out / f"{record['key']}-seed{record['seed']}") if r.get("val_loss")]
        assert record["curve"]["val_loss"] == [r["val_loss"] for r in curve]
        assert record["passes"] == 10
        assert str(out) not in json.dumps(record)
    ten = [record["evaluation"]["parallel"]["10"]["perplexity"] for record in found if record["key"] == "d1-c50-k10"]
    mean = sum(ten) / 2
    assert re.search(rf"\| PPL at K=10 +\| \S+ ± \S+ +\| {mean:.2f} ± ", said)
    assert "| *Seq K = 1*        | 84.61" in said
    assert (out / "table-k_min.png").read_bytes().startswith(b"\x89PNG")
    assert "table-k_min.svg" in {path.name for path in out.iterdir()}
    assert (out / "report.md").read_text().startswith("### k_min (Table A5)")
    last = read_metrics(out / "d1-c50-k10-seed1")[-1]
    assert exp(last["val_loss"]) == pytest.approx(ten[1], rel=0.05)


def check_second_call(out, data, capsys):
    """It trains nothing, and the ledger reads the folder."""
    stamp = (out / "d1-c50-k10-seed0" / "record.json").stat().st_mtime_ns
    words = command(out, data, "--seeds", "0,1")[3:]
    assert main(words) == 0
    assert "0 of 6 runs are still to train" in capsys.readouterr().out
    assert (out / "d1-c50-k10-seed0" / "record.json").stat().st_mtime_ns == stamp
    assert main(["reproduce", "k_min", "--report", "--out", str(out)]) == 0
    assert "PPL streamed" in capsys.readouterr().out
    assert main(["reproduce", "ledger", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    (row,) = re.findall(r"^\| k-min .*", said, flags=re.MULTILINE)
    assert "| 2 " in row
    assert row.rstrip(" |").endswith("°")
    assert "## " not in said
    assert "**k-min**" in (out / "ledger.md").read_text()
    assert main(["reproduce", "ledger", "--results", str(out / "results.json")]) == 0
    assert row in capsys.readouterr().out


def test_dry_runs_train_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", "fine-tuning", "--dry-run", "--jobs", "2"]) == 0
    said = capsys.readouterr().out
    assert "6 of 6 runs are still to train" in said
    assert re.search(r"About \d+ minutes with 2 at a time", said)
    assert main(["reproduce", "efficiency", "--scale", "paper", "--dry-run"]) == 0
    assert re.search(r"About 2\.4 days of one A100", capsys.readouterr().out)
    assert main(["reproduce", "all", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "73 of 73 runs" in said
    assert "timing" in said
    assert "masked N=6" in said
    assert list(tmp_path.iterdir()) == []
    assert main(["plan", "paper", "--gpus", "8"]) == 0
    assert re.search(r"83 runs.*16\.7 GPU days.*2\.1 days on 8 GPUs", capsys.readouterr().out)
    assert main(["plan", "paper", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gpu_days"] == pytest.approx(16.75, abs=0.05)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["kmin"], "Unknown experiment 'kmin'; did you mean 'k_min'?"),
        (["hyperparameters"], "has settings, not results"),
        (["pointer-wave"], "crt reproduce pointer draws it"),
        (["k_min", "--seeds", "a"], "--seeds a is not a list of numbers"),
        (["k_min", "--part", "table"], "k_min has no parts"),
        (["k_min", "width=3"], "width cannot be set here, because the rows differ in it"),
        (["k_min"], "Prepare it with: crt data prepare data/small default --vocab-size 1024"),
        (["efficiency", "--scale", "paper"], "Prepare it with: crt data prepare data/owt32k openwebtext"),
        (["k_min", "--results", "x.json"], "--results is for crt reproduce ledger"),
        (["ledger", "--seeds", "1"], "ledger trains nothing; leave --seeds out"),
        (["ledger", "--scale", "paper"], "leave --scale out"),
        (["ledger", "--results", "a", "--out", "b"], "--out does not apply"),
        (["all", "--report"], "crt reproduce ledger reports everything"),
        (["timing", "steps=3"], "neither settings nor seeds"),
        (["timing", "--scale", "paper"], "timing has no runs at scale paper"),
        (["k_min", "--report", "--dry-run"], "leave --dry-run out"),
    ],
)
def test_bad_input_is_one_sentence(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", *words]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_every_table_is_drawn(tmp_path):
    drawn = draw_tables(list(MINIATURES), made_up(0.96), tmp_path)
    assert [path.stem for path in drawn] == [f"table-{name}" for name in MINIATURES]
    assert all(path.stat().st_size > 10_000 for path in drawn)
    assert draw_tables(["main"], [], tmp_path / "none") == []


def test_jobs_wait_for_the_run_that_they_start_from(tmp_path):
    """The last two need the first one, which takes longest; the second one may run at once."""
    order = []
    first, free, after = (tmp_path / name for name in ("first", "free", "after"))
    jobs = [
        Job("after", after, ("info", "--table"), 1, first),
        Job("first", first, ("exact", "--tokens", "64"), 1),
        Job("free", free, ("info", "--table"), 1, tmp_path / "elsewhere"),
    ]
    assert run_jobs(jobs, 3, lambda running, done: None, lambda job: order.append(job.name)) is None
    assert order.index("first") < order.index("after")
    assert set(order) == {"first", "free", "after"}


PARENT = """
import sys
from pathlib import Path
from contextready.train.jobs import Job, run_jobs
run_jobs([Job("run", Path(sys.argv[1]), tuple(sys.argv[2:]), 1)], 1, lambda running, done: None, print)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent was killed")
def test_jobs_save_and_end_if_the_command_is_killed(data, tmp_path):
    out = tmp_path / "run"
    settings = ["width=16", "heads=2", "block_size=16", "batch_size=2", "steps=100000", "eval_tokens=64"]
    words = ["train", "mini-d1", f"data={data}", f"out={out}", *settings, "save_every=50000"]
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(out), *words])
    try:
        _wait(lambda: (out / "metrics.jsonl").is_file() and len(read_metrics(out)) > 3)
        parent.kill()
        parent.wait()
        _wait(lambda: list(out.glob("checkpoints/step-*")))
        _wait(lambda: "Interrupted by SIGTERM" in (out / "console.txt").read_text())
    finally:
        parent.kill()


def _wait(done, seconds=60):
    for _ in range(seconds * 10):
        if done():
            return
        time.sleep(0.1)
    raise AssertionError("it did not happen")


@pytest.mark.slow
def test_three_kills_do_not_change_the_result(data, tmp_path):
    """With SIGKILL at random moments; the jobs of a killed command may still be saving when it is called again."""
    settings = ["steps=60" if word == "steps=4" else word for word in TINY]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    subprocess.run(command(whole, data, "--jobs", "2", settings=settings), check=True, capture_output=True)
    chooser, kills = random.Random(0), 0
    while kills < 3:
        process = subprocess.Popen(
            command(killed, data, "--jobs", "2", settings=settings), stdout=subprocess.DEVNULL, start_new_session=True
        )
        time.sleep(chooser.uniform(6, 12))
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        process.wait()
    subprocess.run(command(killed, data, "--jobs", "2", settings=settings), check=True, capture_output=True)
    assert (killed / "results.json").read_bytes() == (whole / "results.json").read_bytes()
    assert len(read_records(killed)) == 3
