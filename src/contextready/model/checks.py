"""What models refuse: tokens, passes and states that they cannot compute with, each in one sentence."""

import torch
from torch import Tensor

from contextready.errors import ContextReadyError


def check_tokens(tokens_BT: Tensor, device: torch.device | None = None) -> None:
    """Refuse anything that is not a batch of at least one token id each, on the model's device."""
    if tokens_BT.dim() != 2 or tokens_BT.shape[1] == 0 or tokens_BT.shape[0] == 0:
        raise ContextReadyError(
            f"Tokens of shape {tuple(tokens_BT.shape)} were given; give (batch, tokens) with at least one of each."
        )
    if tokens_BT.dtype not in (torch.int64, torch.int32):
        raise ContextReadyError(f"Tokens of type {tokens_BT.dtype} were given; give whole numbers (int64 or int32).")
    if device is not None and tokens_BT.device != device:
        raise ContextReadyError(f"The tokens are on {tokens_BT.device} and the model on {device}; move one.")


def unknown_token(tokens_BT: Tensor, vocab_size: int) -> ContextReadyError:
    """Say which of these ids is not in the vocabulary."""
    bad = tokens_BT[(tokens_BT < 0) | (tokens_BT >= vocab_size)].flatten()[0].item()
    return ContextReadyError(
        f"Token id {bad} is out of range; this model knows the ids 0 to {vocab_size - 1}, so use its own tokenizer."
    )


def check_passes(passes: int) -> None:
    """Refuse fewer than one pass, or a fraction of one."""
    if not hasattr(passes, "__index__") or passes < 1:
        raise ContextReadyError(f"passes={passes} is no K; K counts passes of the blocks, so give 1, 2, 3, …")


def check_carried(carried_BRC: Tensor, e_BTC: Tensor) -> None:
    """Refuse the carried vectors of another model, or of another number of rows than these embeddings have."""
    theirs = (carried_BRC.shape[2], carried_BRC.dtype, carried_BRC.device)
    ours = (e_BTC.shape[2], e_BTC.dtype, e_BTC.device)
    if theirs != ours:
        raise ContextReadyError(
            "This state is of another model (width {}, {} on {}; this one: width {}, {} on {}); "
            "start one with init_state.".format(*theirs, *ours)
        )
    check_rows(carried_BRC.shape[0], e_BTC.shape[0])


def check_past(past: object) -> None:
    """Refuse something after which the blocks cannot attend."""
    if not hasattr(past, "attend"):
        raise ContextReadyError("This is not a cache of this kind of model; start one with init_cache.")


def check_rows(held: int, given: int) -> None:
    """Refuse a state of another number of rows than the input has."""
    if held != given:
        raise ContextReadyError(
            f"This state holds {held} rows and {given} were given; select or repeat its rows, or start a new state."
        )


def check_shape(theirs: tuple[int | None, ...], ours: tuple[int | None, ...]) -> None:
    """Refuse keys and values of another model: layers, heads, head size and window must agree."""
    if theirs != ours:
        raise ContextReadyError(
            "This state is of another model (layers, heads, head size, window: "
            f"{theirs} instead of {ours}); start one with init_state."
        )
