"""The router loss of a mixture of experts, which spreads tokens evenly over the experts."""

import sys
from typing import Any

from torch import Tensor

from contextready.errors import ContextReadyError

ATTRIBUTES = ("num_experts", "num_experts_per_tok", "router_aux_loss_coef")


def router_logits_wanted(lm: Any, arguments: dict[str, Any]) -> bool:
    """Whether a forward was asked to return router logits, and so to add their loss; raises if it cannot."""
    wanted = arguments.get("output_router_logits")
    if wanted is None:
        wanted = getattr(lm.config.get_text_config(), "output_router_logits", False)
    if wanted and (_loss_function(lm) is None or not all(hasattr(lm, name) for name in ATTRIBUTES)):
        raise ContextReadyError(f"{type(lm).__name__} has no router loss; set output_router_logits=False.")
    return bool(wanted)


def router_loss(lm: Any, router_logits: Any, attention_mask: Tensor | None) -> Tensor:
    """The loss as the model itself computes it, without its coefficient."""
    loss_function = _loss_function(lm)
    assert loss_function is not None
    loss: Tensor = loss_function(router_logits, lm.num_experts, lm.num_experts_per_tok, attention_mask)
    return loss


def _loss_function(lm: Any) -> Any:
    """Each family defines the function of this name in the module of its model."""
    return getattr(sys.modules[type(lm).__module__], "load_balancing_loss_func", None)
