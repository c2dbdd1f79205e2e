"""The balanced correction and its two norms. Every test over all corrections covers it too."""

import torch
from helpers import gap, random_tokens, small_config, small_model

from contextready import account


def test_it_costs_as_much_as_add_plus_one_norm():
    add, balanced = (account(small_config(correction=name)) for name in ("add", "balanced"))
    assert balanced.macs == add.macs
    assert balanced.parameters == add.parameters + 12


def test_a_z_hundreds_of_times_larger_does_not_hide_the_token():
    """In pretrained models z is that large, so z + e is nearly z, and `add` gives almost the same for every token."""
    e, other = (torch.randn(1, 1, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    z = 300.0 * torch.randn(1, 1, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    difference = {}
    for name in ("add", "balanced"):
        correction = small_model(correction=name).correction
        difference[name] = gap(correction(z, e), correction(z, other)) / correction(z, e).abs().max().item()
    assert difference["add"] < 0.05
    assert difference["balanced"] > 0.3


def test_a_large_token_does_not_hide_a_small_z():
    correction = small_model(correction="balanced").correction
    e = torch.randn(1, 1, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    z = torch.randn(2, 1, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) / 300.0
    assert gap(correction(z[:1], e), correction(z[1:], e)) > 0.1


def test_position_0_sees_its_token():
    """LN(0) is 0 without a bias, so the first correction depends on the token alone."""
    model = small_model(correction="balanced")
    first, other = model(random_tokens(), 2)[:, 0], model(random_tokens(seed=3), 2)[:, 0]
    assert gap(first, other) > 1e-3
