"""`crt reproduce pointer`: its rows match the paper and the miniature; real runs resume, fail and are reported."""

import io
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from contextready.cli.main import main
from contextready.cli.reproduce import EXPERIMENTS, Overview
from contextready.errors import ContextReadyError
from contextready.pointer.outcome import outcome, resolve_pointer
from contextready.pointer.report import as_markdown, draw_report
from contextready.pointer.results import jobs_of, results_of
from contextready.pointer.score import score_levels, score_passes
from contextready.pointer.trials import PARTS, PASSES, trials_of
from contextready.runs.checkpoint import newest_checkpoint, open_checkpoint
from contextready.train.jobs import LOG, Job, run_jobs
from contextready.train.trials import aligned, with_changes

TINY = ["width=16", "heads=2", "batch_size=4", "values=3", "eval_every=2", "eval_tokens=200"]


def test_the_rows_of_the_miniature():
    table = trials_of("cpu", ["table"])
    assert [trial.key for trial in table[:2]] == ["masked-d1", "masked-n2"]
    assert {(trial.answers, trial.name) for trial in table} == {
        (answers, name) for answers in ("masked", "visible") for name in ("D=1 BPTT", *(f"N={n}" for n in range(1, 7)))
    }
    for trial in table:
        run = resolve_pointer(trial.words(3, Path("runs/x")))
        assert (run.task.hops, run.task.keys, run.model.width, run.model.window) == (4, 3, 64, 26)
        assert run.task.answers == trial.answers
        assert run.model.layers == trial.layers
        assert (run.model.correction is not None) == trial.ready
        assert (run.train.seed, run.train.out) == (3, f"runs/x/{trial.key}-seed3")
    # All other settings are the same for all rows.
    runs = [resolve_pointer(trial.words(0, Path("runs"))).train for trial in table]
    same = {"out": "x", "gradient": "unroll", "passes": "1", "eval_every": 100}
    assert len({replace(t, **same) for t in runs}) == 1
    assert {(t.gradient, t.eval_every) for t in runs} == {("bptt", 50), ("unroll", 100)}
    assert {t.precision for t in runs} == {"fp32"}


def test_the_rows_of_the_other_parts():
    assert [trial.key for trial in trials_of("cpu", ["headline"])] == ["masked-d1", "masked-n2"]
    growth = [resolve_pointer(trial.words(0, Path("x"))).task.hops for trial in trials_of("cpu", ["growth"])]
    assert growth == [4, 8, 12]
    parallel = [resolve_pointer(trial.words(0, Path("x"))).train for trial in trials_of("cpu", ["parallel"])]
    assert {t.batch_size for t in parallel} == {32}
    assert [(t.gradient, t.passes) for t in parallel] == [
        ("bptt", None),
        *(("unroll", f"{k}") for k in PASSES),
        *(("unroll", f"2..{k}") for k in PASSES[1:]),
        ("implicit", "20"),
    ]
    everything = trials_of("cpu", PARTS)
    assert len({trial.key for trial in everything}) == len(everything) == 14 + 3 + 2 + 9


def test_the_rows_in_the_authors_layout():
    rows = trials_of("cpu", ["layout"])
    assert [trial.key for trial in rows] == ["absent-d1", "absent-n2", "absent-n4"]
    masked = {trial.key.removeprefix("masked-"): trial for trial in trials_of("cpu", ["table"])}
    for trial in rows:
        run = resolve_pointer(trial.words(0, Path("runs")))
        assert (run.task.answers, run.task.hops, run.task.levels, run.model.window) == ("absent", 4, 6, 26)
        # Only the layout and the number of steps differ from the main table.
        other = resolve_pointer(masked[trial.key.removeprefix("absent-")].words(0, Path("runs")))
        same = {key: getattr(run.train, key) for key in ("block_size", "eval_tokens", "steps", "out")}
        assert (replace(other.train, **same), other.model) == (run.train, run.model)
        assert run.train.steps == 6000
    # At the paper's scale, the main table has this layout.
    paper = trials_of("paper", ["layout"])
    assert {trial.key for trial in paper} == {"absent-d1", *(f"absent-n{n}" for n in (1, 3, 5, 10, 11, 12))}
    assert {trial.part for trial in paper} == {"table"}


