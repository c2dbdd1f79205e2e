"""`crt bench`: measures decoding, prompt reading and memory, and shows tables, a JSON document or a plot."""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from contextready.cli.console import make_console
from contextready.cli.options import Verbs, parse_numbers, verb, whole_number
from contextready.cli.progress import ProgressReport
from contextready.errors import ContextReadyError, nearest
from contextready.files import to_json
from contextready.formats.limits import check_count, check_range, shown

if TYPE_CHECKING:
    from rich.console import Console

    from contextready.bench.models import BenchModel
    from contextready.bench.race import Contestant, Timing

PAIRS = ("owt-d1-c2048", "owt-n6-c1088", "owt-d5-c1120", "owt-n12-c768")
"""The paper's timed pairs, which are measured if no model is named."""
EXAMPLES = """
crt bench runs/mini-d1 --prefill 128,256
crt bench owt-d1-c2048 owt-n6-c1088 --engines ggml --precisions f32,q8_0 --peers
crt bench vocab_size=4096 width=256 layers=1 heads=4 correction=add --contexts 100,1000 --plot bench.png
"""
LONGEST = 2**24
"""The longest context or prompt in tokens."""
MOST = {"tokens": 10**6, "rounds": 10**5, "threads": 512}
"""The largest value of each number; ggml runs at most 512 threads."""
LONGEST_WAIT = 1e6
"""The largest limit on reading a prompt, in seconds."""
BOUND = 0.7
"""From this fraction of the bandwidth on, decoding counts as limited by memory."""
CACHED = 1.1
"""Above this fraction, which memory cannot deliver, the weights must be in the processor's caches."""
FILE_WIDTH = 120
"""Width of tables that are not printed to a terminal."""


def add(verbs: Verbs) -> None:
    """Describe `crt bench`."""
    bench = verb(
        verbs,
        "bench",
        "measure how fast models generate on this machine",
        "Measure decoding speed, prompt reading and memory. The engines being compared take turns,\n"
        "and the memory bandwidth is measured alongside. If no model is named, measure the paper's\n"
        "two timed pairs with random weights.",
        EXAMPLES,
    )
    bench.add_argument(
        "what", nargs="*", help="runs, converted models, .gguf files, names of paper models, or key=value"
    )
    bench.add_argument("--engines", default="eager,ggml", help="comma-separated list of eager, compiled, ggml")
    bench.add_argument(
        "--precisions",
        metavar="LIST",
        help="comma-separated list of f32, f16, q8_0, q4_0, q4_k for ggml, and bf16 for eager and compiled, which are "
        "always measured in f32 too (default: f32,q8_0, and bf16 if the processor multiplies it natively)",
    )
    bench.add_argument("--contexts", default="256", help="context lengths in tokens, separated by commas")
    bench.add_argument("--tokens", type=whole_number, default=32, help="number of tokens timed per round")
    bench.add_argument("--rounds", type=whole_number, default=5, help="number of rounds")
    bench.add_argument(
        "--threads",
        type=whole_number,
        help="number of threads (default: the fastest for the widest model, by a short measurement)",
    )
    bench.add_argument(
        "--peers",
        action="store_true",
        help="compare with Hugging Face and llama.cpp: transformers with Llama models of their shape, and converted "
        "Llama models with the plain model",
    )
    bench.add_argument(
        "--prefill",
        default="",
        metavar="LENGTHS",
        help="time every solver on prompts of these lengths, e.g. 128,256; random weights do not contract, so the "
        "correction of a model without training is made smaller for this until they do",
    )
    bench.add_argument(
        "--prefill-limit",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="cut off the reading of a prompt after this many seconds (default: 60)",
    )
    bench.add_argument("--plot", type=Path, help="write a plot to this file: .png, .svg or .pdf")
    bench.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    bench.set_defaults(run=_run, more_words="what")


