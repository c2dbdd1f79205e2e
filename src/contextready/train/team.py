"""The processes of a run: one, or as many as torchrun started."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from contextready.device import find_device
from contextready.errors import ContextReadyError


class Team:
    """Who takes part, on which device, and the few things they say to each other."""

    def __init__(self, device: torch.device, rank: int = 0, size: int = 1) -> None:
        self.device, self.rank, self.size = device, rank, size

    @property
    def is_first(self) -> bool:
        """Whether this process speaks for all: it writes, logs and shows."""
        return self.rank == 0

    def seed(self, seed: int) -> None:
        """Seed the generators, each process's differently: dropout masks are its own."""
        torch.manual_seed((seed + 1_000_003 * self.rank) % 2**63)

    def sum(self, *values: float) -> list[float]:
        """Each value summed over all processes."""
        if self.size == 1:
            return list(values)
        # Apple's GPUs have no float64, and they cannot be in a team either.
        sums = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(sums)
        return [float(value) for value in sums]

    def gather(self, value: Any) -> list[Any]:
        """This value of every process, in the order of their ranks."""
        if self.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value)
        return gathered

    def wait(self) -> None:
        """Until all are here."""
        if self.size > 1:
            dist.barrier()

    def check_same(self, config: dict[str, Any]) -> None:
        """Refuse processes that were started with different settings."""
        first, *others = self.gather(config)
        for rank, other in enumerate(others, 1):
            for part, settings in first.items():
                for key, value in settings.items():
                    if other[part][key] != value:
                        raise ContextReadyError(
                            f"Process {rank} was started with {key}={other[part][key]} and process 0 with "
                            f"{key}={value}; start all of them with the same command."
                        )

    def wrap(self, objective: nn.Module, parallel: str) -> nn.Module:
        """Let the gradients of all processes be averaged: with a copy of the model in each (ddp), or a part (fsdp)."""
        if self.size == 1:
            return objective
        if parallel == "ddp":
            devices = [self.device.index] if self.device.type == "cuda" else None
            return nn.parallel.DistributedDataParallel(objective, device_ids=devices, gradient_as_bucket_view=True)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        # One group of all weights: every pass uses them again, so they are gathered once a step and not once a pass.
        fully_shard(objective, mesh=init_device_mesh(self.device.type, (self.size,)))
        return objective

    @contextmanager
    def synchronising(self, wrapped: nn.Module, now: bool) -> Iterator[None]:
        """Average the gradients of this backward, or leave that to the last one of a step."""
        if self.size > 1 and isinstance(wrapped, nn.parallel.DistributedDataParallel) and not now:
            with wrapped.no_sync():
                yield
            return
        if is_sharded(wrapped):
            wrapped.set_requires_gradient_sync(now)  # type: ignore[operator]
            # The next part of the step needs the whole weights again.
            wrapped.set_reshard_after_backward(now)  # type: ignore[operator]
        yield

    @contextmanager
    def whole(self, wrapped: nn.Module) -> Iterator[None]:
        """Have all weights here for a while, to use the model outside of a step."""
        if not is_sharded(wrapped):
            yield
            return
        wrapped.unshard()  # type: ignore[operator]
        yield
        wrapped.reshard()  # type: ignore[operator]


def is_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` has cut up this module's weights."""
    return hasattr(module, "set_requires_gradient_sync")


def whole_tensor(tensor: Tensor) -> Tensor:
    """A tensor of which each process may hold a part, complete."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@contextmanager
def joined(device_name: str) -> Iterator[Team]:
    """The team of this process: what torchrun started, or itself alone."""
    device = find_device(device_name)
    if not dist.is_available() or not dist.is_torchelastic_launched():
        yield Team(device)
        return
    if device.type == "mps":
        raise ContextReadyError("device=mps works in one process only; set device=cpu, or start without torchrun.")
    if device.type == "cuda":
        local = int(os.environ["LOCAL_RANK"])
        if local >= torch.cuda.device_count():
            raise ContextReadyError(
                f"torchrun started more processes than there are GPUs here ({torch.cuda.device_count()}); lower "
                "--nproc-per-node."
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", **_meeting_place())
    try:
        yield Team(device, dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


def _meeting_place() -> dict[str, Any]:
    """Where the processes of this start find each other, if torchrun keeps the place open over restarts.

    It hands every start the same store, in which the addresses of those that died still stand; without a name of its
    own a start would wait for them.
    """
    environment = os.environ
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False)  # type: ignore[attr-defined]
    attempt = f"attempt-{environment['TORCHELASTIC_RESTART_COUNT']}"
    return {
        "store": dist.PrefixStore(attempt, store),  # type: ignore[attr-defined]
        "rank": int(environment["RANK"]),
        "world_size": int(environment["WORLD_SIZE"]),
    }
