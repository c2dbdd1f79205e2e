"""Timing of prompts: bounded, with progress, and on models whose passes contract."""

import json
import math

import pytest
import torch

from contextready.bench import prefill as measuring
from contextready.bench import race
from contextready.bench.models import open_models, weight_bytes
from contextready.bench.prefill import RATE, measure_prefill, settle
from contextready.cli import progress
from contextready.cli.bench import print_prefill
from contextready.cli.console import make_console
from contextready.cli.main import main
from contextready.model.narrow import narrowed
from contextready.solve.prompt_reader import SOLVERS
from contextready.solve.unroll import unroll

SHAPE = ["vocab_size=64", "width=64", "layers=2", "heads=2", "init=torch"]
"""A model whose random correction does not contract."""
TOKENS = torch.randint(64, (1, 48), generator=torch.Generator().manual_seed(3))


def opened(*words):
    (one,) = open_models([*SHAPE, *words])
    return one


def rate(model):
    return unroll(model, TOKENS, passes=6)[1].rate


@pytest.mark.parametrize(
    "words", [["correction=add"], ["correction=concat"], ["correction=add", "correction_gain=channel"]]
)
@torch.no_grad()
def test_a_random_correction_is_made_smaller_until_passes_contract(words):
    one = opened(*words, "correction_scale=64")
    assert one.is_random
    assert rate(one.model) > RATE
    factor = settle(one.model)
    assert factor < 1.0
    assert math.log2(factor).is_integer()
    assert rate(one.model) < 1.2 * RATE
    assert settle(one.model) in (1.0, 0.5)  # other tokens may contract a little less
    assert settle(opened("correction=block_head").model) == 1.0


def test_every_solver_reads_within_its_limit_and_tells_how_far_it_is():
    told = []
    records = measure_prefill(opened("correction=add"), [40, 64], 60.0, lambda *what: told.append(what))
    assert [(one["asked"], one["tokens"]) for one in records] == [(s, n) for n in (40, 64) for s in SOLVERS]
    assert not any(one["cut_off"] for one in records)
    assert all(one["seconds"] > 0 for one in records)
    jacobi = next(one for one in records if (one["asked"], one["tokens"]) == ("jacobi", 64))
    assert jacobi["passes"] < 20
    label = records[0]["label"]
    sequential = [what for what in told if what[0].startswith(f"{label}, sequential, 64 tokens")]
    assert {total for _, total, _ in sequential} == {64}
    assert sum(tokens for what, _, tokens in sequential if "warm-up" in what) == 64
    assert sum(tokens for what, _, tokens in sequential if "warm-up" not in what) == 64
    assert {total for what, total, _ in told if "jacobi" in what} == {None}
    assert measure_prefill(opened("correction=none"), [40]) == []
    assert measure_prefill(opened("correction=add"), []) == []


def test_every_solver_is_also_measured_in_bf16_and_with_early_passes_in_bf16():
    told = []
    records = measure_prefill(opened("correction=add"), [64], 60.0, lambda *what: told.append(what), bf16=True)
    found = {(one["precision"], one["asked"]): one for one in records}
    expected = {("f32", solver) for solver in SOLVERS} | {("bf16", solver) for solver in SOLVERS}
    assert set(found) == expected | {("mixed", "sweep"), ("mixed", "jacobi")}
    for (precision, _), one in found.items():
        in_bf16 = {"f32": 0.0, "bf16": one["passes"]}.get(precision)
        assert one["bf16_passes"] == in_bf16 if in_bf16 is not None else 0.0 < one["bf16_passes"] < one["passes"]
    # Progress counts early passes as well.
    mixed = [what for what in told if "jacobi" in what[0] and "warm-up" not in what[0]]
    passes = sum(one["passes"] for (_, solver), one in found.items() if solver == "jacobi")
    assert sum(tokens for _, _, tokens in mixed) == 64 * passes


def test_memory_of_weights_in_bf16():
    for words in ([], ["tied_embeddings=true"]):
        one = opened("correction=add", *words)
        weights = narrowed(one.model).parameters()
        assert weight_bytes(one.account, "bf16") == pytest.approx(sum(weight.nbytes for weight in weights), rel=1e-2)
        assert weight_bytes(one.account, "f32") == sum(weight.nbytes for weight in one.model.parameters())


def test_a_reading_that_takes_too_long_is_cut_off(monkeypatch):
    now = iter(range(10**6))
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: float(next(now)))
    one = opened("correction=add")
    records = {record["asked"]: record for record in measure_prefill(one, [64], limit=3.0)}
    for record in records.values():
        assert record["cut_off"]
        assert record["cost"] is record["certificate"] is None
        assert record["note"].startswith("cut off after 3 s and ")
        assert record["seconds"] > 3.0
    assert records["sequential"]["tokens"] < 5
    assert records["jacobi"]["tokens"] == 64
    monkeypatch.undo()
    # The hook is gone, and the model reads as before.
    assert not one.model.backbone.last_block._forward_hooks
    assert not any(record["cut_off"] for record in measure_prefill(one, [64]))
    json.dumps(list(records.values()))


def test_the_table_says_what_was_cut_off_and_scaled(capsys):
    common = {"label": "d1", "tokens": 64, "seconds": 1.0, "note": "", "correction_factor": 0.25, "precision": "f32"}
    print_prefill(
        make_console(tables=True, file_width=150),
        [
            common | {"asked": "sweep", "cost": 4.2, "certificate": 0.01, "exact": False},
            common
            | {"asked": "jacobi", "cost": None, "certificate": None, "exact": False, "note": "cut off after 9 s"},
        ],
    )
    said = " ".join(capsys.readouterr().out.split())
    assert "4.20 1.0e-02" in said
    assert "– – cut off after 9 s" in said
    assert "Random weights do not contract." in said
    assert "d1 by 0.25." in said


def test_the_command_shows_progress_and_writes_json(capsys, monkeypatch):
    monkeypatch.setattr(race, "PROBE", 1000)
    monkeypatch.setattr(progress, "EVERY", 0.0)
    words = [
        "--engines",
        "eager",
        "--precisions",
        "f32",
        "--contexts",
        "4",
        "--tokens",
        "1",
        "--rounds",
        "1",
        "--prefill",
        "40",
        "--json",
    ]
    assert main(["bench", *SHAPE, "correction=add", *words, "--threads", "1"]) == 0
    said = capsys.readouterr()
    assert "sequential, 40 tokens: 40 tokens of 40 tokens (100 %)" in " ".join(said.err.split())
    document = json.loads(said.out)
    assert [one["asked"] for one in document["prefill"]] == list(SOLVERS)
    for wrong in ("0", "-1", "nan", "1e30"):
        assert main(["bench", *SHAPE, *words, "--prefill-limit", wrong]) == 2
        assert "--prefill-limit must be between 0.1 and" in capsys.readouterr().err
