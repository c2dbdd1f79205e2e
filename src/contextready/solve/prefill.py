"""Reads prompts with one of three solvers, and reports the cost and the estimated error.

sequential  one token at a time: exact, one pass per token, nothing in parallel
jacobi      the paper's parallel passes over the whole prompt, until a pass changes little
sweep       one plain pass, then sweeps over segments (`solve/sweeping.py`), until a sweep changes little

The native transformer solves a prompt in place, in a buffer of keys and values: an engine's buffer (`read_into`) or a
temporary one (`prefill`). Other backbones use their own caches.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import ceil, log2
from typing import Any

import torch
from torch import Tensor

from contextready.model.buffer import KVBuffer
from contextready.model.cache import KVCache
from contextready.model.checks import check_tokens
from contextready.model.context_ready import ContextReady
from contextready.model.macs import attention_macs_of, block_macs, ffn_macs
from contextready.model.narrow import is_narrow
from contextready.model.state import State
from contextready.model.transformer import Transformer
from contextready.solve.early import check_early, early_model, solve_by_passes
from contextready.solve.hardware import free_tokens
from contextready.solve.prompt_reader import FEWEST_SEGMENTS, SHORTEST_SEGMENT, PromptReader
from contextready.solve.reading import ReadInfo, all_exact, joined
from contextready.solve.sweep import Chunk
from contextready.solve.sweeping import solve_by_sweeps
from contextready.solve.unroll import iterate

WIDTH = 8.0
"""The width of a step in units of `free_tokens`; a step then spends a ninth of its time on its fixed cost."""
MOST_PASSES = 32
"""A backbone without sweeps may take this many passes to converge before its prompt is read one token at a time."""


@dataclass(frozen=True, eq=False)
class Prefill:
    """A prompt that has been read."""

    z_B1C: Tensor
    """Block output of the last token; `backbone.head` maps it to the logits of the first new token."""
    state: State
    info: ReadInfo


@dataclass(frozen=True, eq=False)
class Solved:
    """A chunk of a prompt that has been read: its outputs, its carried vectors, and how it was read."""

    z_BTC: Tensor
    carried_BTC: Tensor
    info: ReadInfo


@torch.no_grad()
def prefill(
    model: ContextReady,
    tokens_BT: Tensor,
    state: State | None = None,
    *,
    early: ContextReady | None = None,
    **settings: Any,
) -> Prefill:
    """Read a prompt after `state`, or from the start, and return a new state.

    The settings are those of `PromptReader`: solver, tolerance, segment, chunk and bf16_passes. `early` is the
    model for early passes if it has been created before (`early_model`), so that many prompts can share one.
    """
    reader = PromptReader(**settings)
    check_early(model, reader)
    check_tokens(tokens_BT)
    state = model.init_state(tokens_BT.shape[0]) if state is None else state
    model.check_state(state, model.embed(tokens_BT[:, :1]))
    if not isinstance(model.backbone, Transformer):
        return _read_by_cache(model, tokens_BT, state, reader)
    assert isinstance(state.cache, KVCache)
    B, T, history = state.batch_size, tokens_BT.shape[1], state.history
    capacity = buffer_capacity(model.backbone, state.position + T, min(T, reader.chunk), history)
    buffer = model.backbone.init_buffer(B, capacity)
    for row in range(B):
        buffer.load(row, state.cache.select(torch.tensor([row], device=tokens_BT.device)))
    make = cache(partial(early_model, model, reader)) if early is None else lambda: early
    before_B1C = state.z_prev_B1C
    solved = read_into(
        model, tokens_BT, buffer, state.position, before_B1C, reader=reader, early=make, keep=history + 1
    )
    caches = [buffer.cache(row, state.position + T, history) for row in range(B)]
    return Prefill(solved.z_BTC[:, -1:], state.advanced(solved.carried_BTC, KVCache.stacked(caches)), solved.info)


def buffer_capacity(backbone: Transformer, tokens: int, chunk: int, history: int) -> int:
    """Return how many slots a prompt needs: one per position, or with a window, those of the window and one chunk."""
    window = backbone.config.window
    return tokens if window is None else min(tokens, window - 1 + max(history, chunk))


@torch.no_grad()
def read_into(
    model: ContextReady,
    tokens_BT: Tensor,
    buffer: KVBuffer,
    position: int,
    before_B1C: Tensor,
    *,
    reader: PromptReader,
    early: Callable[[], ContextReady | None],
    keep: int = 1,
) -> Solved:
    """Read the next tokens, chunk by chunk, into a buffer that already holds the positions before `position`.

    `before_B1C` is the vector carried over from the position before them. Keys and values are written to the buffer.
    `early` returns the model for early passes (`early_model`), and is called only if there are several passes.
    Returns the last position's z and the carried vectors of the newest `keep` positions.
    """
    start, infos = time.perf_counter(), []
    kept: list[Tensor] = []
    for tokens_BS in torch.split(tokens_BT, reader.chunk, dim=1):
        chunk = Chunk(model, model.embed(tokens_BS), buffer, position, before_B1C)
        solved = _solve(chunk, reader, early)
        infos.append(solved.info)
        kept.append(solved.carried_BTC[:, -keep:])
        before_B1C, position = solved.carried_BTC[:, -1:], position + tokens_BS.shape[1]
    info = joined(infos, time.perf_counter() - start)
    return Solved(solved.z_BTC[:, -1:], torch.cat(kept, dim=1)[:, -keep:], info)


def _solve(chunk: Chunk, reader: PromptReader, early: Callable[[], ContextReady | None]) -> Solved:
    """Solve one chunk in its buffer."""
    model, T = chunk.model, chunk.e_BTC.shape[1]
    costs = _Costs(model, chunk.position, chunk.e_BTC)
    short = FEWEST_SEGMENTS * (reader.segment or SHORTEST_SEGMENT) > T
    if not model.is_recurrent:
        chunk.plain_pass()
        info = costs.info("plain", [], exact=True)
    elif reader.solver == "jacobi":
        found = solve_by_passes(model, early(), chunk.e_BTC, chunk.all_places(), chunk.before_B1C, reader.tolerance)
        runs = [(0, T)] * (found.early + found.late)
        info = costs.info("jacobi", runs, found.changes, exact=found.exact, early=found.early)
        return Solved(found.result.z_BTC, found.result.carried_BTC, info)
    elif reader.solver == "sequential" or short:
        chunk.read_from(0)
        info = costs.info("sequential", [(0, T)], exact=True, plain_pass=False)
    else:
        free, narrow = free_tokens(model), early()
        in_bf16 = None if narrow is None else chunk.solved_by(narrow)
        swept = solve_by_sweeps(chunk, reader.tolerance, reader.segment or segment_length(T, free), free, in_bf16)
        note = ""
        if swept.alone_from is not None:
            note = (
                f"after sweep {len(swept.runs) - 1}, tokens from {swept.alone_from} on were read one at a time, "
                "which seemed cheaper"
            )
        info = costs.info("sweep", swept.runs, swept.changes, swept.exact, note, early=swept.early)
    return Solved(chunk.z_BTC, chunk.carried_BTC, info)


def _read_by_cache(model: ContextReady, tokens_BT: Tensor, state: State, reader: PromptReader) -> Prefill:
    """Read with a backbone that has its own kind of cache, chunk by chunk."""
    start, infos = time.perf_counter(), []
    for tokens_BS in torch.split(tokens_BT, reader.chunk, dim=1):
        z_BTC, state, info = _solve_by_cache(model, model.embed(tokens_BS), state, reader)
        infos.append(info)
    return Prefill(z_BTC[:, -1:], state, joined(infos, time.perf_counter() - start))


def _solve_by_cache(
    model: ContextReady, e_BTC: Tensor, state: State, reader: PromptReader
) -> tuple[Tensor, State, ReadInfo]:
    costs, T, note, tried = _Costs(model, state.position, e_BTC), e_BTC.shape[1], "", 0.0
    short = FEWEST_SEGMENTS * (reader.segment or SHORTEST_SEGMENT) > T
    if model.is_recurrent and reader.solver != "sequential" and (reader.solver == "jacobi" or not short):
        most = T + 1 if reader.solver == "jacobi" else min(MOST_PASSES, T + 1)
        result, changes_KBT = iterate(model.passes(e_BTC, state.cache, state.z_prev_B1C), most, reader.tolerance)
        changes = tuple(float(change_BT.max()) for change_BT in changes_KBT)
        if reader.solver == "sweep":
            note = "this backbone does not support sweeps, so parallel passes were used"
        info = costs.info("jacobi", [(0, T)] * len(changes), changes, exact=all_exact(changes, T), note=note)
        if reader.solver == "jacobi" or info.certificate <= reader.tolerance:
            return result.z_BTC, state.advanced(result.carried_BTC, result.cache), info
        note, tried = f"{note}; {MOST_PASSES} were not enough, so the prompt was read one token at a time", info.passes
    z_BTC, state = model.read(e_BTC, state)
    solver = "sequential" if model.is_recurrent else "plain"
    info = costs.info(solver, [(0, T)], exact=True, note=note, plain_pass=False)
    return z_BTC, state, replace(info, passes=info.passes + tried)


@dataclass(frozen=True)
class _Costs:
    """Computes the cost of reading a chunk."""

    model: ContextReady
    position: int
    e_BTC: Tensor

    def info(
        self,
        solver: str,
        runs: Sequence[tuple[int, int]],
        changes: tuple[float, ...] = (),
        exact: bool = False,
        note: str = "",
        plain_pass: bool = True,
        early: int = 0,
    ) -> ReadInfo:
        """Report on a plain pass, if there was one, and on ranges (first, end) of tokens read with a correction.

        If there were early passes in bf16, they are the plain pass and the first of the ranges.
        """
        T = self.e_BTC.shape[1]

        def passes(runs: Sequence[tuple[int, int]], plain_pass: bool) -> float:
            return float(plain_pass) + sum(end - begin for begin, end in runs) / T

        in_bf16 = len(runs) if is_narrow(self.model) else early
        return ReadInfo(
            solver=solver,
            tokens=T,
            seconds=0.0,
            passes=passes(runs, plain_pass),
            macs=self._macs(runs, plain_pass),
            plain_macs=self._macs([], plain_pass=True),
            changes=changes,
            exact=exact,
            note=note,
            bf16_passes=passes(runs[:in_bf16], plain_pass and (early > 0 or is_narrow(self.model))),
        )

    def _macs(self, runs: Sequence[tuple[int, int]], plain_pass: bool) -> int | None:
        backbone = self.model.backbone
        if not isinstance(backbone, Transformer):
            return None
        config, (B, T, C) = backbone.config, self.e_BTC.shape
        correction = self.model.correction.definition.parts.macs(C, ffn_macs(config))
        spans = [(0, T, 0)] if plain_pass else []
        spans += [(begin, end, correction) for begin, end in runs]
        return B * sum(
            (end - begin) * (block_macs(config) + extra)
            + attention_macs_of(config, self.position + begin, self.position + end)
            for begin, end, extra in spans
        )


def segment_length(tokens: int, free: float) -> int:
    """Choose L for this many tokens: as many segments (a power of two) as pay off on this hardware, none too short."""
    wide: int = max(FEWEST_SEGMENTS, 2 ** round(log2(WIDTH * free)))
    return max(SHORTEST_SEGMENT, ceil(tokens / wide))
