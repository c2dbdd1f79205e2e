"""The runs of the miniature and of the paper's scale: what they cost, and that they cover the tables."""

import re
from dataclasses import replace

import pytest

from contextready.cli.reproduce import ELSEWHERE, EXPERIMENTS, TABLES
from contextready.errors import ContextReadyError
from contextready.model.cost import account
from contextready.paper.tables import NAMES, table
from contextready.reproduce import paper_scale
from contextready.reproduce.lines import MINIATURES, OF_OUR_OWN, runs_of
from contextready.reproduce.records import jobs_of, words_of
from contextready.reproduce.runs import RUNS, START, with_starts
from contextready.runs.recipes import resolve
from contextready.train.cost import run_macs

HOURS = 4
"""The most that one seed of everything may take on two cores, by the issue that asked for it."""
SMALL = ["vocab_size=1024"]


def resolved(key, out, seed=0):
    words = [word for word in words_of(RUNS[key], seed, out, []) if not word.startswith("init_from=")]
    return resolve(words[0], [*words[1:], *SMALL])


@pytest.fixture(autouse=True)
def vocabulary(monkeypatch, tmp_path):
    """Resolve recipes without data: their vocabulary is the one that they are designed for."""
    monkeypatch.chdir(tmp_path)


def cost(key, out):
    return account(resolved(key, out).model)


def test_every_run_resolves_is_another_one_and_belongs_to_a_table(tmp_path):
    runs = {key: resolved(key, tmp_path) for key in RUNS}
    same = [str(replace(run, train=replace(run.train, out="")).as_dict()) for run in runs.values()]
    starts = [RUNS[key].start for key in RUNS]
    assert len({(text, start) for text, start in zip(same, starts, strict=True)}) == len(RUNS)
    used = {run.key for run in with_starts(runs_of(list(MINIATURES)))}
    assert used == set(RUNS)
    assert len({run.name for run in RUNS.values()}) == len(RUNS)


def test_the_command_offers_every_table():
    assert set(TABLES) == set(MINIATURES)
    assert {*EXPERIMENTS, *ELSEWHERE} >= {*NAMES, *OF_OUR_OWN, "training"}


@pytest.mark.parametrize("name", [name for name in MINIATURES if name not in OF_OUR_OWN])
def test_lines_stand_for_rows_of_the_paper(name):
    printed, miniature = table(name), MINIATURES[name]
    rows = [line.row for line in miniature.lines if line.row is not None]
    assert len(set(rows)) == len(rows)
    left_out = set(range(len(printed.rows))) - set(rows)
    # Longer training of the same model, the deepest model, and a third conversion.
    assert len(left_out) == {"depth-d1": 2, "depth-deep": 1, "fine-tuning": 1}.get(name, 0)
    keys = {column.key for column in miniature.columns}
    assert all(line.measures.keys() <= keys | {"streaming", "correction", "flops"} for line in miniature.lines)
    assert all(line.measures.keys() & keys for line in miniature.lines)


def test_models_that_are_compared_at_equal_cost_cost_the_same(tmp_path):
    def blocks(key):
        found = cost(key, tmp_path)
        return found.macs - found.macs_head

    first = [blocks(key) for key in ("d2-c144", "d3-c120", "n3-c136", "n6-c96", "n6-c96-head")]
    assert max(first) <= 1.06 * min(first)
    second = [blocks(key) for key in ("n6-c136", "n3-c192", "d2-c208", "n2-c240")]
    assert max(second) <= 1.05 * min(second)
    assert blocks("n4-c96") > blocks("d3-c96") > blocks("n3-c96")
    assert blocks("n6-c96") > blocks("d5-c96") > blocks("n5-c96")
    assert blocks("d3-c96-blind") == blocks("n3-c96-ffn")
    assert blocks("d5-c96") == blocks("n5-c96-ffn")
    assert blocks("d2-c96-concat_z") == blocks("n3-c96")
    assert blocks("d3-c144-concat_z") == blocks("n4-c144")
    assert blocks("d1-c128") == pytest.approx(blocks("n3-c96"), rel=0.02)


def test_controls_change_one_thing(tmp_path):
    one, other = resolved("n6-c96", tmp_path), resolved("n6-c96-head", tmp_path)
    assert (one.model.heads, replace(one.model, heads=1)) == (4, other.model)
    for width in (48, 96, 192):
        equal, half = resolved(f"d2-c{width}", tmp_path), resolved(f"d2-c{width}-half", tmp_path)
        assert equal.train.steps * equal.train.tokens_per_step == half.train.steps * half.train.tokens_per_step
        assert half.train.steps == 2 * equal.train.steps
    assert resolved("d3-c96-term", tmp_path).train.convergence_weight == 0.1
    start = resolved("d3-c96-random", tmp_path).model
    assert (start.correction_init, start.correction_scale) == ("random", 1.0)


