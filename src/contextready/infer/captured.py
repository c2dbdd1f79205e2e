"""A step as one compiled graph."""

from collections.abc import Callable

import torch
from torch import Tensor

COMPILED_SHAPES = 1024
"""Maximum number of shapes compiled in one process."""


def captured(step: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The step as one compiled graph, also recorded as a CUDA graph on CUDA, so that a token is one launch."""
    compiled: Callable[[Tensor], Tensor] = torch.compile(step, fullgraph=True, dynamic=False)

    def run(tokens_B1: Tensor) -> Tensor:
        # Engines of the same shape share a graph. PyTorch's default limit of 8 shapes is too low for many engines.
        with torch._dynamo.config.patch(recompile_limit=COMPILED_SHAPES):
            return compiled(tokens_B1)

    return run if not torch.cuda.is_available() else _Recorded(run)


class _Recorded:
    """A step that is compiled at its first call and recorded as a CUDA graph at its second."""

    def __init__(self, step: Callable[[Tensor], Tensor]) -> None:
        self.step, self.calls = step, 0

    def __call__(self, tokens_B1: Tensor) -> Tensor:
        self.calls += 1
        if tokens_B1.device.type != "cuda" or self.calls == 1:
            return self.step(tokens_B1)
        if self.calls == 2:
            self.tokens_B1, self.graph = tokens_B1.clone(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.logits_BV = self.step(self.tokens_B1)
        self.tokens_B1.copy_(tokens_B1)
        self.graph.replay()
        return self.logits_BV
