"""`crt bench`: decode, prefill and memory of models, as tables, one JSON line or a picture."""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from contextready.errors import ContextReadyError
from contextready.extras import require
from contextready.files import to_json
from contextready.infer.bench import BITS, Contestant, Timing, our_contestants, peer_contestants, race
from contextready.infer.engine import ENGINES
from contextready.infer.gguf_file import read_gguf
from contextready.infer.opened import EXPORTED
from contextready.info import entries
from contextready.model.accounting import Account, account
from contextready.model.build import ModelConfig, build_model
from contextready.model.context_ready import ContextReady
from contextready.model.transformer import Transformer
from contextready.settings import build_settings, nearest
from contextready.solve.prefill import SOLVERS, prefill
from contextready.train.checkpoint import open_checkpoint

PAIRS = ("owt-d1-c2048", "owt-n6-c1088", "owt-d5-c1120", "owt-n12-c768")
"""The paper's timed pairs: what is measured when nothing is named."""


BOUND = 0.7
"""From this part of the bandwidth on, memory is what limits."""
CACHED = 1.1
"""More than memory gives: the weights are in the caches."""


class Bench(NamedTuple):
    """What to measure."""

    what: Sequence[str]
    engines: Sequence[str]
    precisions: Sequence[str]
    contexts: Sequence[int]
    tokens: int
    rounds: int
    threads: int
    peers: bool
    prefill: Sequence[int]


class Model(NamedTuple):
    """A model to measure."""

    label: str
    account: Account
    model: Transformer | ContextReady | Path
    """The model, or the file it was exported to."""
    text: torch.Tensor | None
    """Ids of real text to read, where the model was trained on some that is still there."""


def run_bench(bench: Bench, as_json: bool = False, plot: Path | None = None) -> None:
    """Measure, then print tables or one JSON line, and draw what was measured."""
    from rich.console import Console

    _check(bench)
    # A table that goes into a file has room, whatever the width of a terminal that is not there.
    console, told = Console(highlight=False, width=None if sys.stdout.isatty() else 120), Console(stderr=True)
    torch.set_num_threads(bench.threads)
    with told.status("building models") as status, tempfile.TemporaryDirectory() as scratch, torch.inference_mode():
        models = open_models(bench.what or PAIRS)
        room = max(bench.contexts) + bench.tokens + 8
        contestants: list[Contestant] = []
        for one in models:
            contestants += our_contestants(
                one.label, one.account, one.model, bench.engines, bench.precisions, room, bench.threads, Path(scratch)
            )
            if bench.peers and one.account.config.correction is None:
                contestants += peer_contestants(one.account, bench.precisions, room, bench.threads)
        timings, bandwidth = race(contestants, bench.contexts, bench.tokens, bench.rounds, status.update)
        for contestant in contestants:
            contestant.close()
        read = [record for one in models for record in measure_prefill(one, bench.prefill)]
    if as_json:
        memory = [memory_record(one, context) for one in models for context in bench.contexts]
        decoded = [asdict(t) | {"tokens_per_second": t.tokens_per_second} for t in timings]
        print(to_json({"bandwidth": bandwidth, "decode": decoded, "prefill": read, "memory": memory}))
    else:
        print_decode(console, timings, bandwidth, bench.threads)
        print_memory(console, models, bench.contexts, bench.precisions)
        print_prefill(console, read)
    if plot is not None:
        draw(timings, read, bandwidth, plot)
        told.print(f"The picture: {plot}")


def open_models(words: Sequence[str]) -> list[Model]:
    """Runs, checkpoints and exported files; models of the paper by name, or `key=value`, with random weights."""
    paths = [word for word in words if Path(word).is_dir()]
    files = [word for word in words if Path(word).suffix == EXPORTED]
    named = [word for word in words if word not in (*paths, *files)]
    found = []
    for file in files:
        fields = asdict(read_gguf(file).config)
        config = build_settings(ModelConfig, {key: fields[key] for key in fields if key != "correction_bias"})
        found.append(Model(file, account(config), Path(file), None))
    for path in paths:
        checkpoint = open_checkpoint(Path(path))
        found.append(
            Model(
                path, account(checkpoint.native_config), checkpoint.model(), _text(checkpoint.config["train"]["data"])
            )
        )
    for entry in entries(named) if named else []:
        torch.manual_seed(0)
        found.append(Model(entry.name, entry.account, build_model(entry.account.config), None))
    return found


