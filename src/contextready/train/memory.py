"""The peak memory of a training step, measured by running it on fake tensors, which have no storage."""

import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from contextready.model.config import ModelConfig
from contextready.model.context_ready import build_model
from contextready.runs.config import RunConfig
from contextready.solve.bptt import DifferentiableStream
from contextready.train.objective import Objective


def step_bytes(config: RunConfig, sequences: int, bf16: bool, gradients_stay: bool) -> int:
    """Return the peak memory of a forward and backward over `sequences` sequences, without the weights.

    Gradients are allocated one by one, unless `gradients_stay` in buffers that exist from the start.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    t = config.train
    assert isinstance(config.model, ModelConfig)
    with torch.device("meta"):
        model = build_model(config.model)
    with FakeTensorMode():
        # On a fake CPU device the same kernels are chosen as on a real one. Tied weights stay tied.
        fakes = {p: nn.Parameter(torch.empty(p.shape, device="cpu")) for p in model.parameters()}
        for module in model.modules():
            for name, p in list(module.named_parameters(recurse=False)):
                module.register_parameter(name, fakes[p])
        # One adjoint product is enough, because their number does not change the memory.
        eager = replace(t, compile=False, adjoint_steps=1 if t.gradient == "implicit" else None)
        objective = Objective.for_run(model, eager, lambda: torch.autocast("cpu", torch.bfloat16, enabled=bf16))
        if t.gradient == "bptt":
            stream = DifferentiableStream(model)
            objective.stream = lambda e_BTC: _Unread.apply(e_BTC, stream, *model.parameters())  # type: ignore[no-untyped-call]
        tokens_BT = torch.zeros(sequences, t.block_size, dtype=torch.long)
        with _LiveBytes() as live:
            if gradients_stay:
                for p in model.parameters():
                    p.grad = torch.empty_like(p)
            objective.backward(tokens_BT, tokens_BT, None if t.pass_schedule is None else t.pass_schedule.most)
    return int(live.peak)


class _Unread(torch.autograd.Function):
    """Stands in for a stream: allocates its buffers, as the stream does before the first token, but runs no steps."""

    @staticmethod
    def forward(ctx: Any, e_BTC: Tensor, stream: DifferentiableStream, *parameters: nn.Parameter) -> Tensor:
        ctx.parameters, ctx.tape = parameters, stream.take_tape(e_BTC)
        ctx.tape.begin()
        return e_BTC.clone()

    @staticmethod
    def backward(ctx: Any, g_BTC: Tensor) -> tuple[Tensor | None, ...]:
        return g_BTC.clone(), None, *(torch.empty_like(p) for p in ctx.parameters)


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tracks the bytes of all tensors that are alive among those created inside the context."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
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
