"""Checkpoints that many processes write and read at once, each its part, in PyTorch's distributed format (DCP).

Any number of processes can read what any other number wrote. DCP's own metadata is a pickle, which can run code when it
is read: go on only with runs of your own, and hand on what `unshard` writes.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from contextready.errors import ContextReadyError

if TYPE_CHECKING:
    from contextready.train.checkpoint import Checkpoint

METADATA = ".metadata"


def is_sharded_checkpoint(folder: Path) -> bool:
    """Whether a checkpoint's tensors are in the distributed format."""
    return (folder / METADATA).is_file()


def save_sharded(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors, of which each process may hold a part; all processes call this."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
    with _one_process_is_fine():
        save(tensors, storage_writer=writer, no_dist=not dist.is_initialized())


def load_sharded(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fill these tensors, whole or parts, with what was saved under their names; all processes call this."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    with _one_process_is_fine():
        load(tensors, storage_reader=FileSystemReader(folder), no_dist=not dist.is_initialized())


def describe_saved(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """The names, shapes and types of the tensors in a distributed checkpoint."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        name: (entry.size, entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read_whole(folder: Path) -> dict[str, Tensor]:
    """All tensors of a distributed checkpoint, complete, in this one process."""
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in describe_saved(folder).items()}
    load_sharded(folder, tensors)
    return tensors


def refuse_sharded(checkpoint: "Checkpoint") -> ContextReadyError:
    """The sentence for whoever wants plain tensors of a distributed checkpoint."""
    return ContextReadyError(
        f"{checkpoint.folder} is a sharded checkpoint, whose metadata is a pickle; if it is your own, make a plain one "
        f"with crt unshard {checkpoint.folder} OUT."
    )


@contextmanager
def _one_process_is_fine() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
