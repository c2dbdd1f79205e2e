"""`crt plan`: the memory and time that a training run will need."""

import argparse
import dataclasses
from typing import TYPE_CHECKING

from contextready.cli.console import make_console
from contextready.cli.options import Verbs, check_most, verb, whole_number
from contextready.errors import ContextReadyError
from contextready.files import to_json
from contextready.formats.limits import check_count, check_range

if TYPE_CHECKING:
    from contextready.runs.config import RunConfig

GIB = 2**30
WHOLE_PAPER = "paper"
"""Instead of a recipe: everything that crt reproduce all --scale paper trains."""
MOST_GPUS = 10**6
TFLOPS = (1e-6, 1e9)
UTILISATION = (1e-6, 1.0)
MOST_BLOCKS = 1000
"""Blocks that a planned step may run: its memory is found by running it without data, at about 0.04 s per block."""
MOST_VALUES = 2**58
"""Values in the largest tensor of a step; torch cannot even describe a tensor with 2**63 bytes."""


def add(verbs: Verbs) -> None:
    """Describe `crt plan`."""
    plan = verb(
        verbs,
        "plan",
        "estimate the memory and time of a training run",
        "Estimate what a training run needs before it is started: parameters, memory per GPU, FLOPs per\n"
        "step, and the time at a given utilisation. No weights are allocated and no data is needed. Give\n"
        "the recipe and the settings as for crt train; crt train --help lists all settings. crt plan paper\n"
        "adds up the experiments of the whole paper.",
        "crt plan mini-d1\n"
        "crt plan owt-d5-c1120 --gpus 8\n"
        "crt plan owt-d5-c1120 gradient=implicit parallel=fsdp --gpus 8 --tflops 989 --utilisation 0.35\n"
        "crt plan paper",
    )
    plan.add_argument("recipe", help="name of a recipe (see crt train --list), a YAML file with settings, or paper")
    plan.add_argument("settings", nargs="*", metavar="key=value", help="settings to change, for example steps=4000")
    plan.add_argument("--gpus", type=whole_number, default=1, help="GPUs, or processes, that train the run together")
    plan.add_argument(
        "--tflops",
        type=float,
        default=312.0,
        help="peak speed of one GPU in TFLOP/s at the precision of the run (default: 312, an A100 in bf16)",
    )
    plan.add_argument("--utilisation", type=float, default=0.4, help="fraction of the peak speed that is reached")
    plan.add_argument("--json", action="store_true", help="print JSON")
    plan.set_defaults(run=_run, more_words="settings")


def _run(options: argparse.Namespace) -> None:
    from contextready.runs.recipes import resolve

    check_most("--gpus", options.gpus, MOST_GPUS)
    for name, value, (low, high) in (
        ("tflops", options.tflops, TFLOPS),
        ("utilisation", options.utilisation, UTILISATION),
    ):
        # Zero, negative numbers and NaN have sentences of their own.
        if value > 0.0:
            check_range(f"--{name}", value, low, high)
    if options.recipe == WHOLE_PAPER:
        if options.settings:
            raise ContextReadyError("crt plan paper adds up the recipes as they are; leave the settings out.")
        print_paper(options.gpus, options.tflops, options.utilisation, options.json)
        return
    config = resolve(options.recipe, options.settings)
    _check_size(config)
    print_plan(config, options.gpus, options.tflops, options.utilisation, options.json)


def _check_size(config: "RunConfig") -> None:
    """Refuse a plan that would take hours to make, or whose tensors are larger than torch can describe."""
    from contextready.model.config import ModelConfig

    model, t = config.model, config.train
    if not isinstance(model, ModelConfig):
        return
    blocks = model.layers * (1 if t.pass_schedule is None else t.pass_schedule.most)
    advice = "crt train … --dry-run prints the parameters and FLOPs of any size."
    if blocks > MOST_BLOCKS:
        raise ContextReadyError(
            f"layers × passes must be at most {MOST_BLOCKS:,} for a plan, but got {blocks:,}; {advice}"
        )
    tokens = t.batch_size * t.block_size
    if tokens * max(model.vocab_size, 4 * model.width, model.heads * t.block_size) > MOST_VALUES:
        raise ContextReadyError(
            f"batch_size={t.batch_size} and block_size={t.block_size} are too large for a plan; lower them. {advice}"
        )


