"""`crt bench`: decode, prefill and memory of models, as tables, one JSON line or a picture."""

import argparse
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from contextready.cli.console import make_console
from contextready.cli.options import Verbs, parse_numbers, verb
from contextready.errors import ContextReadyError, nearest
from contextready.files import to_json

if TYPE_CHECKING:
    from rich.console import Console

    from contextready.bench.models import BenchModel
    from contextready.bench.race import Contestant, Timing

PAIRS = ("owt-d1-c2048", "owt-n6-c1088", "owt-d5-c1120", "owt-n12-c768")
"""The paper's timed pairs: what is measured when nothing is named."""
BOUND = 0.7
"""From this part of the bandwidth on, memory is what limits."""
CACHED = 1.1
"""More than memory gives: the weights are in the caches."""
FILE_WIDTH = 120
"""A table that goes into a file has room, whatever the width of a terminal that is not there."""


def add(verbs: Verbs) -> None:
    """Describe `crt bench`."""
    bench = verb(
        verbs,
        "bench",
        "how fast models generate here",
        "Measure decoding, reading prompts and memory. Contestants take turns, beside a probe of the\n"
        "memory's bandwidth. Without a model: the paper's two timed pairs, with random weights.",
        "examples:\n"
        "  crt bench runs/mini-d1 --prefill 128,256\n"
        "  crt bench owt-d1-c2048 owt-n6-c1088 --engines ggml --precisions f32,q8_0 --peers\n"
        "  crt bench vocab_size=4096 width=256 layers=1 heads=4 correction=add --contexts 100,1000 --plot bench.png",
    )
    bench.add_argument("what", nargs="*", help="runs, .gguf files, models of the paper by name, or settings key=value")
    bench.add_argument("--engines", default="eager,ggml", help="of eager, compiled, ggml (default: eager,ggml)")
    bench.add_argument("--precisions", default="f32,q8_0", help="of f32, f16, q8_0, q4_0, for ggml (default: f32,q8_0)")
    bench.add_argument("--contexts", default="256", help="tokens already read (default: 256)")
    bench.add_argument("--tokens", type=int, default=32, help="steps timed in a round (default: 32)")
    bench.add_argument("--rounds", type=int, default=5, help="turns of every contestant (default: 5)")
    bench.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads (default: all cores)")
    bench.add_argument("--peers", action="store_true", help="Hugging Face and llama.cpp beside every transformer")
    bench.add_argument("--prefill", default="", help="lengths of prompts to read with every solver")
    bench.add_argument("--plot", type=Path, help="a picture to draw: .png, .svg or .pdf")
    bench.add_argument("--json", action="store_true", help="print one JSON line instead of tables")
    bench.set_defaults(run=_run, more_words="what")


def _run(options: argparse.Namespace) -> None:
    bench = Bench(
        what=options.what,
        engines=options.engines.split(","),
        precisions=options.precisions.split(","),
        contexts=parse_numbers("--contexts", options.contexts, "256,1024", may_be_empty=True),
        tokens=options.tokens,
        rounds=options.rounds,
        threads=options.threads,
        peers=options.peers,
        prefill=parse_numbers("--prefill", options.prefill, "256,1024", may_be_empty=True),
    )
    run_bench(bench, options.json, options.plot)


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


def run_bench(bench: Bench, as_json: bool = False, plot: Path | None = None) -> None:
    """Measure, then print tables or one JSON line, and draw what was measured."""
    import torch

    from contextready.bench.models import measure_prefill, memory_record, open_models
    from contextready.bench.plot import draw
    from contextready.bench.race import race

    _check(bench)
    console, told = make_console(tables=True, file_width=FILE_WIDTH), make_console(stderr=True)
    torch.set_num_threads(bench.threads)
    with told.status("building models") as status, tempfile.TemporaryDirectory() as scratch, torch.inference_mode():
        models = open_models(bench.what or PAIRS)
        contestants = _contestants(bench, models, Path(scratch))
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


def _contestants(bench: Bench, models: "Sequence[BenchModel]", scratch: Path) -> "list[Contestant]":
    from contextready.bench.race import Hardware, engine_contestants, peer_contestants

    hardware = Hardware(max(bench.contexts) + bench.tokens + 8, bench.threads, scratch)
    contestants: list[Contestant] = []
    for one in models:
        contestants += engine_contestants(
            one.label, one.account, one.model, bench.engines, bench.precisions, hardware=hardware
        )
        if bench.peers and one.account.config.correction is None:
            contestants += peer_contestants(one.account, bench.precisions, hardware)
    return contestants


def print_decode(console: "Console", timings: "Sequence[Timing]", bandwidth: float, threads: int) -> None:
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


def regimes(timings: "Sequence[Timing]") -> str:
    """Which contestants the memory limits, which run from the processor's caches, and which their overhead limits."""
    by_regime: dict[str, list[str]] = {"memory": [], "caches": [], "overhead": []}
    for t in timings:
        regime = "caches" if t.of_bandwidth > CACHED else "memory" if t.of_bandwidth >= BOUND else "overhead"
        by_regime[regime].append(f"{t.label} {t.engine} {t.precision}")
    told = {
        "memory": "limited by memory, so that bytes decide",
        "caches": "small enough to be read from the processor's caches",
        "overhead": "limited by arithmetic or by the overhead of each layer",
    }
    return "\n".join(
        f"{told[regime]}: {', '.join(dict.fromkeys(names))}" for regime, names in by_regime.items() if names
    )


def print_memory(
    console: "Console", models: "Sequence[BenchModel]", contexts: Sequence[int], precisions: Sequence[str]
) -> None:
    """The table of what models hold."""
    from rich import box
    from rich.table import Table

    from contextready.bench.race import BITS

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


def print_prefill(console: "Console", read: Sequence[dict[str, Any]]) -> None:
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


def _check(bench: Bench) -> None:
    from contextready.bench.race import BITS
    from contextready.infer.engine import ENGINES

    for given, known in ((bench.engines, ENGINES), (bench.precisions, tuple(BITS))):
        for name in given:
            if name not in known:
                raise ContextReadyError(f"There is no '{name}'; {nearest(name, known)}")
    for name in ("contexts", "prefill"):
        if any(value < 1 for value in getattr(bench, name)):
            raise ContextReadyError(f"--{name} are numbers of tokens; give at least 1.")
    if bench.tokens < 1 or bench.rounds < 1 or bench.threads < 1 or not bench.contexts:
        raise ContextReadyError("--tokens, --rounds and --threads must be at least 1, and one context is needed.")