def _run(options: argparse.Namespace) -> None:
    bench = Bench(
        what=options.what,
        engines=options.engines.split(","),
        precisions=_default_precisions() if options.precisions is None else options.precisions.split(","),
        contexts=parse_numbers("--contexts", options.contexts, "256,1024", LONGEST, may_be_empty=True),
        tokens=options.tokens,
        rounds=options.rounds,
        threads=options.threads,
        peers=options.peers,
        prefill=parse_numbers("--prefill", options.prefill, "256,1024", LONGEST, may_be_empty=True),
        prefill_limit=options.prefill_limit,
    )
    run_bench(bench, options.json, options.plot)


def _default_precisions() -> list[str]:
    import torch

    from contextready.device import multiplies_bf16

    return ["f32", *["bf16"] * multiplies_bf16(torch.device("cpu")), "q8_0"]


class Bench(NamedTuple):
    """What to measure."""

    what: Sequence[str]
    engines: Sequence[str]
    precisions: Sequence[str]
    contexts: Sequence[int]
    tokens: int
    rounds: int
    threads: int | None
    peers: bool
    prefill: Sequence[int]
    prefill_limit: float = 60.0


def run_bench(bench: Bench, as_json: bool = False, plot: Path | None = None) -> None:
    """Measure, then print tables or one JSON document, and write the plot."""
    import torch

    from contextready.bench.models import memory_record, open_models
    from contextready.bench.plot import draw
    from contextready.bench.prefill import measure_prefill
    from contextready.bench.race import race
    from contextready.infer.threads import torch_threads
    from contextready.plotting import check_picture

    _check(bench)
    if plot is not None:
        # Refused before measuring, which takes minutes.
        check_picture(plot)
    console, messages = make_console(tables=True, file_width=FILE_WIDTH), make_console(stderr=True)
    with messages.status("building models") as status, tempfile.TemporaryDirectory() as scratch:
        # Not in inference mode, because opening a pretrained model checks that gradients pass through it.
        models = open_models(bench.what or PAIRS, max(bench.contexts) + bench.tokens)
        threads = bench.threads or torch_threads(max(one.account.config.width for one in models))
        torch.set_num_threads(threads)
        with torch.inference_mode():
            contestants = _contestants(bench, models, threads, Path(scratch))
            timings, bandwidth = race(contestants, bench.contexts, bench.tokens, bench.rounds, status.update)
        for contestant in contestants:
            contestant.close()
    with ProgressReport("tokens") as progress, torch.inference_mode():
        read = [
            record
            for one in models
            for record in measure_prefill(
                one, bench.prefill, bench.prefill_limit, progress.advance, "bf16" in bench.precisions
            )
        ]
    if as_json:
        memory = [memory_record(one, context) for one in models for context in bench.contexts]
        decoded = [asdict(t) | {"tokens_per_second": t.tokens_per_second} for t in timings]
        print(to_json({"bandwidth": bandwidth, "decode": decoded, "prefill": read, "memory": memory}))
    else:
        print_decode(console, timings, bandwidth, threads)
        print_memory(console, models, bench.contexts, bench.precisions)
        print_prefill(console, read)
    if plot is not None:
        draw(timings, read, bandwidth, plot)
        messages.print(f"Wrote {plot}.")


def _contestants(bench: Bench, models: "Sequence[BenchModel]", threads: int, scratch: Path) -> "list[Contestant]":
    from contextready.bench.llama import is_llama
    from contextready.bench.race import Hardware, engine_contestants, peer_contestants

    hardware = Hardware(max(bench.contexts) + bench.tokens + 8, threads, scratch)
    contestants: list[Contestant] = []
    for one in models:
        contestants += engine_contestants(
            one.label, one.account, one.model, bench.engines, bench.precisions, hardware=hardware
        )
        config = one.account.config
        if bench.peers and (config.correction is None or is_llama(config)):
            contestants += peer_contestants(one.account, one.model, bench.precisions, hardware)
    return contestants


