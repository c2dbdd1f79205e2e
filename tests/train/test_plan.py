"""The planned memory and time of a run, compared with what it really needs."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from contextready import ContextReadyError
from contextready.cli.main import main
from contextready.runs.config import build_run
from contextready.runs.recipes import recipe_names, resolve
from contextready.train.plan import make_plan

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
MEDIUM = {"width": 256, "heads": 4, "layers": 2, "vocab_size": 2048, "block_size": 128, "batch_size": 8}
HEAVY = {"width": 512, "heads": 4, "layers": 4, "vocab_size": 4096, "block_size": 64, "batch_size": 2}


def plan_of(gpus=1, **settings):
    base = MEDIUM | {
        "data": "-",
        "out": "-",
        "correction": "add",
        "passes": 5,
        "gradient": "unroll",
        "precision": "fp32",
    }
    return make_plan(build_run(base | settings), gpus)


MODES = ["unroll", "unroll, recomputed", "truncated J=2", "implicit m=2", "bptt"]
SHAPES = {"activations": MEDIUM, "weights": HEAVY}
"""Named after what needs most of the memory."""


def some_in_the_slow_tests(pairs, fast):
    """Run some pairs in every test run, and mark the others as slow."""
    return [pytest.param(*pair, marks=[] if pair in fast else [pytest.mark.slow]) for pair in pairs]


@LINUX
@pytest.mark.parametrize(
    ("shape", "mode"),
    some_in_the_slow_tests(
        list(itertools.product(SHAPES, MODES)), [*itertools.product(["activations"], MODES), ("weights", "unroll")]
    ),
)
def test_the_planned_memory_is_what_a_process_takes(mode, shape, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from gradients import measure_memory

    measured, planned = measure_memory(mode, 4, SHAPES[shape])
    assert planned == pytest.approx(measured, rel=0.15)


TWO_PROCESSES = """
import json, sys
import torch
from gradients import SMALL, status
from contextready import build_model
from contextready.runs.config import build_run
from contextready.train.objective import Objective
from contextready.train.team import joined
from contextready.train.trainer import make_optimizer

