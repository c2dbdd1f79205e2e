"""How much memory a training step needs at its peak, found by going through it with tensors that hold no numbers."""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from contextready.model.build import build_model
from contextready.train.config import RunConfig
from contextready.train.objective import Objective


@dataclass(frozen=True)
class StepMemory:
    """Bytes in one process, all of its weights whole."""

    weights: int
    activations: int
    """The most that a forward and backward add to weights and gradients at one time."""


def step_memory(config: RunConfig, sequences: int, passes: int | None, bf16: bool, adjoint_steps: int) -> StepMemory:
    """Go through one forward and backward of `sequences` sequences without computing anything."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    t = config.train
    with torch.device("meta"):
        model = build_model(config.model)
    with FakeTensorMode():
        for module in model.modules():
            for name, p in module.named_parameters(recurse=False):
                # As if on the CPU, so that the same kernels are chosen, but without memory.
                module.register_parameter(name, nn.Parameter(torch.empty(p.shape, device="cpu")))
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        objective = Objective(
            model,
            recompute=t.checkpoint_passes,
            gradient=t.gradient,
            truncated_passes=t.truncated_passes,
            adjoint_steps=adjoint_steps,
            autocast=lambda: torch.autocast("cpu", torch.bfloat16, enabled=bf16),
        )
        for p in model.parameters():
            # They are counted with the weights, wherever in the step they are made.
            p.grad = torch.zeros_like(p)
        tokens_BT = torch.zeros(sequences, t.block_size, dtype=torch.long)
        with _LiveBytes() as live:
            objective.backward(tokens_BT, tokens_BT, passes)
    return StepMemory(weights, live.peak)


class _LiveBytes(TorchDispatchMode):
    """The bytes of all tensors made inside, as they come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage(), known)
        return out

    def _add(self, storage: torch.UntypedStorage, known: set[int]) -> None:
        if id(storage) in self._seen or id(storage) in known:
            return
        self._seen.add(id(storage))
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._remove, id(storage), storage.nbytes())

    def _remove(self, number: int, size: int) -> None:
        self._seen.discard(number)
        self.now -= size
