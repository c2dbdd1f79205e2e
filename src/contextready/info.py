"""`crt info`: what a model costs, beside what the paper prints."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from contextready.errors import ContextReadyError
from contextready.model.accounting import Account, account
from contextready.model.build import ModelConfig
from contextready.reproduce.paper_models import CACHE_PAIRS, PAPER_MODELS, PaperModel
from contextready.settings import build_settings, nearest, parse_assignments

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True)
class Entry:
    """One line of `crt info`."""

    name: str
    account: Account
    context: int
    paper: PaperModel | None
    """What the paper says, for a model of the paper as it stands there."""

    @property
    def paper_macs(self) -> int:
        """Multiply-accumulates per token as the table this model stands in counts them."""
        without_head = self.paper is not None and not self.paper.flops_with_head
        return self.account.macs - (self.account.macs_head if without_head else 0)


def entries(words: Sequence[str], context: int | None = None) -> list[Entry]:
    """Account for named models, or the one described by `key=value` settings (alone, or changing named ones)."""
    if context is not None and context < 1:
        raise ContextReadyError(f"--context {context} is too small; give the number of tokens, at least 1.")
    names = [word for word in words if "=" not in word]
    settings = parse_assignments([word for word in words if "=" in word])
    if settings and not names:
        return [Entry("this configuration", account(build_settings(ModelConfig, settings)), context or 1024, None)]
    chosen = []
    for name in names or PAPER_MODELS:
        if name not in PAPER_MODELS:
            raise ContextReadyError(f"There is no model '{name}' in the paper; {nearest(name, list(PAPER_MODELS))}")
        paper = PAPER_MODELS[name]
        config = build_settings(ModelConfig, asdict(paper.config) | settings)
        label = " ".join([name, *(f"{key}={value}" for key, value in settings.items())])
        chosen.append(Entry(label, account(config), context or paper.context, None if settings else paper))
    return chosen


def as_record(entry: Entry, dtype: torch.dtype) -> dict[str, Any]:
    """One entry as plain JSON values."""
    a, paper = entry.account, entry.paper
    return {
        "name": entry.name,
        "config": asdict(a.config),
        "context": entry.context,
        "macs_per_token": a.macs,
        "macs_blocks": a.macs_blocks,
        "macs_correction": a.macs_correction,
        "macs_head": a.macs_head,
        "macs_attention_at_context": a.macs_attention(entry.context),
        "macs_per_token_exact": a.macs_exact(entry.context),
        "width_squared_coefficient": a.width_squared_coefficient,
        "parameters": a.parameters,
        "embedding_parameters": a.embedding_parameters,
        "correction_parameters": a.correction_parameters,
        "dtype": str(dtype).removeprefix("torch."),
        "kv_bytes_per_token": a.kv_bytes_per_token(dtype),
        "state_bytes_at_context": a.state_bytes(entry.context, dtype),
        "paper": None
        if paper is None
        else {
            "tables": paper.tables,
            "flops": paper.flops,
            "flops_with_head": paper.flops_with_head,
            "coefficient": paper.coefficient,
            "parameters": paper.parameters,
        },
    }


def cache_ratios() -> list[dict[str, Any]]:
    """The paper's cache comparisons: how many times less the context-ready model of each pair holds per token."""

    def kv_bytes(name: str) -> int:
        return account(PAPER_MODELS[name].config).kv_bytes_per_token()

    return [
        {
            "context_ready": pair.context_ready,
            "transformer": pair.transformer,
            "cache_ratio": kv_bytes(pair.transformer) / kv_bytes(pair.context_ready),
            "paper": pair.ratio,
        }
        for pair in CACHE_PAIRS
    ]


def millions(count: int, like: str | None = None) -> str:
    """121139200 as "121M"; with as many digits as `like` has, or one below ten million."""
    digits = (like or ("0M" if count >= 10_000_000 else "0.0M")).partition(".")[2]
    return f"{count / 1e6:.{max(0, len(digits) - 1)}f}M"


def print_info(words: Sequence[str], context: int | None, dtype_name: str, as_json: bool) -> None:
    """Print the cost of the models asked for: one in detail, several as a table, all of the paper's by default."""
    dtype, found = DTYPES[dtype_name], entries(words, context)
    if as_json:
        whole_paper: dict[str, Any] = {} if words else {"cache_ratios": cache_ratios()}
        print(json.dumps({"models": [as_record(entry, dtype) for entry in found]} | whole_paper))
    elif len(found) == 1:
        _print_one(found[0], dtype)
    else:
        _print_table(found, dtype, with_pairs=not words)


def _print_one(entry: Entry, dtype: torch.dtype) -> None:
    from rich.console import Console
    from rich.table import Table

    a, c, T = entry.account, entry.account.config, entry.context
    kind = "transformer" if c.correction is None else f"context-ready, correction {c.correction}"
    table = Table(title=f"{entry.name}: {kind}", show_header=False, title_justify="left")
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
    console = Console()
    console.print(table)
    console.print("FLOPs are multiply-accumulates, as in the paper.")


def _print_table(found: Sequence[Entry], dtype: torch.dtype, with_pairs: bool) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE, title="Multiply-accumulates (the paper's FLOPs) per token", title_justify="left")
    table.add_column("model", no_wrap=True)
    for column in ("C²", "FLOPs", "exact", "params", "KV bytes"):
        table.add_column(column, justify="right", no_wrap=True)
    for entry in found:
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
    console = Console()
    console.print(table)
    console.print("✓ as the paper prints it. C²: blocks and correction. KV bytes: per token.")
    console.print("exact: with head and attention, at the model's block size or --context.")
    if any(entry.paper and not entry.paper.flops_with_head for entry in found):
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
