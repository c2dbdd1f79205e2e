"""Opening what is on disk for generation: a run, a checkpoint, a Hugging Face folder, or an exported file."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contextready.errors import ContextReadyError, nearest
from contextready.infer.engine import ENGINES, Engine

if TYPE_CHECKING:
    from contextready.data.tokenizer import Tokenizer

EXPORTED = ".gguf"


@dataclass(frozen=True)
class Opened:
    """A model on disk: its tokenizer, and engines of any size for it."""

    tokenizer: "Tokenizer"
    trained_length: int
    """Tokens of the sequences it was trained on."""
    engine: Callable[[int, int], Engine]
    """Make an engine of so many rows, each of this capacity in tokens."""


def open_for_generation(
    path: Path, engine: str | None = None, *, threads: int | None = None, device: str = "auto", **settings: Any
) -> Opened:
    """Open a run, a checkpoint, a Hugging Face folder or an exported file.

    `settings` (solver, tolerance, …) go to an engine on torch.
    """
    if engine is not None and engine not in ENGINES:
        raise ContextReadyError(f"Unknown engine '{engine}'; {nearest(engine, ENGINES)}")
    if path.suffix == EXPORTED:
        if engine not in (None, "ggml"):
            raise ContextReadyError(f"{path} is an exported model, which the engine ggml runs; leave --engine out.")
        if settings:
            raise ContextReadyError(
                f"An exported model reads prompts one token at a time, so {', '.join(settings)} cannot be chosen; "
                "leave it out, or generate from the checkpoint."
            )
        return _open_exported(path, threads)
    if engine == "ggml":
        raise ContextReadyError(
            f"The engine ggml runs exported models: crt export {path} model.gguf, then crt generate model.gguf."
        )
    return _open_checkpoint(path, engine or "eager", threads, device, settings)


def _open_exported(path: Path, threads: int | None) -> Opened:
    from contextready.infer.ggml.engine import GgmlEngine
    from contextready.infer.ggml.file import read_gguf

    exported = read_gguf(path)
    return Opened(
        exported.tokenizer(), exported.trained_length, lambda rows, capacity: GgmlEngine(path, rows, capacity, threads)
    )


def _open_checkpoint(path: Path, engine: str, threads: int | None, device: str, settings: dict[str, Any]) -> Opened:
    import torch

    from contextready.data.tokenizer import Tokenizer
    from contextready.device import find_device
    from contextready.infer.torch_engine import torch_engine
    from contextready.runs.checkpoint import open_trained

    checkpoint = open_trained(path)
    checkpoint.must_have_learned_text()
    model, tokenizer = checkpoint.model().to(find_device(device)), Tokenizer.load(checkpoint.folder)
    if threads is not None:
        torch.set_num_threads(threads)

    def make(rows: int, capacity: int) -> Engine:
        return torch_engine(model, engine, rows=rows, capacity=capacity, **settings)

    return Opened(tokenizer, checkpoint.config["train"]["block_size"], make)
