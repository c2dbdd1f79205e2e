"""How wide a step should be here: measured once for each model, so that sweeps fit the hardware."""

import statistics
import time
from weakref import WeakKeyDictionary

import torch

from contextready.model.context_ready import ContextReady

WIDE = 32
"""Tokens of the wide step that is timed against a single one."""
ROUNDS = 5

_known: "WeakKeyDictionary[ContextReady, dict[tuple[torch.device, torch.dtype, int], float]]" = WeakKeyDictionary()


def free_tokens(model: ContextReady) -> float:
    """The tokens whose arithmetic takes as long as what a step costs anyway: its calls, and reading the weights.

    A step of r tokens then takes time in proportion to 1 + r / free_tokens. At least 1.
    """
    weight, known = next(model.backbone.parameters()), _known.setdefault(model, {})
    where = (weight.device, weight.dtype, torch.get_num_threads())
    if where not in known:
        single, wide = (_seconds(model, tokens) for tokens in (1, WIDE))
        per_token = max((wide - single) / (WIDE - 1), 1e-9)
        known[where] = max(1.0, single / per_token - 1.0)
    return known[where]


@torch.inference_mode()
def _seconds(model: ContextReady, tokens: int) -> float:
    """Median time of a step that takes this many positions of one sequence."""
    weight = next(model.backbone.parameters())
    e_1TC = weight.new_zeros(1, tokens, model.backbone.width)
    buffer = model.backbone.init_buffer(1, tokens)  # type: ignore[attr-defined]
    places = buffer.at(torch.arange(tokens, device=weight.device)[None])
    times = []
    for _ in range(ROUNDS + 2):
        start = time.perf_counter()
        result = model.recur(e_1TC, e_1TC, places)
        result.z_BTC.sum().item()  # waits for a device that works in the background
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])
