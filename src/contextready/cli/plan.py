"""`crt plan`: what a training needs, before it is started."""

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING

from contextready.cli.options import Verbs, verb

if TYPE_CHECKING:
    from contextready.runs.config import RunConfig

GIB = 2**30


def add(verbs: Verbs) -> None:
    """Describe `crt plan`."""
    plan = verb(
        verbs,
        "plan",
        "memory and time of a training before it is started",
        "Print what a training needs: parameters, memory of each GPU by what it is for, FLOPs of a\n"
        "step, and the time at a stated utilisation. No weight is allocated.",
        "examples:\n"
        "  crt plan owt-d5-c1120 --gpus 8\n"
        "  crt plan mini-d1 vocab_size=4096          without prepared data, the vocabulary must be said\n"
        "  crt plan owt-d5-c1120 gradient=implicit parallel=fsdp --gpus 8 --tflops 989 --utilisation 0.35",
    )
    plan.add_argument("recipe", help="name of a recipe, or a YAML file")
    plan.add_argument("settings", nargs="*", metavar="key=value", help="settings that change it")
    plan.add_argument("--gpus", type=int, default=1, help="processes that share the work (default: 1)")
    plan.add_argument(
        "--tflops",
        type=float,
        default=312.0,
        help="peak of one GPU in TFLOP/s, in the plan's precision (default: 312, an A100 in bf16)",
    )
    plan.add_argument("--utilisation", type=float, default=0.4, help="part of the peak that is reached (default: 0.4)")
    plan.add_argument("--json", action="store_true", help="print one JSON line instead")
    plan.set_defaults(run=_run, more_words="settings")


def _run(options: argparse.Namespace) -> None:
    from contextready.runs.recipes import resolve

    config = resolve(options.recipe, options.settings)
    print_plan(config, options.gpus, options.tflops, options.utilisation, options.json)


def print_plan(config: "RunConfig", gpus: int, tflops: float, utilisation: float, as_json: bool) -> None:
    """Memory of each process and the time of a run, before it is started."""
    from contextready.train.plan import make_plan

    plan = make_plan(config, gpus)
    seconds = plan.seconds_per_step(tflops, utilisation)
    if as_json:
        about = {"tflops": tflops, "utilisation": utilisation, "seconds_per_step": seconds}
        print(json.dumps(dataclasses.asdict(plan) | {"total": plan.total} | about))
        return
    t = config.train
    tokens, hours = t.steps * t.tokens_per_step, seconds * t.steps / 3600
    spread = "" if gpus == 1 else f" over {gpus} GPUs ({t.parallel})"
    passes = "" if t.passes is None or config.model.correction is None else f", K up to {t.passes}"
    print(f"{plan.parameters:,} parameters{spread}, gradient={t.gradient}{passes}, {plan.precision}")
    print(f"{t.sequences_per_step} × {t.block_size} tokens a step, {t.steps:,} steps, {tokens / 1e9:.2f}B tokens")
    print("memory of each GPU at its peak, in GiB:")
    for name, size in (
        ("weights", plan.weights),
        ("gradients", plan.gradients),
        ("optimizer", plan.optimizer),
        ("activations", plan.activations),
        ("together", plan.total),
    ):
        print(f"  {name:<12}{size / GIB:9.3f}")
    print(f"FLOPs of a step: {plan.flops_per_step:.3e}")
    print(
        f"at {utilisation:.0%} of {tflops:g} TFLOP/s a GPU: {seconds:.3g} s a step, {hours:,.1f} h in all, "
        f"{hours * gpus / 24:,.2f} GPU days"
    )
    if t.gradient == "bptt":
        print("gradient=bptt goes token by token: small products, which reach far less of the peak.")