def print_paper(gpus: int, tflops: float, utilisation: float, as_json: bool) -> None:
    """Print the compute of every table of the paper, counting runs that several tables share once."""
    from rich import box
    from rich.table import Table

    from contextready.reproduce.paper_scale import TABLES, costs
    from contextready.train.plan import gpu_seconds

    check_count("--gpus", gpus, 1, MOST_GPUS)
    found = costs(TABLES)
    days = [gpu_seconds(one.flops, tflops, utilisation) / 86400 for one in found]
    if as_json:
        rows = [dataclasses.asdict(one) | {"gpu_days": of_table} for one, of_table in zip(found, days, strict=True)]
        print(to_json({"tables": rows, "gpu_days": sum(days), "tflops": tflops, "utilisation": utilisation}, indent=1))
        return
    table = Table(box=box.SIMPLE)
    for column in ("table", "runs", "not in a table above", "FLOPs", "GPU days"):
        table.add_column(column, justify="left" if column == "table" else "right")
    for one, of_table in zip(found, days, strict=True):
        table.add_row(one.table, str(one.runs), str(one.new), f"{one.flops:.2e}", f"{of_table:.2f}")
    runs, flops, total = sum(one.new for one in found), sum(one.flops for one in found), sum(days)
    spread = "" if gpus == 1 else f", {total / gpus:.1f} days on {gpus} GPUs"
    console = make_console(tables=True)
    console.print(table)
    console.print(
        f"{runs} runs, {flops:.2e} FLOPs: {total:.1f} GPU days at {utilisation:.0%} of {tflops:g} TFLOP/s{spread}.",
        soft_wrap=True,
    )


def print_plan(config: "RunConfig", gpus: int, tflops: float, utilisation: float, as_json: bool) -> None:
    """Print the memory per process and the time of a run, as text or as JSON."""
    from contextready.train.plan import make_plan

    plan = make_plan(config, gpus)
    seconds = plan.seconds_per_step(tflops, utilisation)
    if as_json:
        about = {"tflops": tflops, "utilisation": utilisation, "seconds_per_step": seconds}
        print(to_json(dataclasses.asdict(plan) | {"total": plan.total} | about, indent=1))
        return
    t = config.train
    tokens, hours = t.steps * t.tokens_per_step, seconds * t.steps / 3600
    spread = "" if gpus == 1 else f" on {gpus} GPUs ({t.parallel})"
    passes = "" if t.passes is None or config.model.correction is None else f", K={t.passes}"
    print(f"{plan.parameters:,} parameters{spread}, gradient={t.gradient}{passes}, {plan.precision}")
    print(f"{t.sequences_per_step} × {t.block_size} tokens per step, {t.steps:,} steps, {tokens:,} tokens")
    print("peak memory per GPU in GiB:")
    for name, size in (
        ("weights", plan.weights),
        ("gradients", plan.gradients),
        ("optimizer", plan.optimizer),
        ("activations", plan.activations),
        ("total", plan.total),
    ):
        print(f"  {name:<12}{size / GIB:9.3f}")
    print(f"FLOPs per step: {plan.flops_per_step:.3e}")
    print(
        f"at {utilisation:.0%} of {tflops:g} TFLOP/s per GPU: {seconds:.3g} s per step, {hours:,.1f} h in total, "
        f"{hours * gpus / 24:,.2f} GPU days"
    )
    if t.gradient == "bptt":
        print("Note: gradient=bptt runs token by token in small products, so it reaches a far lower utilisation.")