def test_the_rows_at_the_papers_scale():
    table = trials_of("paper", ["table"])
    depths = {trial.layers for trial in table if not trial.ready}
    assert depths == {1, 3, 5, 10, 11, 12}
    assert [trial.key for trial in trials_of("paper", ["headline"])] == ["absent-d1", "absent-n3"]
    for trial in table:
        run = resolve_pointer(trial.words(0, Path("runs")))
        assert (run.task.answers, run.task.hops) in (("absent", 9), ("visible", 10))
        assert (run.model.window, run.task.levels) == (38, 11)
    growth = [resolve_pointer(trial.words(0, Path("runs"))) for trial in trials_of("paper", ["growth"])]
    assert [(run.train.block_size, run.model.window) for run in growth] == [(272, 38), (522, 52), (502, None)]
    for trial in trials_of("paper", PARTS):
        run = resolve_pointer(trial.words(0, Path("runs")))
        assert run.train.steps == 50_000
        assert run.train.precision == "fp32"
    # Parallel training is compared with a run of the table, not with a second run of the same settings.
    parallel = [trial.key for trial in trials_of("paper", ["parallel"])]
    assert parallel[0] == "absent-d1"
    assert "parallel-bptt" not in parallel
    words = [" ".join(trial.words(0, Path("x"))[:-1]) for trial in trials_of("paper", PARTS)]
    assert len(set(words)) == len(words)
    with pytest.raises(ContextReadyError, match="Unknown scale 'gpu'; did you mean 'cpu'"):
        trials_of("gpu", ["table"])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Train the headline in two processes, at a size even smaller than the miniature."""
    out = tmp_path_factory.mktemp("headline") / "runs"
    words = [sys.executable, "-m", "contextready", "reproduce", "pointer", "--part", "headline", "--out", str(out)]
    done = subprocess.run([*words, *TINY, "steps=4"], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return out, done.stdout


def test_the_runs_are_trained_and_reported(made):
    out, said = made
    assert "2 of 2 runs are still to train" in said
    assert "masked D=1 BPTT, seed 0: 0 of 5 levels solved after all 4 steps" in said
    report = (out / "report.md").read_text()
    assert report.strip() in said
    rows = re.findall(r"^\| (N=2|D=1 BPTT) +\| (\S+) of 5 +\| 4 +\|", report, flags=re.MULTILINE)
    assert rows == [("N=2", "0"), ("D=1 BPTT", "0")]
    assert "| 1.00 1.00 0.56 0.33 0.33 |" in report  # what two layers of window 26 allow with three values
    record = json.loads((out / "report.json").read_text())
    found = {trial["name"]: trial for trial in record}
    assert found["N=2"]["seeds"]["0"]["accuracy"] == outcome(out / "masked-n2-seed0").accuracy
    assert found["D=1 BPTT"]["window_allows"] is None
    assert (found["N=2"]["part"], found["N=2"]["seeds"]["0"]["solved_at"]) == ("table", [None] * 5)
    for name in ("staircase", "wave"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (out / f"{name}.svg").read_text()


def test_the_authors_layout_is_trained_and_reported(tmp_path):
    rows = [trial for trial in trials_of("cpu", ["layout"]) if trial.key != "absent-n4"]
    for job in jobs_of(rows, [0], tmp_path, [*TINY, "steps=2"]):
        assert main(list(job.words)) == 0
    results = results_of(rows, tmp_path)
    report = as_markdown(results, tmp_path)
    assert "Answers absent (the last level is the final query, which repeats the level before):" in report
    assert re.findall(r"^\| (N=2|D=1 BPTT) +\| \S+ of 6 ", report, flags=re.MULTILINE) == ["N=2", "D=1 BPTT"]
    assert "| 1.00 1.00 1.00 0.33 0.33 0.33 |" in report  # what two layers of window 26 allow with three values
    assert {path.name for path in draw_report(results, tmp_path)} == {"wave-layout.png", "wave-layout.svg"}


def test_finished_runs_are_not_repeated_and_more_steps_resume_them(made, capsys):
    out, _ = made
    before = (out / "masked-n2-seed0" / "metrics.jsonl").read_text()
    words = ["reproduce", "pointer", "--part", "headline", "--out", str(out), *TINY]
    assert main([*words, "steps=4"]) == 0
    assert "0 of 2 runs are still to train" in capsys.readouterr().out
    assert (out / "masked-n2-seed0" / "metrics.jsonl").read_text() == before
    rows = trials_of("cpu", ["headline"])
    assert jobs_of(rows, [0], out, [*TINY, "steps=4"]) == []
    assert len(jobs_of(rows, [0, 1], out, [*TINY, "steps=4"])) == 2
    assert len(jobs_of(rows, [0], out, [*TINY, "steps=6"])) == 2
    assert main([*words, "steps=6"]) == 0
    assert outcome(out / "masked-n2-seed0").step == 6
    said = capsys.readouterr().out
    # The report of the folder alone is the same, whatever options the runs were trained with.
    assert main(["reproduce", "pointer", "--out", str(out), "--report"]) == 0
    assert capsys.readouterr().out.strip() in said


def test_runs_with_other_settings_are_not_reused(made):
    """Other seeds must match too, because rows that share a table have the same settings."""
    out, _ = made
    rows = trials_of("cpu", ["headline"])
    for seed in (0, 1):
        with pytest.raises(ContextReadyError, match=r"masked-d1-seed0 was trained with lr=0.001, not lr=0.5"):
            jobs_of(rows, [seed], out, [*TINY, "steps=4", "lr=0.5"])
    assert results_of(rows, out)[0].config.train.lr == 0.001


def test_other_parts_stay_in_the_report(made, tmp_path, capsys):
    out = tmp_path / "runs"
    shutil.copytree(made[0], out)
    shutil.copytree(out / "masked-d1-seed0", out / "growth-h-8-seed5")
    shutil.rmtree(out / "masked-n2-seed0")
    assert main(["reproduce", "pointer", "--out", str(out), "--report"]) == 0
    report = capsys.readouterr().out
    masked, growth = report.split("More hops:")
    assert "N=2" not in masked
    assert "| D=1 BPTT |" in masked
    assert "| D=1 BPTT      |" in growth
    assert "| D=1 BPTT, H=8 |" in growth
    assert (out / "wave-growth.png").exists()


def test_a_run_that_has_just_started_is_no_problem(made, tmp_path):
    """Its metrics file exists but is empty until the first validation ends."""
    out = tmp_path / "runs"
    shutil.copytree(made[0], out)
    (out / "masked-d1-seed0" / "metrics.jsonl").write_text("")
    rows = trials_of("cpu", ["headline"])
    jobs = jobs_of(rows, [0], out, [*TINY, "steps=4"])
    assert [job.out.name for job in jobs] == ["masked-d1-seed0"]
    assert [result.trial.key for result in results_of(rows, out)] == ["masked-n2"]
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, color_system=None, width=100)
    running = [*jobs, jobs[0]._replace(name="the other", out=out / "masked-n2-seed0")]
    with Overview(console, EXPERIMENTS["pointer"], running) as overview:
        overview.show(running, done=0)
    shown = screen.getvalue()
    assert "0 of 2 runs done" in shown
    assert re.search(r"the other .*0\.\d\d.* step \d of 4", shown)
    assert "masked D=1" not in shown


def test_stopping_saves_and_the_same_command_resumes(tmp_path):
    out = tmp_path / "runs"
    words = [sys.executable, "-m", "contextready", "reproduce", "pointer", "--part", "headline", "--out", str(out)]
    words += [*TINY, "steps=100000", "save_every=100000"]
    folders = [out / f"masked-{kind}-seed0" for kind in ("d1", "n2")]
    reached = [0, 0]
    for times in (1, 2):
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        limit = time.monotonic() + 200
        while not all((found := outcome(f)) and found.step >= r + 4 for f, r in zip(folders, reached, strict=True)):
            assert time.monotonic() < limit
            assert process.poll() is None, process.stdout.read()
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=100)
        assert process.returncode == 128 + signal.SIGINT, said
        assert "Stopped. Run the same command again to resume." in said
        assert re.search(r"N=2 +\| \d\* of 5", said)
        for i, folder in enumerate(folders):
            newest = open_checkpoint(folder).progress.step
            assert newest >= reached[i] + 4
            log = (folder / LOG).read_text()
            assert log.count("SIGTERM at step") == times
            assert ("resuming from step" in log) == (times == 2)
            reached[i] = newest


def test_a_run_that_fails_is_reported_in_one_sentence(made, tmp_path, capsys):
    out = tmp_path / "runs"
    shutil.copytree(made[0], out)
    for folder in ("masked-d1-seed0", "masked-n2-seed0"):
        weights = newest_checkpoint(out / folder) / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\0")
    assert main(["reproduce", "pointer", "--part", "headline", "--out", str(out), *TINY, "steps=100"]) == 2
    said = capsys.readouterr().err
    assert re.match(r"crt reproduce: masked \S+.* failed: crt pointer: .*model.safetensors.* damaged", said)
    assert LOG in said


def test_a_command_that_cannot_run_is_reported_too(tmp_path):
    seen = []
    job = Job("bad", tmp_path / "bad", ("no-such-verb",), 1)
    with pytest.raises(ContextReadyError, match="bad failed: crt: error: argument VERB: invalid choice"):
        run_jobs([job], 2, lambda running, done: seen.append((len(running), done)), seen.append)
    assert seen[0] == (1, 0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seeds", "0,x"], "--seeds 0,x is not a list of numbers"),
        (["--seeds", "1,1"], "--seeds must be different numbers that are at least 0, but got 1,1"),
        (["--seeds", ""], "--seeds  is not a list of numbers"),
        (["--jobs", "0"], "--jobs must be at least 1, but got 0"),
        (["out=here"], "out cannot be set here, because the rows differ in it"),
        (["layers=3"], "layers cannot be set here"),
        (["--part", "growth", "hops=6"], "hops cannot be set here"),
        (["--part", "parallel", "passes=2..5"], "passes cannot be set here"),
        (["--report", "steps=3"], "leave steps=3 out"),
        (["--report", "--part", "growth"], "leave --part out"),
        (["hopps=3"], "did you mean 'hops'?"),
        (["--report"], "There is no run of this experiment"),
    ],
)
def test_bad_input_is_rejected_in_a_sentence(tmp_path, words, message, capsys):
    assert main(["reproduce", "pointer", "--out", str(tmp_path / "runs"), *words]) == 2
    assert message in capsys.readouterr().err


def test_changes_replace_the_settings_of_a_row():
    assert with_changes(("a=1", "b=2"), ["b=3", "c=4"]) == ("a=1", "b=3", "c=4")


def test_tables_are_markdown_and_aligned():
    assert aligned([["a", "bb"], ["ccc", "d"]]) == "| a   | bb |\n|-----|----|\n| ccc | d  |"


def test_parallel_rows_are_also_scored_in_their_own_passes(tmp_path):
    """Each seed is scored in every number of passes, and all figures of one seed come from that seed."""
    rows = [trial for trial in trials_of("cpu", ["parallel"]) if trial.key == "parallel-k2"]
    # Two steps this large give a model whose answers differ for every number of passes.
    changes = [*TINY, "steps=2", "lr=0.1", "warmup=1"]
    assert results_of(rows, tmp_path) == []
    jobs = jobs_of(rows, [0, 1, 2], tmp_path, changes)
    for job in jobs:
        assert main(list(job.words)) == 0
    (result,) = results_of(rows, tmp_path)
    # These values make the second seed the median, whatever the models have learned.
    results = [replace(result, outcomes={s: o._replace(levels_solved=3 - s) for s, o in result.outcomes.items()})]
    lines = re.findall(r"^\| D=1, K=2 passes .*$", as_markdown(results, tmp_path), flags=re.MULTILINE)
    first, second = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    streamed, in_passes, allowed = (cell.split() for cell in first[4:])
    assert streamed == [f"{part:.2f}" for part in outcome(jobs[1].out).accuracy]
    task, read = result.config.task, []
    for seed, job in enumerate(jobs):
        checkpoint = open_checkpoint(job.out)
        batch = task.batch("test", seed, 2 * checkpoint.progress.step + 2, 500)
        scores = score_passes(checkpoint.model(), task, batch, [2, 5, 10, 20])
        read.append([*scores.values(), score_levels(checkpoint.model(), task, batch)])
    assert in_passes == [f"{part:.2f}" for part in read[1][0].accuracy]
    assert allowed == ["1.00", "1.00", "0.78", "0.33", "0.33"]
    means = [[f"{sum(score.accuracy) / 5:.2f}" for score in scores] for scores in read]
    assert all(len(set(of_seed)) > 3 for of_seed in means)
    assert second[1:] == [", ".join(of_passes) for of_passes in zip(*means, strict=True)]
    for job in jobs:
        shutil.rmtree(job.out / "checkpoints")
    assert "| 1.00 1.00 0.78 0.33 0.33 |" in as_markdown(results, tmp_path)
