"""Early passes over a prompt in bf16, before the exact ones in the type of the model.

The exact ones start from what the early ones found, and the last change is always one of theirs: the residual of the
exact recurrence. So the result meets the same tolerance as without early passes. Where those do not contract, the
exact ones do all of the work, from any start.
"""

from dataclasses import dataclass
from itertools import chain
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from contextready.device import means_bf16
from contextready.errors import ContextReadyError
from contextready.formats.limits import total_memory
from contextready.model.context_ready import ContextReady, Pass
from contextready.model.narrow import is_narrow, narrowed
from contextready.model.transformer import Transformer
from contextready.solve.norms import largest_change
from contextready.solve.prompt_reader import PromptReader
from contextready.solve.reading import all_exact, early_should_end
from contextready.solve.unroll import iterate

BF16_SHARE = 0.5
"""What a matrix in bf16 takes, compared with fp32."""


def check_early(model: ContextReady, reader: PromptReader) -> None:
    """Refuse early passes in bf16 that were asked for and cannot be made."""
    if reader.bf16_passes != "on":
        return
    if not isinstance(model.backbone, Transformer):
        raise ContextReadyError(
            "bf16_passes=on works with native transformers only, and this model runs in the attention of Hugging "
            "Face; leave it out."
        )
    if is_narrow(model):
        raise ContextReadyError("This model computes in bf16 already; leave out either bf16_passes=on or bf16.")


def early_model(model: ContextReady, reader: PromptReader) -> ContextReady | None:
    """Return the model for early passes over prompts, or none if all passes are to be exact.

    Its matrices are a copy in bf16, which takes half of the memory that they take in fp32.
    """
    check_early(model, reader)
    if reader.bf16_passes == "on":
        return narrowed(model, head=False)
    weight = next(model.backbone.parameters())
    if (
        reader.bf16_passes == "off"
        or not isinstance(model.backbone, Transformer)
        or weight.dtype != torch.float32
        or is_narrow(model)
        or not means_bf16("auto", weight.device)
        or not _fits(model, weight.device)
    ):
        return None
    return narrowed(model, head=False)


def _fits(model: nn.Module, device: torch.device) -> bool:
    """Whether there is memory for the weights and a copy of them in bf16."""
    size = sum(weight.nbytes for weight in model.parameters())
    if device.type == "cuda":
        return size * BF16_SHARE < torch.cuda.mem_get_info(device)[0]
    total = total_memory()
    return total is None or size * (1 + BF16_SHARE) < total


@dataclass(frozen=True, eq=False)
class Passes:
    """The outcome of parallel passes."""

    result: Pass
    """The last pass."""
    changes: tuple[float, ...]
    """The largest change of any position's z in each late pass, relative to its norm."""
    early: int
    """How many passes with a correction came first, in bf16, as did the plain pass then."""
    late: int
    """How many passes came after those, in the type of the model."""
    exact: bool


def solve_by_passes(
    model: ContextReady,
    early: ContextReady | None,
    e_BTC: Tensor,
    past: Any,
    before_B1C: Tensor,
    tolerance: float,
) -> Passes:
    """Repeat parallel passes until one in the type of the model changes no position by more than the tolerance."""
    T, computing = e_BTC.shape[1], early or model
    passes = model.passes(e_BTC, past, before_B1C, recur=lambda *inputs: computing.recur(*inputs))
    result = next(passes)
    before: list[float] = []
    while early is not None and len(before) < T and not early_should_end(before, tolerance):
        old_BTC, result = result.z_BTC, next(passes)
        before.append(largest_change(old_BTC, result.z_BTC))
    computing, starts_again = model, bool(before) and not isfinite(before[-1])
    if starts_again:
        passes = model.passes(e_BTC, past, before_B1C)
        result = next(passes)
    result, changes_KBT = iterate(chain((result,), passes), T + 1, tolerance)
    changes = tuple(float(change_BT.max()) for change_BT in changes_KBT)
    return Passes(result, changes, len(before), len(changes) + starts_again, all_exact(changes, T))
