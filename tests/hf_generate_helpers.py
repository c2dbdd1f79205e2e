"""Context-ready models of some families, and helpers that call `generate`."""

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
"""Families whose plain model rounds to float32, mixes packed documents, or cannot use some caches."""


def all_in_the_slow_tests(families):
    """Parametrise over families: a few in every test run, the others only in the slow tests."""
    more = [pytest.param(family, marks=pytest.mark.slow) for family in families if family not in FULL]
    return pytest.mark.parametrize("family", [*FULL, *more])


some_families = all_in_the_slow_tests([family for family in OTHERS if family not in PLAIN_DIFFERS])


@lru_cache
def base(family, seed=0):
    """The plain model, which tests must not change."""
    return tiny_lm(family, seed)


@lru_cache
def ready(family):
    """A context-ready model, which tests must not change."""
    return tiny_ready(family)


def generate(model, tokens, new=8, seed=0, **settings):
    """Continue prompts; suppresses the padding token, which would be masked if it were read again."""
    torch.manual_seed(seed)
    always = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0, "suppress_tokens": [0]}
    return model.generate(tokens, **always | settings)


def cacheless(model, tokens, **settings):
    return generate(model, tokens, use_cache=False, **settings)
