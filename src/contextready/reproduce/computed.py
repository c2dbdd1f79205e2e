"""Claims that need no training: costs, identities of the method, and statements that tests check in float64."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from contextready.measure.exactness import run_exact
from contextready.model.config import ModelConfig
from contextready.model.context_ready import build_model
from contextready.model.cost import account
from contextready.reproduce.verdicts import REPRODUCED, Verdict, of_identity, of_range
from contextready.runs.catalog import cache_ratios, millions
from contextready.runs.config import TrainConfig
from contextready.runs.paper_models import PAPER_MODELS
from contextready.solve.norms import largest_change
from contextready.solve.unroll import unroll
from contextready.train.cost import step_macs

ROUNDING = 1e-10
TESTS = "pytest tests/measure"
"""The tests of the theorems."""


@dataclass(frozen=True)
class Finding:
    """What was found for one part of a claim."""

    what: str
    paper: str
    ours: str
    verdict: Verdict
    seeds: int | None = None
    """Seeds behind it; None if it is computed."""
    is_control: bool = False


def finite_steps() -> list[Finding]:
    """After K passes, exactly K - 1 positions equal the stream."""
    found = run_exact(tokens=32, layers=2, width=64, seed=0)
    pairs = [(str(exact), str(min(k, 32))) for k, exact in enumerate(found.exact)]
    what = "exact positions after K = 1 … 33 passes over 32 tokens (random model, float64)"
    return [
        Finding(
            what,
            "K - 1",
            "K - 1" if of_identity(pairs) == Verdict(REPRODUCED) else str(found.exact),
            of_identity(pairs),
        )
    ]


@torch.no_grad()
def no_contraction_needed() -> list[Finding]:
    """A correction that expands: the passes do not settle until the last one, and then equal the stream."""
    torch.manual_seed(0)
    tokens, scale = 24, 8.0
    config = ModelConfig(64, 32, 1, heads=4, correction="add", correction_scale=scale)
    model = build_model(config).double()
    ids_1T = torch.randint(64, (1, tokens))
    exact_1TC, _ = model.read(model.embed(ids_1T), model.init_state(1))
    early_1TC, _ = unroll(model, ids_1T, tokens // 2)
    last_1TC, _ = unroll(model, ids_1T, tokens + 1)
    before, after = largest_change(early_1TC, exact_1TC), largest_change(last_1TC, exact_1TC)
    verdict = of_identity([(str(after < ROUNDING and before > 0.1), "True")])
    what = f"error after T/2 and after T + 1 passes with a correction {scale:g} times as large (T={tokens}, float64)"
    return [Finding(what, "0 in the end", f"{before:.2f}, {after:.0e}", verdict)]


def flops() -> list[Finding]:
    """The cost of the parts of a model, in units of C²."""
    width, vocabulary = 64, 128
    base, deeper, ready = (
        account(ModelConfig(vocabulary, width, layers, 4, correction=correction))
        for layers, correction in ((1, None), (2, None), (1, "add"))
    )
    square = width * width
    pairs = [
        (f"{(deeper.macs - base.macs) // square}C²", "12C²"),
        (f"{ready.macs_correction // square}C²", "8C²"),
        ("VC" if base.macs_head == vocabulary * width else str(base.macs_head), "VC"),
    ]
    return [_identity("block, correction, head", pairs)]


def flops_of_models() -> list[Finding]:
    """The FLOPs per token of the models that are compared."""
    names = ("owt-d1-c2048", "owt-n6-c1088", "owt-d5-c1120", "owt-n12-c768")
    return [_identity(", ".join(names), [_cost(name) for name in names])]


def _cost(name: str) -> tuple[str, str]:
    paper = PAPER_MODELS[name]
    assert paper.flops is not None
    return millions(account(paper.config).macs, paper.flops), paper.flops


def parameters() -> list[Finding]:
    """The parameters of the models that are timed."""
    names = [name for name, paper in PAPER_MODELS.items() if paper.parameters is not None]
    pairs = []
    for name in names:
        printed = PAPER_MODELS[name].parameters
        assert printed is not None
        pairs.append((millions(account(PAPER_MODELS[name].config).parameters, printed), printed))
    return [_identity(", ".join(names), pairs)]


def cache() -> list[Finding]:
    """How much smaller the caches of the context-ready models are."""
    pairs = [(f"{pair['cache_ratio']:.1f}×", pair["paper"]) for pair in cache_ratios()]
    return [_identity("cache of D=5 against N=12, and of D=1 against N=6", pairs)]


def fixed_depth_cost() -> list[Finding]:
    """A step with K=10 against one with random K."""
    model = account(PAPER_MODELS["owt-d1-c2048"].config)

    def macs(passes: str) -> float:
        return step_macs(model, TrainConfig("data", "out", block_size=1024, gradient="unroll", passes=passes))

    ratio = macs("10") / macs("2..10")
    verdict = of_range([ratio], 1.6, 2.4, below=None, above=1.2)
    what = "a step with K=10 against K=2..10, D=1 C=2048 (computed)"
    return [Finding(what, "2×", f"{ratio:.2f}×", Verdict(verdict.word))]


def training_cost() -> list[Finding]:
    """A step of K passes against one pass."""
    model = account(PAPER_MODELS["owt-d12-c1024"].config)
    one, five = (
        step_macs(model, TrainConfig("data", "out", gradient="unroll", passes=passes)) for passes in ("1", "5")
    )
    ratio = five / one
    verdict = of_range([ratio], 4.0, 6.0, below=None, above=1.0)
    return [
        Finding("a step with K=5 against K=1, D=12 C=1024 (computed)", "K×", f"{ratio:.2f}×", Verdict(verdict.word))
    ]


def _tested(what: str, paper: str, test: str) -> list[Finding]:
    return [Finding(what, paper, f"holds in float64 (`{test}`)", Verdict(REPRODUCED))]


def _identity(what: str, pairs: Sequence[tuple[str, str]]) -> Finding:
    ours, theirs = (", ".join(side) for side in zip(*pairs, strict=True))
    return Finding(what, theirs, ours, of_identity(pairs))


def convergence_rate() -> list[Finding]:
    """The bound on the error after K passes."""
    return _tested(
        "error after K passes of contracting models", "at most L to the power K", "tests/measure/test_theory.py"
    )


def depth_separation() -> list[Finding]:
    """The layers that a windowed transformer needs."""
    return _tested(
        "reach of a stack of windowed layers, and of one context-ready layer",
        "⌈T/W⌉ layers",
        "tests/measure/test_window.py",
    )


COMPUTED = {
    "finite-steps": (finite_steps, "crt exact"),
    "no-contraction-needed": (no_contraction_needed, "crt reproduce ledger"),
    "convergence-rate": (convergence_rate, TESTS),
    "depth-separation": (depth_separation, TESTS),
    "flops": (flops, "crt info"),
    "flops-of-models": (flops_of_models, "crt info"),
    "parameters": (parameters, "crt info"),
    "cache": (cache, "crt info"),
    "fixed-depth-cost": (fixed_depth_cost, "crt plan k10-fixed/owt-d1-c2048"),
    "training-cost": (training_cost, "crt plan owt-d12-c1024"),
}
"""The claims that need no training, each with the command that shows it."""
ABOUT_THE_PAPER = {
    "single-runs": "A statement about the paper's own runs.",
    "scale-tested": "A statement about the paper's own runs.",
    "prefill-depth": "Holds by construction: each of K passes runs D layers.",
    "pointer-window": "The miniature has the same kind of window; docs/pointer.md has what it allows.",
}
"""Claims for which there is nothing to measure here, and why."""
