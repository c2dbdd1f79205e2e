"""Checks of the tokens, passes and states that are given to a model."""

import torch
from torch import Tensor

from contextready.errors import ContextReadyError
from contextready.formats.limits import shown

MOST_PASSES = 100_000
"""The largest number of passes. A sequence is exact after one more pass than it has tokens."""


def check_tokens(tokens_BT: Tensor, device: torch.device | None = None) -> None:
    """Raise an error unless this is a batch with at least one token id per row, on the model's device."""
    if tokens_BT.dim() != 2 or tokens_BT.shape[1] == 0 or tokens_BT.shape[0] == 0:
        raise ContextReadyError(
            f"Tokens must have shape (batch, tokens), with at least one of each, but got {tuple(tokens_BT.shape)}."
        )
    if tokens_BT.dtype not in (torch.int64, torch.int32):
        raise ContextReadyError(f"Tokens must be int64 or int32, but got {tokens_BT.dtype}.")
    if device is not None and tokens_BT.device != device:
        raise ContextReadyError(
            f"The tokens are on {tokens_BT.device}, but the model is on {device}; move one of them."
        )


def unknown_token(tokens_BT: Tensor, vocab_size: int) -> ContextReadyError:
    """Return an error that names the first id that is not in the vocabulary."""
    bad = tokens_BT[(tokens_BT < 0) | (tokens_BT >= vocab_size)].flatten()[0].item()
    return ContextReadyError(
        f"Token id {bad} is out of range: this model's ids are 0 to {vocab_size - 1}. Use the model's own tokenizer."
    )


def check_passes(passes: int) -> None:
    """Raise an error unless the number of passes is a whole number of at least 1, and not absurdly large."""
    if not hasattr(passes, "__index__") or passes < 1:
        raise ContextReadyError(f"passes must be a whole number of at least 1, but got {shown(passes)}.")
    if passes > MOST_PASSES:
        raise ContextReadyError(f"passes must be at most {MOST_PASSES:,}, but got {shown(passes)}.")


def check_carried(carried_BRC: Tensor, e_BTC: Tensor) -> None:
    """Raise an error if a state's carried vectors do not match these embeddings in width, dtype, device or rows."""
    theirs = (carried_BRC.shape[2], carried_BRC.dtype, carried_BRC.device)
    ours = (e_BTC.shape[2], e_BTC.dtype, e_BTC.device)
    if theirs != ours:
        raise ContextReadyError(
            "This state does not match the model: it has width {}, {} on {}, but the model has width {}, {} on {}. "
            "Create a state with init_state.".format(*theirs, *ours)
        )
    check_rows(carried_BRC.shape[0], e_BTC.shape[0])


def check_past(past: object) -> None:
    """Raise an error if this is not a cache that the blocks can use."""
    if not hasattr(past, "attend"):
        raise ContextReadyError("This is not a cache for this kind of model; create one with init_cache.")


def check_rows(held: int, given: int) -> None:
    """Raise an error if the state and the input have different numbers of rows."""
    if held != given:
        raise ContextReadyError(
            f"This state has {held} rows, but the input has {given}; select or repeat its rows, or create a new state."
        )


def check_shape(theirs: tuple[int | None, ...], ours: tuple[int | None, ...]) -> None:
    """Raise an error if a state's layers, heads, head size or window differ from the model's."""
    if theirs != ours:
        raise ContextReadyError(
            f"This state does not match the model: its (layers, heads, head size, window) are {theirs}, "
            f"but the model's are {ours}. Create a state with init_state."
        )
