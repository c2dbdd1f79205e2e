"""How fast prompts are read: every solver on prompts of several lengths, each within a time limit."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from contextready.bench.models import BenchModel
from contextready.model.context_ready import ContextReady
from contextready.model.narrow import narrowed
from contextready.model.transformer import Transformer
from contextready.solve.prefill import prefill
from contextready.solve.prompt_reader import SOLVERS
from contextready.solve.unroll import unroll

LIMIT = 60.0
"""Seconds after which reading a prompt is cut off."""
LONG = 2.0
"""A first reading that took this many seconds was not slowed down by warming up, so it is not repeated."""
RATE = 0.55
"""What a pass leaves of the change before it, in the paper's trained models (L = 0.55)."""
PROBE = 64
"""Tokens on which a random model's rate is measured."""
PASSES = 6
HALVINGS = 20

Tell = Callable[[str, int | None, int], None]
"""Told what is being read, how many tokens there are to process if that is known, and how many more were processed."""


class Way(NamedTuple):
    """A way to compute with a model."""

    precision: str
    model: ContextReady
    early: ContextReady | None = None
    """The model for early passes."""


class CutOffError(Exception):
    """Reading took longer than the limit."""


def measure_prefill(
    one: BenchModel,
    lengths: Sequence[int],
    limit: float = LIMIT,
    tell: Tell = lambda *_: None,
    bf16: bool = False,
) -> list[dict[str, Any]]:
    """Time every solver on prompts of these lengths; returns nothing for a transformer or an exported file.

    With `bf16`, every solver is also timed with all passes in bf16, and with early ones only (mixed). The correction of
    a model with random weights is made smaller first (`settle`). A reading that takes more than `limit` seconds is cut
    off, and its record says how far it came.
    """
    if isinstance(one.model, Path) or not one.model.is_recurrent or not lengths:
        return []
    factor = settle(one.model) if one.is_random else 1.0
    ways: list[tuple[Way, tuple[str, ...]]] = [(Way("f32", one.model), SOLVERS)]
    if bf16:
        # Created before the clock runs, as an engine creates it once for all prompts.
        narrow, passes = narrowed(one.model), tuple(solver for solver in SOLVERS if solver != "sequential")
        ways += [(Way("mixed", one.model, narrow), passes), (Way("bf16", narrow), SOLVERS)]
    records = []
    for length in lengths:
        if one.text is not None and len(one.text) >= length:
            tokens_1T = one.text[None, :length]
        else:
            tokens_1T = torch.randint(one.account.config.vocab_size, (1, length))
        for way, solver in ((way, solver) for way, solvers in ways for solver in solvers):
            what = f"{one.label}, {solver}, {length:,} tokens"
            record = _read(way, tokens_1T, solver, limit, partial(tell, f"{what}, warm-up"))
            if not record["cut_off"] and record["seconds"] < LONG:
                record = _read(way, tokens_1T, solver, limit, partial(tell, what))
            known = {"label": one.label, "asked": solver, "precision": way.precision, "correction_factor": factor}
            records.append(known | record)
    return records


@torch.no_grad()
def settle(model: ContextReady) -> float:
    """Make the correction of a random model smaller until passes contract as a trained model's do; returns the factor.

    Random weights do not contract, so parallel passes would continue to T + 1, and sweeps would be given up. A
    correction without a network of its own stays as it is.
    """
    correction, factor = model.correction, 1.0
    tokens_1T = torch.randint(model.backbone.head(model.embed(torch.tensor([[0]]))).shape[-1], (1, PROBE))
    for _ in range(HALVINGS if correction.ffn is not None else 0):
        rate = unroll(model, tokens_1T, passes=PASSES)[1].rate
        if rate is not None and rate <= RATE:
            break
        factor /= 2
        correction.scale /= 2
        if correction.gain is not None:
            correction.gain.div_(2)
    return factor


def _read(
    way: Way, tokens_1T: torch.Tensor, solver: str, limit: float, tell: Callable[[int | None, int], None]
) -> dict[str, Any]:
    """Read a prompt once, within the limit; returns how."""
    T, start, processed = tokens_1T.shape[1], time.perf_counter(), 0
    total = T if solver == "sequential" else None

    def after(tokens: int) -> None:
        nonlocal processed
        processed += tokens
        tell(total, tokens)
        if time.perf_counter() - start > limit:
            raise CutOffError

    try:
        with _watched(way, after):
            early = "off" if way.early is None else "on"
            info = prefill(way.model, tokens_1T, solver=solver, bf16_passes=early, early=way.early).info
    except CutOffError:
        # One by one, every token that was processed has been read; otherwise, all were processed several times.
        read = min(T, processed) if solver == "sequential" else T
        return {
            "solver": solver,
            "tokens": read,
            "seconds": time.perf_counter() - start,
            "passes": processed / T,
            "bf16_passes": None,
            "cost": None,
            "certificate": None,
            "exact": False,
            "cut_off": True,
            "note": f"cut off after {limit:g} s and {processed / T:.1f} passes",
        }
    return {"cost": info.cost, "certificate": info.certificate, "cut_off": False} | asdict(info)


@contextmanager
def _watched(way: Way, after: Callable[[int], None]) -> Iterator[None]:
    """Call `after` with the number of tokens whenever tokens have passed through the blocks."""
    handles = []
    for model in (way.model, way.early):
        if model is not None:
            assert isinstance(model.backbone, Transformer)
            block = model.backbone.last_block
            handles.append(block.register_forward_hook(lambda _module, _args, z_BTC: after(z_BTC.shape[1])))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
