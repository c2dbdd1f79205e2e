"""A model with its matrices in bf16: it reads half of the bytes and, on some processors, multiplies faster.

Everything else keeps the type of the original model: embeddings, the residual stream, norms, the carried vector,
attention, keys and values, and logits. So states of both can be exchanged, and both can read into the same buffer.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contextready.device import check_precision, means_bf16
from contextready.errors import ContextReadyError
from contextready.model.context_ready import ContextReady
from contextready.model.transformer import Transformer

CANDIDATES = 32
"""How many of the largest logits are computed again without rounding them to bf16."""


class NarrowLinear(nn.Linear):
    """A linear layer that multiplies in bf16, from and to the type of its input."""

    def __init__(self, linear: nn.Linear) -> None:
        # On the meta device it has no memory until it gets its weights.
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = _narrow(linear.weight)
        self.bias = None if linear.bias is None else _narrow(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        return F.linear(x.to(torch.bfloat16), self.weight, self.bias).to(x.dtype)


class NarrowHead(NarrowLinear):
    """An output layer in bf16 whose largest logits are not rounded.

    A logit of 10 rounded to bf16 may be off by 0.03, which changes the most likely token far more often than the
    rounding of all weights does (docs/paper-notes.md).
    """

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        rounded = super().forward(x)
        best = rounded.topk(min(CANDIDATES, self.out_features), dim=-1).indices
        narrow_x = x.to(torch.bfloat16).to(x.dtype)
        logits = (self.weight[best].to(x.dtype) @ narrow_x[..., None])[..., 0]
        if self.bias is not None:
            logits = logits + self.bias[best].to(x.dtype)
        return rounded.scatter(-1, best, logits)


def narrowed(model: ContextReady, head: bool = True) -> ContextReady:
    """Return the same model with its matrices in bf16, for inference; all other weights are shared with the original.

    Without `head`, the output layer is shared as well.
    """
    if not isinstance(model.backbone, Transformer):
        raise ContextReadyError(
            "Only native transformers compute in bf16, and this model runs in the attention of Hugging Face; use fp32."
        )
    # A weight that the copy is told to have copied already is shared.
    narrow = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()}).eval()
    assert isinstance(narrow.backbone, Transformer)
    for parent in list(narrow.modules()):
        for name, part in list(parent.named_children()):
            if type(part) is nn.Linear and part is not narrow.backbone.unembedding:
                setattr(parent, name, NarrowLinear(part))
    if head:
        narrow.backbone.unembedding = NarrowHead(narrow.backbone.unembedding)
    return narrow


def in_precision(model: ContextReady, precision: str) -> ContextReady:
    """Return a model for inference in fp32 (as it is), in bf16, or in what `auto` chooses for its device."""
    device = next(model.backbone.parameters()).device
    check_precision(precision, device)
    if precision == "auto" and not isinstance(model.backbone, Transformer):
        return model
    return narrowed(model) if means_bf16(precision, device) else model


def is_narrow(model: ContextReady) -> bool:
    """Whether this is a model with its matrices in bf16."""
    return any(isinstance(part, NarrowLinear) for part in model.modules())


def _narrow(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach().to(torch.bfloat16), requires_grad=False)