def print_decode(console: "Console", timings: "Sequence[Timing]", bandwidth: float, threads: int) -> None:
    """Print the table of decoding speeds."""
    from rich import box
    from rich.table import Table

    title = f"Decoding (batch 1, {threads} thread{'s' * (threads > 1)}). Memory bandwidth: {bandwidth / 1e9:.1f} GB/s"
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
    """Say what limits each engine: memory, overhead, or neither because its weights are in the processor's caches."""
    by_regime: dict[str, list[str]] = {"memory": [], "caches": [], "overhead": []}
    for t in timings:
        regime = "caches" if t.of_bandwidth > CACHED else "memory" if t.of_bandwidth >= BOUND else "overhead"
        by_regime[regime].append(f"{t.label} {t.engine} {t.precision}")
    headings = {
        "memory": "Limited by memory bandwidth",
        "caches": "Small enough for the processor's caches",
        "overhead": "Limited by arithmetic or by the overhead per layer",
    }
    return "\n".join(
        f"{headings[regime]}: {', '.join(dict.fromkeys(names))}" for regime, names in by_regime.items() if names
    )


def print_memory(
    console: "Console", models: "Sequence[BenchModel]", contexts: Sequence[int], precisions: Sequence[str]
) -> None:
    """Print the table of memory use."""
    from rich import box
    from rich.table import Table

    from contextready.bench.models import weight_bytes

    table = Table(title="Memory (MB)", title_justify="left", box=box.SIMPLE)
    table.add_column("model")
    for precision in precisions:
        table.add_column(f"weights {precision}", justify="right")
    for context in contexts:
        table.add_column(f"state at {context:,}", justify="right")
    for one in models:
        weights = [f"{weight_bytes(one.account, precision) / 1e6:.1f}" for precision in precisions]
        states = [f"{one.account.state_bytes(context) / 1e6:.2f}" for context in contexts]
        table.add_row(one.label, *weights, *states)
    console.print(table)


def print_prefill(console: "Console", read: Sequence[dict[str, Any]]) -> None:
    """Print the table of prompt reading."""
    from rich import box
    from rich.table import Table

    if not read:
        return
    table = Table(title="Reading a prompt", title_justify="left", box=box.SIMPLE)
    for name in ("model", "solver", "precision"):
        table.add_column(name)
    for name in ("tokens", "ms", "tokens/s", "plain passes", "estimated error", "note"):
        table.add_column(name, justify="right")
    for one in read:
        table.add_row(
            one["label"],
            one["asked"],
            one["precision"],
            f"{one['tokens']:,}",
            f"{1e3 * one['seconds']:.1f}",
            f"{one['tokens'] / one['seconds']:.0f}",
            "–" if one["cost"] is None else f"{one['cost']:.2f}",
            _error(one),
            one["note"],
        )
    console.print(table)
    scaled = {one["label"]: one["correction_factor"] for one in read if one["correction_factor"] != 1.0}
    if scaled:
        factors = ", ".join(f"{label} by {factor:g}" for label, factor in scaled.items())
        console.print(
            "Random weights do not contract. For this table, corrections were multiplied until they do, as trained "
            f"ones: {factors}."
        )


def _error(one: dict[str, Any]) -> str:
    """The estimated error of a prompt that was read, as text."""
    if one["certificate"] is None:
        return "–"
    return "exact" if one["exact"] else f"{one['certificate']:.1e}"


def _check(bench: Bench) -> None:
    from contextready.bench.race import BITS
    from contextready.infer.engine import ENGINES

    for what, given, known in (("engine", bench.engines, ENGINES), ("precision", bench.precisions, tuple(BITS))):
        for name in given:
            if name not in known:
                raise ContextReadyError(f"Unknown {what} '{shown(name)}'; {nearest(name, known)}")
    for option in ("contexts", "prefill"):
        for value in getattr(bench, option):
            check_count(f"--{option}", value, 1, LONGEST)
    if not bench.contexts:
        raise ContextReadyError("--contexts is empty; give at least one context length, for example 256.")
    check_range("--prefill-limit", bench.prefill_limit, 0.1, LONGEST_WAIT)
    for option, most in MOST.items():
        if getattr(bench, option) is not None:
            check_count(f"--{option}", getattr(bench, option), 1, most)
