"""Evaluations over seeds: means, standard deviations, and differences paired by seed."""

import json
from math import log
from statistics import stdev

import numpy as np
import pytest
from train_helpers import TINY, make_data

from contextready.cli.eval_seeds import print_over_seeds
from contextready.cli.main import main
from contextready.evaluate.evaluate import Evaluation
from contextready.evaluate.summary import as_record, differences, summarize
from contextready.measure.perplexity import Score
from contextready.runs.config import build_run
from contextready.train.trainer import train

SHAPE = {"vocab_size": 300, "width": 16, "layers": 1, "heads": 2, "data": "data"}


def evaluation(perplexity, streamed=None):
    """Perplexities that are the same in every window; a transformer is not streamed."""
    parallel = {1: Score(np.full(4, log(perplexity)))}
    if streamed is not None:
        parallel[5] = Score(np.full(4, log(streamed)))
    return Evaluation(
        64, 4, 16, None, parallel, None if streamed is None else Score(np.full(4, log(streamed))), None, None, None
    )


@pytest.fixture
def runs(tmp_path):
    def folder(name, seed, **settings):
        run = tmp_path / name
        run.mkdir()
        config = build_run(SHAPE | {"out": str(run), "seed": seed} | settings)
        (run / "config.json").write_text(json.dumps(config.as_dict()))
        return run

    ready = [folder(f"ready-{seed}", seed, correction="add") for seed in (0, 1, 2)]
    return ready + [folder(f"plain-{seed}", seed) for seed in (0, 1, 3)]


def test_means_spreads_and_paired_differences(runs, capsys):
    evaluations = [evaluation(30.0, p) for p in (10.0, 12.0, 17.0)] + [evaluation(p) for p in (11.0, 15.0, 99.0)]
    ready, plain = summarize(runs, evaluations)
    assert (ready.name, plain.name) == ("ready", "plain")
    assert ready.perplexities(5) == ready.perplexities(None) == pytest.approx([10.0, 12.0, 17.0])
    assert plain.perplexities(5) == plain.perplexities(None) == []
    (found,) = differences([ready, plain])
    assert found.by_seed == pytest.approx({0: -1.0, 1: -3.0})
    print_over_seeds([ready, plain])
    said = capsys.readouterr().out
    assert f"13.00 ± {stdev([10, 12, 17]):.2f}" in said
    assert f"ready minus plain, as they generate: -2.00 ± {stdev([-1, -3]):.2f} (seed 0: -1.00, seed 1: -3.00)" in said
    record = as_record([ready, plain])
    assert record["configurations"][0]["perplexity"]["streaming"]["mean"] == pytest.approx(13.0)
    assert record["differences"][0]["seeds"] == [0, 1]


def test_single_runs_have_no_summary(runs, capsys):
    assert summarize(runs[:1], [evaluation(1.0)]) == []
    assert summarize([runs[0], runs[3]], [evaluation(2.0), evaluation(3.0)]) == []
    print_over_seeds([])
    assert capsys.readouterr().out == ""


def test_the_command_prints_them_below_the_single_runs(tmp_path, capsys):
    data = make_data(tmp_path)
    runs = [str(tmp_path / f"run-{seed}") for seed in (0, 1)]
    for seed, out in enumerate(runs):
        train(build_run(TINY | {"data": str(data), "out": out, "seed": seed, "steps": 2}))
    assert main(["eval", *runs, "--tokens", "64"]) == 0
    said = capsys.readouterr().out
    table, over_seeds = said.split("Means over seeds")
    assert "run-0" in table
    assert "± = standard deviation over seeds." in over_seeds
    assert "± = standard error" in table
    assert main(["eval", *runs, "--tokens", "64", "--json"]) == 0
    (group,) = json.loads(capsys.readouterr().out)["over_seeds"]["configurations"]
    assert group["seeds"] == [0, 1]
    assert main(["eval", runs[0], "--tokens", "64", "--json"]) == 0
    assert "over_seeds" not in json.loads(capsys.readouterr().out)