parallel, shape = sys.argv[1], json.loads(sys.argv[2])
with joined("cpu") as team:
    for size in (SMALL | {"layers": 1}, shape):
        before = status("VmRSS")
        base = {"data": "-", "out": "-", "correction": "add", "passes": 3, "precision": "fp32", "parallel": parallel}
        config = build_run(base | size)
        objective = Objective(build_model(config.model))
        wrapped = team.wrap(objective, parallel)
        optimizer = make_optimizer(objective.model, config)
        tokens = torch.zeros(config.train.batch_size // 2, config.train.block_size, dtype=torch.long)
        for _ in range(3):
            objective.backward(tokens, tokens, 3, wrapped=wrapped)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    if team.is_first:
        print("grown", status("VmHWM") - before)
"""


@LINUX
@pytest.mark.parametrize(
    ("shape", "parallel"),
    some_in_the_slow_tests(
        list(itertools.product(SHAPES, ["ddp", "fsdp"])), [("activations", "ddp"), ("weights", "fsdp")]
    ),
)
def test_the_planned_memory_is_what_each_of_two_processes_takes(parallel, shape, tmp_path, monkeypatch):
    size, script = SHAPES[shape], tmp_path / "two.py"
    script.write_text(TWO_PROCESSES)
    for key, value in {
        "PYTHONPATH": str(BENCHMARKS),
        "OMP_NUM_THREADS": "1",
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
    }.items():
        monkeypatch.setenv(key, value)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run([*words, parallel, json.dumps(size)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    measured = int(done.stdout.split("grown")[1])
    settings = size | {"passes": "2..3", "gradient": "unroll", "parallel": parallel}
    assert plan_of(gpus=2, **settings).total == pytest.approx(measured, rel=0.15)


def test_only_the_unroll_keeps_more_with_more_passes():
    for mode in ({}, {"gradient": "truncated"}, {"gradient": "implicit"}):
        few, many = (plan_of(passes=k, **mode).activations for k in (4, 12))
        assert (many > 2 * few) == (mode == {})
    assert plan_of(checkpoint_passes=True).activations < 0.5 * plan_of().activations


def test_sharding_shares_the_optimizer_and_both_share_the_batch():
    one, ddp, fsdp = plan_of(), plan_of(gpus=4), plan_of(gpus=4, parallel="fsdp")
    assert ddp.optimizer == one.optimizer == 2 * one.weights
    assert fsdp.optimizer == one.optimizer // 4
    assert ddp.activations < 0.4 * one.activations
    assert one.flops_per_step == ddp.flops_per_step == fsdp.flops_per_step


def test_bf16_keeps_less_than_fp32():
    assert plan_of(precision="bf16").activations < 0.8 * plan_of().activations
    assert plan_of(precision="auto", gradient="bptt").precision == "fp32"


def test_gradients_that_wait_for_the_rest_of_a_step_are_counted():
    once, often = plan_of(**HEAVY), plan_of(**HEAVY, accumulate=4)
    assert often.total > once.total
    assert often.flops_per_step == pytest.approx(4 * once.flops_per_step)


def test_what_is_computed_again_takes_time():
    plain, again = plan_of(), plan_of(checkpoint_passes=True)
    assert 1.2 < again.flops_per_step / plain.flops_per_step < 4 / 3


def test_the_time_is_work_by_speed():
    plan = plan_of(gpus=4)
    assert plan.seconds_per_step(100.0, 0.5) == pytest.approx(plan.flops_per_step / (4 * 100e12 * 0.5))
    for tflops, utilisation in ((0.0, 0.5), (100.0, 0.0), (100.0, 1.5), (-1.0, 0.5), (float("nan"), 0.5)):
        with pytest.raises(ContextReadyError, match="must be greater than 0"):
            plan.seconds_per_step(tflops, utilisation)


@LINUX
def test_a_plan_at_paper_scale_allocates_nothing(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from gradients import status

    largest = max((resolve(name, []) for name in recipe_names() if "main" in name), key=lambda c: c.model.width)
    make_plan(largest, 8)
    before = status("VmRSS")
    plan = make_plan(largest, 8)
    assert plan.total > 2**30
    assert status("VmRSS") - before < 100e6


def test_the_command_prints_all_of_it(capsys):
    assert main(["plan", "owt-d5-c1120", "gradient=implicit", "--gpus", "8", "parallel=fsdp", "--tflops", "989"]) == 0
    out = capsys.readouterr().out
    assert "156,992,640 parameters on 8 GPUs (fsdp), gradient=implicit, K=2..5, bf16" in out
    for word in ("weights", "gradients", "optimizer", "activations", "total", "FLOPs per step", "GPU days"):
        assert word in out
    assert main(["plan", "owt-d5-c1120", "gradient=bptt", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["parameters"] == 156_992_640
    assert plan["total"] == sum(plan[key] for key in ("weights", "gradients", "optimizer", "activations"))
    assert plan["seconds_per_step"] == pytest.approx(plan["flops_per_step"] / (312e12 * 0.4))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--gpus", "0"], "--gpus must be at least 1, but got 0"),
        (["--gpus", "3"], "batch_size=64 cannot be split over 3 processes"),
        (["--utilisation", "0"], "--utilisation must be greater than 0 and at most 1, but got 0"),
        (["gradient=implict"], "gradient=implict is unknown; did you mean 'implicit'?"),
        (["parallel=fdsp"], "parallel=fdsp is unknown; did you mean 'fsdp'?"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_sentence(words, sentence, capsys):
    assert main(["plan", "owt-d5-c1120", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("crt plan: ")
    assert sentence in error
    assert error.count("\n") == 1
