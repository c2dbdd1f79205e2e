"""Sharded checkpoints, which several processes write and read together in PyTorch's distributed format (DCP).

The number of processes may change between writing and reading. The metadata of DCP is a pickle, which can run code when
it is loaded, so resume only your own runs, and share only the plain checkpoints that `unshard` writes.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from contextready.errors import ContextReadyError
from contextready.formats.record import one_line

METADATA = ".metadata"


def save_sharded(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors, of which each process may hold a shard. All processes must call this."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
    with _as_one_sentence(f"{folder} could not be written"):
        save(tensors, storage_writer=writer)


def load_sharded(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Load the values saved under these names into the tensors, whole or sharded. All processes must call this."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    with _as_one_sentence(f"{folder} could not be read"):
        load(tensors, storage_reader=FileSystemReader(folder))


def describe_saved(folder: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return the names, shapes and dtypes of the tensors in a sharded checkpoint."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    try:
        entries = FileSystemReader(folder).read_metadata().state_dict_metadata
        described = {
            name: (torch.Size(entry.size), entry.properties.dtype)
            for name, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        size = sum(shape.numel() * dtype.itemsize for shape, dtype in described.values())
    except Exception as error:  # unpickling can raise anything
        raise ContextReadyError(
            f"{folder / METADATA} cannot be read ({type(error).__name__}: {one_line(error)}); the checkpoint is "
            "damaged."
        ) from error
    on_disk = sum(path.stat().st_size for path in folder.glob("*.distcp"))
    if size > on_disk:
        raise ContextReadyError(
            f"{folder / METADATA} describes {size:,} bytes of tensors, but the files have only {on_disk:,}; the "
            "checkpoint is damaged."
        )
    return described


def read_whole(folder: Path) -> dict[str, Tensor]:
    """Load all tensors of a sharded checkpoint, complete, in this process."""
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in describe_saved(folder).items()}
    load_sharded(folder, tensors)
    return tensors


@contextmanager
def _as_one_sentence(what: str) -> Iterator[None]:
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            # A single process needs no process group.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        reason = str(cause).splitlines()[0] if str(cause) else type(cause).__name__
        raise ContextReadyError(f"{what} (process {rank}: {reason}); is the disk full?") from error
    except OSError as error:
        raise ContextReadyError(f"{what}: {error}.") from error