@pytest.mark.parametrize("layers", [1, 2, 3, 5])
def test_conversions_end_after_as_many_tokens_as_the_transformer(layers, tmp_path):
    plain, start, converted = (
        resolved(key, tmp_path).train for key in (f"n{layers}-c96", f"n{layers}-c96-start", f"d{layers}-c96-matched")
    )
    tokens = [one.steps * one.tokens_per_step for one in (plain, start, converted)]
    assert tokens[1] + tokens[2] == tokens[0]
    assert tokens[1] == pytest.approx(START * tokens[0])
    assert RUNS[f"d{layers}-c96-matched"].start == f"n{layers}-c96-start"


def test_controls_of_the_conversions_cover_their_compute(tmp_path):
    for layers in (3, 5):
        keys = (f"n{layers}-c96", f"d{layers}-c96-tuned", f"n{layers}-c96-long")
        plain, converted, longer = (run_macs(resolved(key, tmp_path)) for key in keys)
        assert plain + converted <= 1.01 * longer


def test_runs_come_after_those_that_they_start_from(tmp_path):
    order = [run.key for run in with_starts(runs_of(["token-matched", "fine-tuning"]))]
    for key in order:
        if RUNS[key].start is not None:
            assert order.index(RUNS[key].start) < order.index(key)
    jobs, total = jobs_of(runs_of(["fine-tuning"]), [0, 1], tmp_path, SMALL[:0], missing_ok=True)
    assert len(jobs) == total == 12
    after = {job.out.name: job.after for job in jobs}
    assert after["d3-c96-tuned-seed1"] == tmp_path / "n3-c96-seed1"
    assert after["n3-c96-seed1"] is None
    (converted,) = [job for job in jobs if job.out.name == "d3-c96-tuned-seed1"]
    assert f"init_from={tmp_path / 'n3-c96-seed1'}" in converted.words
    assert converted.steps == 250


def test_steps_scale_every_run(tmp_path):
    jobs, _ = jobs_of(["n3-c96-long", "d3-c96-tuned"], [0], tmp_path, ["steps=10"], missing_ok=True)
    assert {job.out.name: job.steps for job in jobs} == {
        "n3-c96-long-seed0": 30,
        "n3-c96-seed0": 10,
        "d3-c96-tuned-seed0": 5,
    }


def test_one_seed_of_everything_fits_into_the_time(tmp_path):
    """By the speed that our runs had; every table in at most half an hour of two cores."""
    from contextready.cli.reproduce import CORE

    jobs, _ = jobs_of(runs_of(list(MINIATURES)), [0], tmp_path, [], missing_ok=True)
    assert sum(job.macs for job in jobs) / CORE < 2 * HOURS * 3600 / 2
    for name in MINIATURES:
        jobs, _ = jobs_of(runs_of([name]), [0], tmp_path, [], missing_ok=True)
        assert sum(job.macs for job in jobs) / CORE < 2 * 30 * 60


def test_missing_data_is_reported_with_the_command_that_prepares_it(tmp_path):
    with pytest.raises(ContextReadyError, match="crt data prepare data/small default --vocab-size 1024"):
        jobs_of(["n1-c96"], [0], tmp_path, [])


@pytest.mark.parametrize("name", paper_scale.TABLES)
def test_the_recipes_of_a_table_are_those_of_its_models(name):
    printed = table(name)
    models = {row.model for row in printed.rows} | {model for row in printed.rows for model in row.models.values()}
    runs = paper_scale.runs_of([name])
    made = {run.model for run in runs}
    # The tied correction is in the text only; some models are the starts and controls of others.
    assert models - {None} <= made
    assert made - models <= {"wiki-d1-c50-tied", "owt-n1-c2048"}
    for run in runs:
        config = paper_scale.config_of(run)
        if config.task is None:
            assert config.train.convergence_weight == (0.1 if "-d" in run.model and name != "k_min" else 0.0)
            assert config.train.warmup == 0
        assert config.train.init_from is None


def test_conversions_at_paper_scale_follow_their_transformers(tmp_path):
    jobs, total = paper_scale.jobs_of(["fine-tuning", "token-matched", "d1"], [0], tmp_path, [], missing_ok=True)
    assert len(jobs) == total
    folders = [job.out for job in jobs]
    converted = [job for job in jobs if job.after is not None]
    assert len(converted) == 3 + 4 + 1
    for job in converted:
        assert folders.index(job.after) < folders.index(job.out)
        assert f"init_from={job.after}" in job.words


def test_the_whole_paper_is_counted_once():
    rows = paper_scale.costs(paper_scale.TABLES)
    keys = {run.key for run in paper_scale.runs_of(paper_scale.TABLES)}
    assert sum(row.new for row in rows) == len(keys)
    total = sum(2.0 * run_macs(paper_scale.config_of(run)) for run in paper_scale.runs_of(paper_scale.TABLES))
    assert sum(row.flops for row in rows) == pytest.approx(total)
    days = total / (0.4 * 312e12) / 86400
    assert 15 < days < 20


def test_names_of_runs_are_folder_names():
    for run in (*RUNS.values(), *paper_scale.runs_of(paper_scale.TABLES)):
        assert re.fullmatch(r"[\w.-]+", run.key), run.key
