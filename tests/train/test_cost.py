"""The cost of a step, compared with what PyTorch counts."""

import pytest
import torch
from helpers import random_tokens
from torch.utils.flop_counter import FlopCounterMode

from contextready import account, build_model
from contextready.runs.config import build_run
from contextready.train.cost import sequence_macs
from contextready.train.objective import Objective

T = 4


@pytest.mark.parametrize("passes", [1, 2, 5])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gradient": "truncated"},
        {"gradient": "truncated", "truncated_passes": 3},
        {"gradient": "implicit", "adjoint_steps": 0},
        {"gradient": "implicit", "adjoint_steps": 3},
    ],
)
def test_multiply_accumulates_of_a_step_are_what_pytorch_counts(changes, passes):
    shape = {"vocab_size": 64, "width": 64, "layers": 2, "heads": 2, "correction": "add", "block_size": T}
    run = build_run(shape | {"data": "d", "out": "o", "passes": 5} | changes)
    t = run.train
    model = build_model(run.model)
    objective = Objective(
        model, gradient=t.gradient, truncated_passes=t.truncated_passes, adjoint_steps=t.adjoint_steps
    )
    tokens = random_tokens(batch=1, length=T, vocab_size=64)
    with FlopCounterMode(display=False) as counter:
        loss = objective.backward(tokens, tokens, passes)
    predicted = sequence_macs(account(run.model), t, passes, loss.adjoint_steps)
    # Attention is a few percent here; PyTorch may count it whole, half or not at all.
    assert counter.get_total_flops() / 2 == pytest.approx(predicted, rel=0.05)
    assert torch.isfinite(loss.mean)
