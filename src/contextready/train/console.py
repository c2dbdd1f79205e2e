"""`crt train` and `crt plan`: train or plan, say how it ended."""

import dataclasses
import json
import signal

from contextready.train.config import RunConfig
from contextready.train.cost import step_macs
from contextready.train.display import ConsoleDisplay
from contextready.train.models import cost_of
from contextready.train.plan import make_plan
from contextready.train.recipes import load_recipe, recipe_names
from contextready.train.sharded import METADATA
from contextready.train.task import TASK_KEYS, split_task
from contextready.train.trainer import Result, train


def run_train(config: RunConfig) -> int:
    """Train in the foreground; the exit code is 0 at the last step and 128 + signal when one stopped it before."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, soft_wrap=True)
    result = train(config, ConsoleDisplay(console))
    if result.speaks:
        console.print(ending(result))
    return 0 if result.stopped_by is None else 128 + result.stopped_by


def ending(result: Result) -> str:
    """One sentence on how a run ended and what to do next."""
    if result.stopped_by is not None:
        name = signal.Signals(result.stopped_by).name
        return f"{name} at step {result.step:,}: saved {result.checkpoint}; the same command goes on from there."
    if (result.checkpoint / METADATA).is_file():
        return f"Done at step {result.step:,}: {result.checkpoint}. Next: crt unshard {result.run} OUT, crt eval OUT"
    return f"Done at step {result.step:,}: {result.checkpoint}. Next: crt eval {result.run}"


def print_recipes() -> None:
    """Every recipe with its shape and length."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 1, 0, 0))
    for column in ("recipe", "model", "batch × T", "steps", "K"):
        table.add_column(column, justify="left" if column in ("recipe", "model") else "right", no_wrap=True)
    for name in recipe_names():
        s = load_recipe(name)
        kind = s.get("correction") or ("+ FFN" if s.get("extra_ffn") else "")
        shape = (
            f"{'D' if s.get('correction') else 'N'}={s['layers']} C={s['width']}" if "layers" in s else "pretrained="
        )
        least = s.get("k_min")
        drawn = "" if least in (None, "none") else f"{least}–"
        passes = f"{drawn}{s['passes']}" if "passes" in s else ""
        batch = s["batch_size"] * s.get("accumulate", 1)
        task, _ = split_task({key: value for key, value in s.items() if key in TASK_KEYS})
        length = s["block_size"] if task is None else task.length
        table.add_row(name, f"{shape} {kind}", f"{batch}×{length}", f"{s['steps']:,}", passes)
    Console().print(table)
    print("A model's name alone, such as owt-d5-c1120, means the first experiment that lists it.")


def print_settings(config: RunConfig) -> None:
    """The settings a run would have, and its size, as JSON; nothing is trained."""
    cost, t = cost_of(config.model), config.train
    per_step = step_macs(cost, t)
    summary = {
        "parameters": cost.parameters,
        "tokens": t.steps * t.tokens_per_step,
        "macs_per_step": round(per_step),
        "macs": round(per_step * t.steps),
    }
    print(json.dumps(config.as_dict() | {"cost": summary}, indent=1))


def print_plan(config: RunConfig, gpus: int, tflops: float, utilisation: float, as_json: bool) -> None:
    """Memory of each process and the time of a run, before it is started."""
    plan = make_plan(config, gpus)
    seconds = plan.seconds_per_step(tflops, utilisation)
    if as_json:
        about = {"tflops": tflops, "utilisation": utilisation, "seconds_per_step": seconds}
        print(json.dumps(dataclasses.asdict(plan) | {"total": plan.total} | about))
        return
    t, GiB = config.train, 2**30
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
        print(f"  {name:<12}{size / GiB:9.3f}")
    print(f"FLOPs of a step: {plan.flops_per_step:.3e}")
    print(
        f"at {utilisation:.0%} of {tflops:g} TFLOP/s a GPU: {seconds:.3g} s a step, {hours:,.1f} h in all, "
        f"{hours * gpus / 24:,.2f} GPU days"
    )
    if t.gradient == "bptt":
        print("gradient=bptt goes token by token: small products, which reach far less of the peak.")
