"""Measures on a small random model that streaming and parallel passes compute the same function."""

from dataclasses import dataclass
from itertools import islice

import torch

from contextready.errors import ContextReadyError
from contextready.measure.contraction import empirical_rate
from contextready.model.config import ModelConfig
from contextready.model.context_ready import build_model
from contextready.solve.norms import largest_change, relative_changes
from contextready.solve.unroll import unroll

VOCABULARY = 256
ROUNDING = 1e-12


@dataclass(frozen=True)
class ExactResult:
    """The measurements. Changes and errors are the largest over positions, relative to each position's norm."""

    tokens: int
    changes: list[float]
    """The change of z in passes k = 2 … T + 1."""
    errors: list[float]
    """The difference between z and streaming after passes k = 1 … T + 1."""
    exact: list[int]
    """The number of leading positions that equal streaming after passes k = 1 … T + 1."""
    cumulative_error: float
    """The difference between the cumulative (resnet) unroll and streaming after T + 1 passes."""
    rate: float
    """The paper's L̂ at the fifth correction."""
    norm_rate: float
    """The ratio of the largest changes at the fifth correction."""


@torch.no_grad()
def run_exact(tokens: int, layers: int, width: int, seed: int) -> ExactResult:
    """Stream T random tokens, unroll T + 1 parallel passes over them, and compare the results in float64."""
    if tokens < 8:
        raise ContextReadyError(f"--tokens must be at least 8, but got {tokens}.")
    if tokens > 2048 or width % 8 or not 0 <= seed < 2**63:
        raise ContextReadyError(
            "--tokens must be at most 2048, --width a multiple of 8, and --seed between 0 and 2**63 - 1, but got "
            f"{tokens}, {width} and {seed}."
        )
    torch.manual_seed(seed)
    config = ModelConfig(VOCABULARY, width, layers, heads=4, correction="add")
    model = build_model(config).double()
    tokens_1T = torch.randint(VOCABULARY, (1, tokens))

    e_1TC = model.embed(tokens_1T)
    exact_1TC, _ = model.read(e_1TC, model.init_state(1))

    errors, exact = [], []
    for made in islice(model.passes(e_1TC), tokens + 1):
        error_T = relative_changes(made.z_BTC, exact_1TC)[0]
        errors.append(float(error_T.max()))
        wrong = (error_T > ROUNDING).nonzero()
        exact.append(int(wrong[0].item()) if len(wrong) else tokens)
    _, info = unroll(model, tokens_1T, tokens + 1)
    cumulative_1TC, _ = unroll(model, tokens_1T, tokens + 1, cumulative=True)
    contraction = empirical_rate(model, tokens_1T, corrections=5)
    return ExactResult(
        tokens=tokens,
        changes=info.changes,
        errors=errors,
        exact=exact,
        cumulative_error=largest_change(cumulative_1TC, exact_1TC),
        rate=contraction.rate,
        norm_rate=contraction.norm_rate,
    )
