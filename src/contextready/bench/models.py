"""The models of a benchmark: loaded or created with random weights; prompt reading and memory are measured here."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from contextready.errors import ContextReadyError
from contextready.infer.engine import EXPORTED
from contextready.infer.ggml.file import read_gguf
from contextready.model.config import ModelConfig
from contextready.model.context_ready import ContextReady, build_model
from contextready.model.cost import Account, account
from contextready.runs.catalog import entries
from contextready.runs.checkpoint import Checkpoint, data_of, open_checkpoint
from contextready.settings import build_settings
from contextready.solve.prefill import SOLVERS, prefill

LONGEST_TEXT = 2**16
"""Largest number of tokens of real text that are kept as prompts."""


class BenchModel(NamedTuple):
    """A model to measure."""

    label: str
    account: Account
    model: ContextReady | Path
    """The model, or an exported file."""
    text: torch.Tensor | None
    """Token ids of real text to read, if the model's training data is still available."""


def open_models(words: Sequence[str]) -> list[BenchModel]:
    """Open runs, checkpoints and exported files; paper models and `key=value` models get random weights."""
    paths = [word for word in words if Path(word).is_dir()]
    files = [word for word in words if Path(word).suffix == EXPORTED]
    named = [word for word in words if word not in (*paths, *files)]
    models = []
    for file in files:
        fields = asdict(read_gguf(file).config)
        config = build_settings(ModelConfig, {key: fields[key] for key in fields if key != "correction_bias"})
        models.append(BenchModel(file, account(config), Path(file), None))
    for path in paths:
        checkpoint = open_checkpoint(Path(path))
        cost, text = account(checkpoint.native_config), _text(checkpoint)
        models.append(BenchModel(path, cost, checkpoint.model(), text))
    for entry in entries(named) if named else []:
        torch.manual_seed(0)
        models.append(BenchModel(entry.name, entry.account, build_model(entry.account.config), None))
    return models


def measure_prefill(one: BenchModel, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Time every solver on prompts of these lengths; returns nothing for a transformer or an exported file."""
    if isinstance(one.model, Path) or not one.model.is_recurrent:
        return []
    records = []
    for length in lengths:
        if one.text is not None and len(one.text) >= length:
            tokens_1T = one.text[None, :length]
        else:
            tokens_1T = torch.randint(one.account.config.vocab_size, (1, length))
        for solver in SOLVERS:
            prefill(one.model, tokens_1T, solver=solver)
            info = prefill(one.model, tokens_1T, solver=solver).info
            records.append(
                {"label": one.label, "asked": solver, "cost": info.cost, "certificate": info.certificate} | asdict(info)
            )
    return records


def memory_record(one: BenchModel, context: int) -> dict[str, Any]:
    """Memory of a model's weights and state, as plain values for JSON."""
    return {
        "label": one.label,
        "context": context,
        "parameters": one.account.parameters,
        "state": one.account.state_bytes(context),
        "kv_bytes_per_token": one.account.kv_bytes_per_token(),
    }


def _text(checkpoint: Checkpoint) -> torch.Tensor | None:
    """Token ids of the validation data, if the data is still available."""
    try:
        tokens = data_of(checkpoint, None).tokens("val")
    except ContextReadyError:
        return None
    return torch.from_numpy(tokens.read(0, min(len(tokens), LONGEST_TEXT)).astype("int64"))
