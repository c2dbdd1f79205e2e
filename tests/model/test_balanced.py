"""The balanced correction: what two norms are for. Every test over all corrections runs on it too."""

import torch
from helpers import gap, random_tokens, small_config, small_model

from contextready import account


def test_it_costs_what_add_costs_and_one_norm_more():
    add, balanced = (account(small_config(correction=name)) for name in ("add", "balanced"))
    assert balanced.macs == add.macs
    assert balanced.parameters == add.parameters + 12


def test_a_z_that_is_hundreds_of_times_the_token_does_not_hide_it():
    """In pretrained models it is: the sum is then z alone, and `add` gives nearly the same correction to any token."""
    e, other = (torch.randn(1, 1, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    z = 300.0 * torch.randn(1, 1, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    difference = {}
    for name in ("add", "balanced"):
        correction = small_model(correction=name).correction
        difference[name] = gap(correction(z, e), correction(z, other)) / correction(z, e).abs().max().item()
    assert difference["add"] < 0.05
    assert difference["balanced"] > 0.3


def test_nor_does_a_token_hide_a_small_z():
    correction = small_model(correction="balanced").correction
    e = torch.randn(1, 1, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    z = torch.randn(2, 1, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) / 300.0
    assert gap(correction(z[:1], e), correction(z[1:], e)) > 0.1


def test_position_0_sees_its_token():
    """LN(0) is 0 (without a bias), so the first correction is that of the token alone."""
    model = small_model(correction="balanced")
    first, other = model(random_tokens(), 2)[:, 0], model(random_tokens(seed=3), 2)[:, 0]
    assert gap(first, other) > 1e-3
