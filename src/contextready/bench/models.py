"""The models of a benchmark, loaded or created with random weights, and what their weights and states take."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from contextready.bench.race import BITS
from contextready.errors import ContextReadyError
from contextready.formats.limits import check_memory
from contextready.infer.engine import EXPORTED
from contextready.infer.ggml.file import read_gguf
from contextready.model.config import ModelConfig
from contextready.model.context_ready import ContextReady, build_model
from contextready.model.cost import Account, account
from contextready.runs.catalog import entries
from contextready.runs.checkpoint import Checkpoint, data_of, open_trained
from contextready.runs.models import native_backbone_of
from contextready.settings import build_settings

FLOAT = 4
"""Bytes of a number in fp32."""
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
    is_random: bool = False
    """Whether the weights are random, as for the models of the paper."""


def open_models(words: Sequence[str], tokens: int = 0) -> list[BenchModel]:
    """Open runs, checkpoints, Hugging Face folders and exported files; other models get random weights.

    Those are models of the paper, by their names, or `key=value` settings. Models that cannot fit into memory together,
    with a cache for `tokens` tokens each, are refused before any such weights are allocated.
    """
    paths = [word for word in words if Path(word).is_dir()]
    files = [word for word in words if Path(word).suffix == EXPORTED]
    named = [word for word in words if word not in (*paths, *files)]
    ways: list[tuple[str, Account, Callable[[], ContextReady | Path], Checkpoint | None]] = []
    for file in files:
        fields = asdict(read_gguf(file).config)
        config = build_settings(ModelConfig, {key: fields[key] for key in fields if key != "correction_bias"})
        ways.append((file, account(config), partial(Path, file), None))
    for path in paths:
        checkpoint = open_trained(Path(path))
        cost, build = _of_checkpoint(checkpoint)
        ways.append((path, cost, build, checkpoint))
    for entry in entries(named) if named else []:
        ways.append((entry.name, entry.account, partial(_random_model, entry.account.config), None))
    known = {*files, *paths}
    _check_memory([cost for _, cost, _, _ in ways], tokens)
    return [
        BenchModel(label, cost, build(), None if checkpoint is None else _text(checkpoint), label not in known)
        for label, cost, build, checkpoint in ways
    ]


def _of_checkpoint(checkpoint: Checkpoint) -> tuple[Account, Callable[[], ContextReady]]:
    """The cost of a checkpoint's model, and what loads the model."""
    if "width" in checkpoint.config["model"]:
        return account(checkpoint.native_config), checkpoint.model
    # Only the model itself knows the sizes of a pretrained one.
    model = checkpoint.model()
    backbone = native_backbone_of(model, checkpoint.folder)
    config = ModelConfig(**asdict(backbone.config), correction=model.correction.definition.name)
    return account(config), lambda: model


def _random_model(config: ModelConfig) -> ContextReady:
    torch.manual_seed(0)
    return build_model(config)


def _check_memory(costs: Sequence[Account], tokens: int) -> None:
    """Refuse models whose weights and caches are together larger than the memory."""
    weights = sum(FLOAT * cost.parameters for cost in costs)
    # With a window, an engine reserves the whole window.
    caches = sum((cost.config.window or tokens) * cost.kv_bytes_per_token() for cost in costs)
    what = "This model" if len(costs) == 1 else "These models together"
    check_memory(weights, what, "name fewer or smaller models.")
    check_memory(weights + caches, f"{what} with the cache", "lower --contexts, --tokens or the window.")


def weight_bytes(cost: Account, precision: str) -> float:
    """How much memory a model's weights take; beside matrices in bf16, there are embeddings in fp32."""
    embedding = cost.embedding_parameters
    if precision != "bf16":
        return cost.parameters * BITS[precision] / 8
    matrices = cost.parameters if cost.config.tied_embeddings else cost.parameters - embedding
    return matrices * BITS[precision] / 8 + embedding * FLOAT


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
