"""`crt info`: what a model costs, beside what the paper prints."""

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from contextready.cli.console import make_console
from contextready.cli.options import Verbs, verb

if TYPE_CHECKING:
    import torch

    from contextready.runs.catalog import Entry


def add(verbs: Verbs) -> None:
    """Describe `crt info`."""
    from contextready.model.config import ModelConfig
    from contextready.model.correction import describe_corrections
    from contextready.settings import describe_settings

    info = verb(
        verbs,
        "info",
        "what a model costs: FLOPs, parameters, cache",
        "Print FLOPs per token, parameters and cache bytes of models, without allocating weights.\n"
        "With no argument: every model of the paper, beside the paper's figures.",
        f"settings:\n{describe_settings(ModelConfig)}\n\n"
        f"corrections:\n{describe_corrections()}\n\n"
        "examples:\n"
        "  crt info owt-d5-c1120\n"
        "  crt info owt-d5-c1120 owt-n12-c768 --dtype bfloat16\n"
        "  crt info vocab_size=4096 width=128 layers=1 heads=4 correction=add",
    )
    info.add_argument("what", nargs="*", help="names of the paper's models, or settings key=value, or both")
    info.add_argument("--context", type=int, help="tokens in the context (default: the model's block size, or 1024)")
    info.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16", "float64"], default="float32", help="type of the cache"
    )
    info.add_argument("--json", action="store_true", help="print one JSON line instead of a table")
    info.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    print_info(options.what, options.context, options.dtype, options.json)


def print_info(words: Sequence[str], context: int | None, dtype_name: str, as_json: bool) -> None:
    """Print the cost of the models asked for: one in detail, several as a table, all of the paper's by default."""
    from contextready.runs.catalog import DTYPES, as_record, cache_ratios, entries

    dtype, models = DTYPES[dtype_name], entries(words, context)
    if as_json:
        whole_paper: dict[str, Any] = {} if words else {"cache_ratios": cache_ratios()}
        print(json.dumps({"models": [as_record(entry, dtype) for entry in models]} | whole_paper))
    elif len(models) == 1:
        _print_one(models[0], dtype)
    else:
        _print_table(models, dtype, with_pairs=not words)


def _print_one(entry: "Entry", dtype: "torch.dtype") -> None:
    from rich.table import Table

    from contextready.runs.catalog import millions

    a, c, T = entry.account, entry.account.config, entry.context
    architecture = "transformer" if c.correction is None else f"context-ready, correction {c.correction}"
    table = Table(title=f"{entry.name}: {architecture}", show_header=False, title_justify="left")
    table.add_row("shape", f"layers {c.layers}, width {c.width}, heads {c.heads}, window {c.window or 'all'}")
    for label, macs in (("blocks", a.macs_blocks), ("correction", a.macs_correction), ("head", a.macs_head)):
        table.add_row(f"  {label}", f"{macs:,}")
    counted, like = entry.paper_macs, entry.paper.flops if entry.paper else None
    without_head = " (no head)" if counted != a.macs else ""
    table.add_row(f"FLOPs per token, as the paper counts{without_head}", f"{counted:,}  ({millions(counted, like)})")
    table.add_row("  blocks and correction", f"{a.width_squared_coefficient:g} C²")
    table.add_row(f"  attention at context {T:,}", f"{a.macs_attention(T):,}")
    table.add_row(f"FLOPs per token, exact at context {T:,}", f"{a.macs_exact(T):,}")
    table.add_row("parameters", f"{a.parameters:,}  ({millions(a.parameters)})")
    table.add_row("  token embedding", f"{a.embedding_parameters:,}")
    table.add_row("  correction", f"{a.correction_parameters:,}")
    table.add_row(f"KV bytes per token, {str(dtype).removeprefix('torch.')}", f"{a.kv_bytes_per_token(dtype):,}")
    table.add_row(f"state bytes at context {T:,}", f"{a.state_bytes(T, dtype):,}")
    if entry.paper is not None:
        printed = [
            *([f"FLOPs {entry.paper.flops}"] if entry.paper.flops else []),
            *([f"{entry.paper.coefficient}C²"] if entry.paper.coefficient else []),
            *([f"parameters {entry.paper.parameters}"] if entry.paper.parameters else []),
        ]
        table.add_row(f"paper ({entry.paper.tables})", ", ".join(printed) or "prints no cost")
    console = make_console(tables=True)
    console.print(table)
    console.print("FLOPs are multiply-accumulates, as in the paper.")


def _print_table(entries: "Sequence[Entry]", dtype: "torch.dtype", with_pairs: bool) -> None:
    from rich import box
    from rich.table import Table

    from contextready.runs.catalog import cache_ratios, millions
    from contextready.runs.paper_models import PaperModel

    table = Table(box=box.SIMPLE, title="Multiply-accumulates (the paper's FLOPs) per token", title_justify="left")
    table.add_column("model", no_wrap=True)
    for column in ("C²", "FLOPs", "exact", "params", "KV bytes"):
        table.add_column(column, justify="right", no_wrap=True)
    for entry in entries:
        a, paper = entry.account, entry.paper or PaperModel(entry.account.config, "", entry.context)
        flops = millions(entry.paper_macs, paper.flops)
        table.add_row(
            entry.name,
            _beside(f"{a.width_squared_coefficient:g}", paper.coefficient),
            _beside(flops, paper.flops) + ("" if paper.flops_with_head else "*"),
            millions(a.macs_exact(entry.context)),
            _beside(millions(a.parameters), paper.parameters),
            f"{a.kv_bytes_per_token(dtype):,}",
        )
    console = make_console(tables=True)
    console.print(table)
    console.print("✓ as the paper prints it. C²: blocks and correction. KV bytes: per token.")
    console.print("exact: with head and attention, at the model's block size or --context.")
    if any(entry.paper and not entry.paper.flops_with_head for entry in entries):
        console.print("* without the head, as the paper's Wikipedia tables count.")
    if with_pairs:
        for row in cache_ratios():
            console.print(
                f"Cache: {row['context_ready']} holds {row['cache_ratio']:.1f}× less than {row['transformer']} "
                f"(paper: {row['paper']})."
            )


def _beside(ours: str, printed: str | int | None) -> str:
    """Our figure, and how it compares with the paper's."""
    if printed is None:
        return ours
    return f"{ours} ✓" if ours == str(printed) else f"{ours} (paper: {printed})"
