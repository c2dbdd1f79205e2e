"""Measures how many tokens a step can process cheaply, once per model, so that sweeps suit the hardware."""

import statistics
import time
from weakref import WeakKeyDictionary

import torch

from contextready.model.context_ready import ContextReady

WIDE = 32
"""The number of tokens in the wide step that is timed against a step of one token."""
ROUNDS = 5

_known: "WeakKeyDictionary[ContextReady, dict[tuple[torch.device, torch.dtype, int], float]]" = WeakKeyDictionary()


def free_tokens(model: ContextReady) -> float:
    """Return the number of tokens whose arithmetic takes as long as a step's fixed cost (calls and reading weights).

    A step of r tokens takes time in proportion to 1 + r / free_tokens. The result is at least 1.
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
    """Return the median time of a step that processes this many positions of one sequence."""
    weight = next(model.backbone.parameters())
    e_1TC = weight.new_zeros(1, tokens, model.backbone.width)
    buffer = model.backbone.init_buffer(1, tokens)  # type: ignore[attr-defined]
    places = buffer.at(torch.arange(tokens, device=weight.device)[None])
    times = []
    for _ in range(ROUNDS + 2):
        start = time.perf_counter()
        result = model.recur(e_1TC, e_1TC, places)
        result.z_BTC.sum().item()  # waits for asynchronous devices
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])
