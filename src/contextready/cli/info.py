"""`crt info`: print what a model costs, next to the figures that the paper prints."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from contextready.cli.console import make_console
from contextready.cli.options import Verbs, verb, whole_number
from contextready.cli.paper import figure_records, print_figures, print_table, table_records
from contextready.errors import ContextReadyError
from contextready.files import to_json

if TYPE_CHECKING:
    import torch

    from contextready.runs.catalog import Entry


EXAMPLES = """
crt info                                             # all models from the paper
crt info owt-d5-c1120
crt info owt-d5-c1120 owt-n12-c768 --dtype bfloat16
crt info vocab_size=4096 width=128 layers=1 heads=4 correction=add
crt info owt-d5-c1120 --paper                        # with the perplexities that the paper prints
crt info --table main                                # one table of the paper
"""


def add(verbs: Verbs) -> None:
    """Describe `crt info`."""
    info = verb(
        verbs,
        "info",
        "print what a model costs: FLOPs, parameters, cache",
        "Print the FLOPs per token, parameters and cache size of models without allocating their\n"
        "weights. Without arguments, list every model from the paper next to the paper's figures.\n"
        "The paper counts one multiply-accumulate as one FLOP, and so does this command.",
        EXAMPLES,
        _notes,
    )
    info.add_argument("what", nargs="*", help="names of models from the paper, settings as key=value, or both")
    info.add_argument(
        "--context",
        type=whole_number,
        metavar="N",
        help="tokens in the context (default: the model's block size, or 1024)",
    )
    info.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16", "float64"],
        default="float32",
        help="number format of the cache",
    )
    info.add_argument(
        "--paper", action="store_true", help="also print the figures of each model from the paper's tables"
    )
    info.add_argument(
        "--table",
        nargs="?",
        const=True,
        metavar="NAME",
        help="print this table of the paper with notes instead; without NAME, list the tables",
    )
    info.add_argument("--json", action="store_true", help="print one line of JSON instead of a table")
    info.set_defaults(run=_run)


def _notes() -> str:
    from contextready.model.config import ModelConfig
    from contextready.model.correction import describe_corrections
    from contextready.settings import describe_settings

    return f"settings:\n{describe_settings(ModelConfig)}\n\ncorrections:\n{describe_corrections()}"


def _run(options: argparse.Namespace) -> None:
    if options.table is None:
        print_info(options.what, options.context, options.dtype, options.json, options.paper)
        return
    if options.what or options.paper:
        raise ContextReadyError("--table prints a table of the paper; leave out --paper and the names of models.")
    name = None if options.table is True else options.table
    if options.json:
        print(to_json({"tables": table_records(name)}))
    else:
        print_table(name)


def print_info(
    words: Sequence[str], context: int | None, dtype_name: str, as_json: bool, with_paper: bool = False
) -> None:
    """Print the cost of one model in detail or of several as a table; by default, of all models from the paper.

    `with_paper` adds what the paper's tables print for them.
    """
    from contextready.runs.catalog import DTYPES, as_record, cache_ratios, entries

    dtype, models = DTYPES[dtype_name], entries(words, context)
    if with_paper and any(entry.paper is None for entry in models):
        raise ContextReadyError(
            "--paper prints the paper's figures, which exist for unchanged models only; leave out the settings "
            "(key=value), and name models from the paper."
        )
    if as_json:
        records = [as_record(entry, dtype) for entry in models]
        if with_paper:
            records = [record | {"paper_figures": figure_records(record["name"])} for record in records]
        whole_paper: dict[str, Any] = {} if words else {"cache_ratios": cache_ratios()}
        print(to_json({"models": records} | whole_paper))
        return
    if len(models) == 1:
        _print_one(models[0], dtype)
    else:
        _print_table(models, dtype, with_pairs=not words)
    if with_paper:
        print_figures([entry.name for entry in models])


def _print_one(entry: "Entry", dtype: "torch.dtype") -> None:
    from rich.table import Table

    from contextready.runs.catalog import millions

    a, c, T = entry.account, entry.account.config, entry.context
    kind = "transformer" if c.correction is None else f"context-ready, correction {c.correction}"
    table = Table(title=f"{entry.name}: {kind}", show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column()
    shared = "" if c.shared_heads == c.heads else f" (of keys and values {c.shared_heads})"
    table.add_row("shape", f"layers {c.layers}, width {c.width}, heads {c.heads}{shared}")
    table.add_row("attention", "full" if c.window is None else f"window of {c.window} tokens")
    counted, like = entry.paper_macs, entry.paper.flops if entry.paper else None
    without_head = " (no head)" if counted != a.macs else ""
    table.add_row(f"FLOPs per token, as in the paper{without_head}", f"{counted:,}  ({millions(counted, like)})")
    for label, macs in (("blocks", a.macs_blocks), ("correction", a.macs_correction), ("prediction head", a.macs_head)):
        table.add_row(f"  {label}", f"{macs:,}")
    table.add_row("  blocks and correction", f"{a.width_squared_coefficient:g} C² (C = width)")
    table.add_row(f"FLOPs with attention, context {T:,}", f"{a.macs_exact(T):,}")
    table.add_row("  attention", f"{a.macs_attention(T):,}")
    table.add_row("parameters", f"{a.parameters:,}  ({millions(a.parameters)})")
    table.add_row("  token embedding", f"{a.embedding_parameters:,}")
    table.add_row("  correction", f"{a.correction_parameters:,}")
    dtype_name = str(dtype).removeprefix("torch.")
    table.add_row(f"cache per token, {dtype_name}", f"{a.kv_bytes_per_token(dtype):,} bytes")
    table.add_row(f"state at context {T:,}", f"{a.state_bytes(T, dtype):,} bytes")
    if entry.paper is not None:
        printed = [
            *([f"FLOPs {entry.paper.flops}"] if entry.paper.flops else []),
            *([f"{entry.paper.coefficient}C²"] if entry.paper.coefficient else []),
            *([f"parameters {entry.paper.parameters}"] if entry.paper.parameters else []),
        ]
        table.add_row("printed in the paper", f"{', '.join(printed) or 'no cost'} (tables: {entry.paper.tables})")
    console = make_console(tables=True)
    console.print(table)
    console.print("FLOPs = multiply-accumulates, as in the paper, which leaves out attention scores.")
    if counted != a.macs:
        console.print("(no head) = without the prediction head, as in the paper's Wikipedia tables.")
    carried = "" if c.correction is None else ", plus the z that the correction reads"
    console.print(f"cache = keys and values. state = the cache at this context length{carried}.")


def _print_table(entries: "Sequence[Entry]", dtype: "torch.dtype", with_pairs: bool) -> None:
    from rich import box
    from rich.table import Table

    from contextready.runs.catalog import cache_ratios, millions
    from contextready.runs.paper_models import PaperModel

    table = Table(box=box.SIMPLE, title="Cost of models per token", title_justify="left")
    table.add_column("model", no_wrap=True)
    for column in ("C²", "FLOPs", "exact", "params", "KV bytes"):
        table.add_column(column, justify="right", no_wrap=True)
    for entry in entries:
        a, paper = entry.account, entry.paper or PaperModel(entry.account.config, "", entry.context)
        flops = millions(entry.paper_macs, paper.flops)
        table.add_row(
            entry.name,
            _compare(f"{a.width_squared_coefficient:g}", paper.coefficient),
            _compare(flops, paper.flops) + ("" if paper.flops_with_head else "*"),
            millions(a.macs_exact(entry.context)),
            _compare(millions(a.parameters), paper.parameters),
            f"{a.kv_bytes_per_token(dtype):,}",
        )
    console = make_console(tables=True)
    console.print(table)
    if any("✓" in cell for column in table.columns for cell in column.cells if isinstance(cell, str)):
        console.print("✓ = the paper prints the same figure.")
    dtype_name = str(dtype).removeprefix("torch.")
    console.print("C² = FLOPs of blocks and correction, in units of width².")
    console.print("FLOPs = multiply-accumulates of blocks, correction and prediction head, as in the paper.")
    console.print("exact = FLOPs with head and attention, at the model's block size or --context.")
    console.print(f"params = parameters. KV bytes = keys and values in the cache, per token, in {dtype_name}.")
    if any(entry.paper and not entry.paper.flops_with_head for entry in entries):
        console.print("* = without the prediction head, as in the paper's Wikipedia tables.")
    if with_pairs:
        for row in cache_ratios():
            console.print(
                f"The cache of {row['context_ready']} is {row['cache_ratio']:.1f}× smaller than that of "
                f"{row['transformer']} (paper: {row['paper']})."
            )


def _compare(ours: str, printed: str | int | None) -> str:
    """Our figure, marked if it equals the paper's and followed by the paper's if it does not."""
    if printed is None:
        return ours
    return f"{ours} ✓" if ours == str(printed) else f"{ours} (paper: {printed})"