def measure_prefill(one: Model, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Every solver on prompts of these lengths: time, arithmetic, certificate."""
    if not isinstance(one.model, ContextReady):
        return []
    found = []
    for length in lengths:
        if one.text is not None and len(one.text) >= length:
            tokens_1T = one.text[None, :length]
        else:
            tokens_1T = torch.randint(one.account.config.vocab_size, (1, length))
        for solver in SOLVERS:
            prefill(one.model, tokens_1T, solver=solver)
            info = prefill(one.model, tokens_1T, solver=solver).info
            found.append(
                {"label": one.label, "asked": solver, "cost": info.cost, "certificate": info.certificate} | asdict(info)
            )
    return found


def memory_record(one: Model, context: int) -> dict[str, Any]:
    """Weights and state of a model, in bytes."""
    return {
        "label": one.label,
        "context": context,
        "parameters": one.account.parameters,
        "state": one.account.state_bytes(context),
        "kv_bytes_per_token": one.account.kv_bytes_per_token(),
    }


def print_decode(console: Any, timings: Sequence[Timing], bandwidth: float, threads: int) -> None:
    """The table of decode speeds."""
    from rich import box
    from rich.table import Table

    title = f"Decoding, batch 1, {threads} threads; this machine's memory reads {bandwidth / 1e9:.1f} GB/s"
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    for name in ("model", "engine"):
        table.add_column(name)
    for name in ("context", "tokens/s", "ms/token", "10–90 %", "MB/token", "GB/s", "of bandwidth", "growth"):
        table.add_column(name, justify="right")
    for t in timings:
        table.add_row(
            t.label,
            f"{t.engine} {t.precision}",
            f"{t.context:,}",
            f"{t.tokens_per_second:.1f}",
            f"{1e3 * t.seconds:.2f}",
            f"{1e3 * t.low:.2f}–{1e3 * t.high:.2f}",
            f"{t.bytes_per_token / 1e6:.1f}",
            f"{t.gigabytes_per_second:.1f}",
            f"{t.of_bandwidth:.2f}",
            f"{t.growth:.2f} ×",
        )
    console.print(table)
    console.print(regimes(timings))


def regimes(timings: Sequence[Timing]) -> str:
    """Which contestants the memory limits, which run from the processor's caches, and which their overhead limits."""
    kinds: dict[str, list[str]] = {"memory": [], "caches": [], "overhead": []}
    for t in timings:
        kind = "caches" if t.of_bandwidth > CACHED else "memory" if t.of_bandwidth >= BOUND else "overhead"
        kinds[kind].append(f"{t.label} {t.engine} {t.precision}")
    told = {
        "memory": "limited by memory, so that bytes decide",
        "caches": "small enough to be read from the processor's caches",
        "overhead": "limited by arithmetic or by the overhead of each layer",
    }
    return "\n".join(f"{told[kind]}: {', '.join(dict.fromkeys(names))}" for kind, names in kinds.items() if names)


def print_memory(console: Any, models: Sequence[Model], contexts: Sequence[int], precisions: Sequence[str]) -> None:
    """The table of what models hold."""
    from rich import box
    from rich.table import Table

    table = Table(title="Memory, MB", title_justify="left", box=box.SIMPLE)
    table.add_column("model")
    for precision in precisions:
        table.add_column(f"weights {precision}", justify="right")
    for context in contexts:
        table.add_column(f"state at {context:,}", justify="right")
    for one in models:
        weights = [f"{one.account.parameters * BITS[precision] / 8e6:.1f}" for precision in precisions]
        states = [f"{one.account.state_bytes(context) / 1e6:.2f}" for context in contexts]
        table.add_row(one.label, *weights, *states)
    console.print(table)


def print_prefill(console: Any, read: Sequence[dict[str, Any]]) -> None:
    """The table of prompt reading."""
    from rich import box
    from rich.table import Table

    if not read:
        return
    table = Table(title="Reading a prompt", title_justify="left", box=box.SIMPLE)
    for name in ("model", "solver"):
        table.add_column(name)
    for name in ("tokens", "ms", "tokens/s", "plain passes", "error about", "note"):
        table.add_column(name, justify="right")
    for one in read:
        table.add_row(
            one["label"],
            one["asked"],
            f"{one['tokens']:,}",
            f"{1e3 * one['seconds']:.1f}",
            f"{one['tokens'] / one['seconds']:.0f}",
            f"{one['cost']:.2f}",
            "exact" if one["exact"] else f"{one['certificate']:.1e}",
            one["note"],
        )
    console.print(table)


def draw(timings: Sequence[Timing], read: Sequence[dict[str, Any]], bandwidth: float, out: Path) -> None:
    """Draw time a token, against context if there are several, and prompts against length, into a PNG, SVG or PDF."""
    if out.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ContextReadyError(f"{out} has no ending that says how to draw; give a name ending in .png, .svg or .pdf.")
    matplotlib = require("matplotlib", "plot")
    matplotlib.use("Agg")
    pyplot: Any = require("matplotlib.pyplot", "plot")
    figure, panels = pyplot.subplots(1, 2 if read else 1, figsize=(12 if read else 7.5, 4.8), squeeze=False)
    axes = panels[0][0]
    contexts = sorted({t.context for t in timings})
    names = list(dict.fromkeys((t.label, t.engine, t.precision) for t in timings))
    if len(contexts) == 1:
        # Against one context there is nothing to draw a line along.
        axes.barh([" ".join(name) for name in names], [1e3 * t.seconds for t in timings])
        axes.invert_yaxis()
        axes.set(xlabel=f"ms per token after {contexts[0]:,}")
    else:
        for name in names:
            mine = [t for t in timings if (t.label, t.engine, t.precision) == name]
            axes.plot([t.context for t in mine], [1e3 * t.seconds for t in mine], marker="o", label=" ".join(name))
        axes.set(xlabel="tokens in the context", ylabel="ms per token")
        _ticks(axes, contexts)
    axes.set_title(f"Decoding; memory reads {bandwidth / 1e9:.0f} GB/s", fontsize=10)
    if read:
        for label, solver in dict.fromkeys((one["label"], one["asked"]) for one in read):
            mine_read = [one for one in read if (one["label"], one["asked"]) == (label, solver)]
            panels[0][1].plot(
                [one["tokens"] for one in mine_read],
                [1e3 * one["seconds"] for one in mine_read],
                marker="o",
                label=f"{label} {solver}",
            )
        panels[0][1].set(xlabel="tokens in the prompt", ylabel="ms")
        _ticks(panels[0][1], sorted({one["tokens"] for one in read}))
        panels[0][1].set_title("Reading a prompt", fontsize=10)
    for panel in panels[0]:
        panel.grid(alpha=0.25)
        if panel.get_legend_handles_labels()[0]:
            panel.legend(frameon=False, fontsize=7)
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)
    pyplot.close(figure)


def _ticks(axes: Any, numbers: Sequence[int]) -> None:
    """A logarithmic axis with a tick at each number that was measured, and heights from 0 on."""
    axes.set_xscale("log")
    axes.set_xticks(numbers, [f"{number:,}" for number in numbers])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)


def _text(folder: str) -> torch.Tensor | None:
    """Validation ids of prepared data, if the data is still there."""
    from contextready.data.shards import Data

    try:
        row = Data(Path(folder), verify=[]).row("val")
    except ContextReadyError:
        return None
    return torch.from_numpy(row.read(0, min(len(row), 2**16)).astype("int64"))


def _check(bench: Bench) -> None:
    for given, known in ((bench.engines, ENGINES), (bench.precisions, tuple(BITS))):
        for name in given:
            if name not in known:
                raise ContextReadyError(f"There is no '{name}'; {nearest(name, known)}")
    for name in ("contexts", "prefill"):
        if any(value < 1 for value in getattr(bench, name)):
            raise ContextReadyError(f"--{name} are numbers of tokens; give at least 1.")
    if bench.tokens < 1 or bench.rounds < 1 or bench.threads < 1 or not bench.contexts:
        raise ContextReadyError("--tokens, --rounds and --threads must be at least 1, and one context is needed.")
