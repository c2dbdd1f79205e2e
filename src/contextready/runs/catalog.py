"""The cost of the paper's models, or of any other configuration, next to the figures that the paper prints."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from contextready.errors import ContextReadyError, nearest
from contextready.formats.limits import check_count, shown
from contextready.model.config import ModelConfig
from contextready.model.cost import Account, account
from contextready.runs.paper_models import CACHE_PAIRS, PAPER_MODELS, PaperModel
from contextready.settings import build_settings, parse_assignments

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}

LONGEST = 10**12
"""The longest context in tokens whose cost is computed."""


@dataclass(frozen=True)
class Entry:
    """A model and its cost."""

    name: str
    account: Account
    context: int
    paper: PaperModel | None
    """The paper's figures, if this is an unchanged model from the paper."""

    @property
    def paper_macs(self) -> int:
        """Multiply-accumulates per token, counted as in the paper's table for this model."""
        without_head = self.paper is not None and not self.paper.flops_with_head
        return self.account.macs - (self.account.macs_head if without_head else 0)


def entries(words: Sequence[str], context: int | None = None) -> list[Entry]:
    """Compute the cost of named models, changed by `key=value` settings if any, or of one model given by settings."""
    if context is not None:
        check_count("--context", context, 1, LONGEST)
    names = [word for word in words if "=" not in word]
    settings = parse_assignments([word for word in words if "=" in word])
    if settings and not names:
        return [Entry("this configuration", account(build_settings(ModelConfig, settings)), context or 1024, None)]
    chosen = []
    for name in names or PAPER_MODELS:
        if name not in PAPER_MODELS:
            raise ContextReadyError(
                f"There is no model '{shown(name)}' in the paper; {nearest(name, list(PAPER_MODELS))}"
            )
        paper = PAPER_MODELS[name]
        config = build_settings(ModelConfig, asdict(paper.config) | settings)
        label = " ".join([name, *(f"{key}={value}" for key, value in settings.items())])
        chosen.append(Entry(label, account(config), context or paper.context, None if settings else paper))
    return chosen


def as_record(entry: Entry, dtype: torch.dtype) -> dict[str, Any]:
    """Return one entry as plain JSON values."""
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
    """Return the paper's cache comparisons: in each pair, how much smaller the context-ready model's cache is."""

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
    """Format 121139200 as "121M", with as many decimals as `like` has (default: one below ten million)."""
    digits = (like or ("0M" if count >= 10_000_000 else "0.0M")).partition(".")[2]
    return f"{count / 1e6:.{max(0, len(digits) - 1)}f}M"
