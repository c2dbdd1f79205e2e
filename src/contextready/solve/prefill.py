"""Reading a prompt: three ways to the same state, each with what it cost and how far from exact it is.

sequential  one token at a time: exact, one pass a token, nothing in parallel
jacobi      parallel passes over the whole prompt (the paper's), until a pass changes little
sweep       one plain pass, then sweeps over segments (`solve/sweep.py`), until a sweep changes little
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, isnan, log2

import torch
from torch import Tensor

from contextready.errors import ContextReadyError
from contextready.model.context_ready import ContextReady
from contextready.model.correction import Nothing
from contextready.model.macs import attention_macs_of, block_macs
from contextready.model.state import State
from contextready.model.transformer import Transformer, check_tokens
from contextready.settings import nearest
from contextready.solve.hardware import free_rows
from contextready.solve.report import ReadInfo
from contextready.solve.sweep import Chunk, solve_by_sweeps
from contextready.solve.unroll import unroll

SOLVERS = ("sweep", "jacobi", "sequential")
TOLERANCE = 0.03
"""The error of z that may be left, by the last changes, relative to the largest ‖z‖; the true one is far smaller, and
greedy continuations were the stream's (docs/log.md)."""
CHUNK = 4096
"""Tokens solved at once; the memory of a longer prompt's solution does not grow with it."""
SHORTEST_SEGMENT = 8
"""Shorter segments would need more sweeps than their wider steps save."""
WIDTH = 8.0
"""How wide a step is, in units of the rows that come free: a ninth of its time then goes to what it costs anyway."""
FEWEST_SEGMENTS = 4
"""A plain pass and the usual three sweeps over fewer segments cost more than reading their tokens one by one."""
MOST_PASSES = 32
"""Passes that a model without sweeps is given to settle before its prompt is read one by one."""


@dataclass(frozen=True, eq=False)
class Prefill:
    """A prompt that has been read."""

    z_B1C: Tensor
    """Block output of the last token: `backbone.head` of it predicts the first token to generate."""
    state: State
    info: ReadInfo


@torch.no_grad()
def prefill(
    model: ContextReady,
    tokens_BT: Tensor,
    state: State | None = None,
    *,
    solver: str = "sweep",
    tolerance: float = TOLERANCE,
    segment: int | None = None,
    chunk: int = CHUNK,
) -> Prefill:
    """Read the next tokens after `state`, or from the start.

    `tolerance` bounds what jacobi's last pass changes, and the error that sweep's last two changes let expect, relative
    to the largest ‖z‖; `segment` fixes the length L, else it is chosen for this hardware. Prompts longer than `chunk`
    tokens are solved chunk by chunk.
    """
    if solver not in SOLVERS:
        raise ContextReadyError(f"Unknown solver '{solver}'; {nearest(solver, SOLVERS)}")
    if not tolerance >= 0.0:
        raise ContextReadyError(f"tolerance={tolerance} is not a distance; give 0 or more, for example 0.01.")
    if chunk < 1 or (segment is not None and segment < 1):
        raise ContextReadyError(f"chunk={chunk} and segment={segment} count tokens; give at least 1.")
    check_tokens(tokens_BT)
    state = model.init_state(tokens_BT.shape[0]) if state is None else state
    model.check_state(state, model.backbone.embed(tokens_BT[:, :1]))
    read = _Reader(model, solver, tolerance, segment)
    start, parts = time.perf_counter(), []
    for first in range(0, tokens_BT.shape[1], chunk):
        part = read(tokens_BT[:, first : first + chunk], state)
        parts.append(part)
        state = part.state
    info = _joined([part.info for part in parts], time.perf_counter() - start)
    return Prefill(parts[-1].z_B1C, state, info)


