"""The processes that train a run: a single one, or those that torchrun started."""

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from contextready.device import find_device
from contextready.errors import ContextReadyError

RENDEZVOUS_KEY = "contextready/rendezvous"
RENDEZVOUS_SECONDS = 300


class Team:
    """This process among all processes of a run, its device, and how the processes communicate."""

    def __init__(self, device: torch.device, rank: int = 0, size: int = 1) -> None:
        self.device, self.rank, self.size = device, rank, size

    @property
    def is_first(self) -> bool:
        """Whether this is the first process, which writes files, logs and shows progress."""
        return self.rank == 0

    def seed(self, seed: int) -> None:
        """Seed the generators, differently in each process, so that dropout masks differ."""
        torch.manual_seed((seed + 1_000_003 * self.rank) % 2**63)

    def sum(self, *values: float) -> list[float]:
        """Sum each value over all processes."""
        if self.size == 1:
            return list(values)
        # Apple GPUs do not support float64, but they cannot be part of a team either.
        sums = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(sums)
        return [float(value) for value in sums]

    def gather(self, value: Any) -> list[Any]:
        """Collect this value from every process, in the order of their ranks."""
        if self.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value)
        return gathered

    def wait(self) -> None:
        """Wait until all processes have reached this point."""
        if self.size > 1:
            dist.barrier()

    def let_first(self, do: Callable[[], object]) -> None:
        """Call a function in the first process. If it raises a ContextReadyError, all processes raise it."""
        refusal = None
        if self.is_first:
            try:
                do()
            except ContextReadyError as error:
                refusal = error
        reasons = [reason for reason in self.gather(None if refusal is None else str(refusal)) if reason is not None]
        if reasons:
            raise refusal or ContextReadyError(reasons[0])

    def check_same(self, config: dict[str, Any]) -> None:
        """Raise an error if the processes were started with different settings."""
        first, *others = self.gather(config)
        for rank, other in enumerate(others, 1):
            for part, settings in first.items():
                for key, value in settings.items():
                    if other[part][key] != value:
                        raise ContextReadyError(
                            f"Process {rank} was started with {key}={other[part][key]} and process 0 with "
                            f"{key}={value}; start all of them with the same command."
                        )

    def wrap(self, objective: nn.Module, parallel: str, some_unused: bool = False) -> nn.Module:
        """Wrap the objective to average the gradients, with the whole model (ddp) or a shard (fsdp) per process.

        `some_unused` says that some steps do not use all weights, as those with K=1 do not use the correction.
        """
        if self.size == 1:
            return objective
        if parallel == "ddp":
            devices = [self.device.index] if self.device.type == "cuda" else None
            return nn.parallel.DistributedDataParallel(
                objective, device_ids=devices, gradient_as_bucket_view=True, find_unused_parameters=some_unused
            )
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        # All weights form one group. Every pass uses them, so they are gathered once per step and not once per pass.
        fully_shard(objective, mesh=init_device_mesh(self.device.type, (self.size,)))
        return objective

    @contextmanager
    def synchronising(self, wrapped: nn.Module, now: bool) -> Iterator[None]:
        """Average the gradients in this backward, or leave that to the last backward of the step."""
        if isinstance(wrapped, nn.parallel.DistributedDataParallel) and not now:
            with wrapped.no_sync():
                yield
            return
        if is_sharded(wrapped):
            wrapped.set_requires_gradient_sync(now)  # type: ignore[operator]
            # The next part of the step needs the full weights again.
            wrapped.set_reshard_after_backward(now)  # type: ignore[operator]
        yield

    @contextmanager
    def whole(self, wrapped: nn.Module) -> Iterator[None]:
        """Gather the full weights for a while, to use the model outside of a step."""
        if not is_sharded(wrapped):
            yield
            return
        wrapped.unshard()  # type: ignore[operator]
        try:
            yield
        finally:
            wrapped.reshard()  # type: ignore[operator]


def is_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` has sharded the weights of this module."""
    return hasattr(module, "set_requires_gradient_sync")


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor, of which each process may hold a shard."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local_part(tensor: Tensor) -> Tensor:
    """Return the shard of a tensor that this process holds."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@contextmanager
def joined(device_name: str) -> Iterator[Team]:
    """Join the processes that torchrun started, or form a team of one."""
    device = find_device(device_name)
    if not dist.is_available() or not dist.is_torchelastic_launched():
        yield Team(device)
        return
    if device.type == "mps":
        raise ContextReadyError("device=mps works in a single process only; set device=cpu, or start without torchrun.")
    if device.type == "cuda":
        local = int(os.environ["LOCAL_RANK"])
        if local >= torch.cuda.device_count():
            raise ContextReadyError(
                f"torchrun started more processes than this machine has GPUs ({torch.cuda.device_count()}); lower "
                "--nproc-per-node."
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", **_rendezvous())
    try:
        yield Team(device, dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


def _rendezvous() -> dict[str, Any]:
    """Return the store through which the processes find each other, if torchrun keeps its own store over restarts.

    torchrun's store still holds the addresses of processes that died, and a restart would wait for them. So the first
    process opens a new store at each start and leaves its address in torchrun's; the others try until they can connect.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    agents = _store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if rank == 0:
        store = _store("0.0.0.0", 0, is_master=True)
        host = "127.0.0.1" if int(os.environ["LOCAL_WORLD_SIZE"]) == size else socket.getfqdn()
        agents.set(RENDEZVOUS_KEY, f"{host} {store.port}")
        return {"store": store, "rank": rank, "world_size": size}
    deadline = time.monotonic() + RENDEZVOUS_SECONDS
    while True:
        host, port = agents.get(RENDEZVOUS_KEY).decode().split()
        try:
            return {"store": _store(host, int(port)), "rank": rank, "world_size": size}
        except (RuntimeError, ValueError):
            if time.monotonic() > deadline:
                raise ContextReadyError(
                    f"Process {rank} could not connect to process 0 at {host}, port {port}."
                ) from None
            time.sleep(0.2)


def _store(host: str, port: int, is_master: bool = False) -> Any:
    patience = timedelta(seconds=RENDEZVOUS_SECONDS if is_master else 10)
    return dist.TCPStore(  # type: ignore[attr-defined]
        host, port, is_master=is_master, wait_for_workers=False, timeout=patience
    )
