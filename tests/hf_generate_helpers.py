"""Context-ready models of some families, and what `generate` writes with them."""

from functools import lru_cache

import pytest
import torch
from hf_helpers import FAMILIES, tiny_lm, tiny_ready

TOLERANCE = 1e-10
FULL = ("llama", "mistral-window", "own")
T = 7
"""Longer than the windows of 5."""
OTHERS = tuple(family for family in FAMILIES if family not in FULL)
PLAIN_DIFFERS = ("gemma2", "opt", "bloom", "falcon", "falcon-alibi")
"""The plain model itself rounds to float32, reads packed documents together, or cannot use some caches."""


def all_in_the_slow_tests(families):
    """A few families in every run of the tests, the others in the slow one."""
    more = [pytest.param(family, marks=pytest.mark.slow) for family in families if family not in FULL]
    return pytest.mark.parametrize("family", [*FULL, *more])


some_families = all_in_the_slow_tests([family for family in OTHERS if family not in PLAIN_DIFFERS])


@lru_cache
def base(family, seed=0):
    """The plain model: only read, never changed."""
    return tiny_lm(family, seed)


@lru_cache
def ready(family):
    """A context-ready model: only read, never changed."""
    return tiny_ready(family)


def generate(model, tokens, new=8, seed=0, **settings):
    """What comes after the prompt; never padding, which would be taken for padding when it is read again."""
    torch.manual_seed(seed)
    always = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0, "suppress_tokens": [0]}
    return model.generate(tokens, **always | settings)


def cacheless(model, tokens, **settings):
    return generate(model, tokens, use_cache=False, **settings)