@dataclass(frozen=True)
class _Reader:
    """Solves one chunk after the other with the same settings."""

    model: ContextReady
    solver: str
    tolerance: float
    segment: int | None

    def __call__(self, tokens_BT: Tensor, state: State) -> Prefill:
        """Read these tokens after `state`."""
        e_BTC, T = self.model.backbone.embed(tokens_BT), tokens_BT.shape[1]
        placed = hasattr(self.model.backbone, "init_buffer")
        if isinstance(self.model.correction, Nothing):
            return self._plain(e_BTC, state)
        if self.solver == "sequential":
            return self._sequential(e_BTC, state, placed)
        if self.solver == "jacobi":
            return self._jacobi(tokens_BT, state, None)
        if FEWEST_SEGMENTS * (self.segment or SHORTEST_SEGMENT) > T:
            return self._sequential(e_BTC, state, placed)
        if placed:
            return self._sweep(e_BTC, state)
        tried = self._jacobi(tokens_BT, state, min(MOST_PASSES, T + 1))
        note = "this backbone has no fixed places for keys and values, so parallel passes were made"
        if tried.info.exact or tried.info.certificate <= self.tolerance:
            return replace(tried, info=replace(tried.info, note=note))
        solved = self._sequential(e_BTC, state, placed)
        note += f"; {MOST_PASSES} were not enough, and the prompt was read one by one"
        return replace(solved, info=replace(solved.info, note=note, passes=solved.info.passes + tried.info.passes))

    def _plain(self, e_BTC: Tensor, state: State) -> Prefill:
        result = self.model.recur(e_BTC, None, state.cache)
        state_after = state.advanced(result.carried_BTC, result.cache)
        macs = self._macs(state, e_BTC, [])
        return Prefill(result.z_BTC[:, -1:], state_after, _info("plain", e_BTC, 1.0, macs, macs, (), True))

    def _sequential(self, e_BTC: Tensor, state: State, placed: bool) -> Prefill:
        T = e_BTC.shape[1]
        if placed:
            chunk = Chunk(self.model, e_BTC, state)
            chunk.read_from(0)
            z_BTC, state_after = chunk.z_BTC, chunk.solved()
        else:
            z_BTC, state_after = self.model.read(e_BTC, state)
        plain = self._macs(state, e_BTC, [])
        macs = self._macs(state, e_BTC, [(0, T)], plain_pass=False)
        return Prefill(z_BTC[:, -1:], state_after, _info("sequential", e_BTC, 1.0, macs, plain, (), True))

    def _jacobi(self, tokens_BT: Tensor, state: State, most: int | None) -> Prefill:
        z_BTC, info = unroll(self.model, tokens_BT, most, tolerance=self.tolerance, state=state)
        assert info.state is not None
        runs = [(0, tokens_BT.shape[1])] * (info.passes - 1)
        macs, plain = self._macs(state, z_BTC, runs), self._macs(state, z_BTC, [])
        changes = tuple(info.relative_residuals)
        return Prefill(
            z_BTC[:, -1:], info.state, _info("jacobi", z_BTC, float(info.passes), macs, plain, changes, info.exact)
        )

    def _sweep(self, e_BTC: Tensor, state: State) -> Prefill:
        T, rows = e_BTC.shape[1], free_rows(self.model)
        segment = self.segment or segment_length(T, rows)
        found = solve_by_sweeps(self.model, e_BTC, state, self.tolerance, segment, rows)
        note = ""
        if found.alone_from is not None:
            note = (
                f"after sweep {len(found.changes)} the rest seemed cheaper one by one, from token {found.alone_from} on"
            )
        passes = 1.0 + sum(end - begin for begin, end in found.runs) / T
        macs, plain = self._macs(state, e_BTC, found.runs), self._macs(state, e_BTC, [])
        info = _info("sweep", e_BTC, passes, macs, plain, found.changes, found.exact, note)
        return Prefill(found.z_BTC[:, -1:], found.state, info)

    def _macs(
        self, state: State, e_BTC: Tensor, runs: Sequence[tuple[int, int]], plain_pass: bool = True
    ) -> int | None:
        """Arithmetic of a plain pass, if one is made, and of runs of tokens that enter with a correction."""
        backbone = self.model.backbone
        if not isinstance(backbone, Transformer):
            return None
        config, (B, T, C) = backbone.config, e_BTC.shape
        correction = self.model.correction.macs_per_width_squared * C * C
        spans = [(0, T, 0)] if plain_pass else []
        spans += [(begin, end, correction) for begin, end in runs]
        return B * sum(
            (end - begin) * (block_macs(config) + extra)
            + attention_macs_of(config, state.position + begin, state.position + end)
            for begin, end, extra in spans
        )


def segment_length(tokens: int, rows: float) -> int:
    """L for so many tokens: steps as wide as pays on this hardware, segments not too short, powers of two."""
    wide: int = max(FEWEST_SEGMENTS, 2 ** round(log2(WIDTH * rows)))
    return max(SHORTEST_SEGMENT, ceil(tokens / wide))


def _info(
    solver: str,
    e_BTC: Tensor,
    passes: float,
    macs: int | None,
    plain_macs: int | None,
    changes: tuple[float, ...],
    exact: bool,
    note: str = "",
) -> ReadInfo:
    return ReadInfo(solver, e_BTC.shape[1], 0.0, passes, macs, plain_macs, changes, exact, note)


def _joined(infos: list[ReadInfo], seconds: float) -> ReadInfo:
    """What the chunks of a prompt cost together; the certificate is the worst of theirs."""
    # One that is not even a number is the worst of all.
    worst = max(infos, key=lambda info: inf if isnan(info.certificate) else info.certificate)
    tokens = sum(info.tokens for info in infos)
    known = all(info.macs is not None and info.plain_macs is not None for info in infos)
    return ReadInfo(
        solver=infos[0].solver,
        tokens=tokens,
        seconds=seconds,
        passes=sum(info.passes * info.tokens for info in infos) / tokens,
        macs=sum(info.macs or 0 for info in infos) if known else None,
        plain_macs=sum(info.plain_macs or 0 for info in infos) if known else None,
        changes=worst.changes,
        exact=all(info.exact for info in infos),
        note=next((info.note for info in infos if info.note), ""),
    )
