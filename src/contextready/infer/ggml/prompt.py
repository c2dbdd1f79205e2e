"""Reading a prompt in ggml with many tokens in one product: the solvers of `solve/prefill.py`, without torch.

Shape suffixes: T tokens of the chunk, P tokens of one product, C width.
"""

from collections.abc import Callable, Sequence
from math import ceil, inf

import numpy as np
import numpy.typing as npt

from contextready.infer.ggml.config import ExportedConfig
from contextready.model.macs import attention_macs_of, block_macs, correction_macs, ffn_macs
from contextready.solve.prompt_reader import FEWEST_SEGMENTS, SHORTEST_SEGMENT, PromptReader
from contextready.solve.reading import ReadInfo, all_exact
from contextready.solve.sweeping import Sweeps, solve_by_sweeps

Floats = npt.NDArray[np.float32]
Compute = Callable[[Sequence[int], Sequence[int], Floats | None], tuple[Floats, Floats]]
"""Runs the blocks on tokens at these positions of the row, corrected by these vectors carried over from the positions
before them (none: without a correction); returns z and the vectors that they carry over, in arrays that the next call
overwrites."""

WIDTH = 32
"""The most tokens in one product."""


class PromptChunk:
    """Tokens that are being solved in place, in the row's own keys and values."""

    def __init__(self, compute: Compute, tokens: Sequence[int], position: int, before_C: Floats) -> None:
        self._compute, self._ids, self._position, self._before_C = compute, list(tokens), position, before_C
        self.z_TC, self.carried_TC = (np.zeros((len(tokens), len(before_C)), np.float32) for _ in range(2))

    @property
    def tokens(self) -> int:
        """T, the number of tokens."""
        return len(self._ids)

    def plain_pass(self) -> None:
        """Process all positions, without a correction."""
        self._take(range(self.tokens), None)

    def parallel_pass(self) -> float:
        """Process all positions with the z before them from the last pass; return the largest change of z."""
        before_TC = self.z_TC.copy()
        self._take(range(self.tokens), np.concatenate((self._before_C[None], self.carried_TC[:-1])))
        return _largest_change(before_TC, self.z_TC)

    def sweep(self, exact: int, segment: int) -> float:
        """Sweep over all segments that are not exact yet; return the largest change of z, relative to its norm."""
        before_TC = self.z_TC.copy()
        for j in range(segment):
            self._step(exact * segment + j, segment)
        return _largest_change(before_TC, self.z_TC)

    def read_from(self, first: int) -> None:
        """Read the tokens from `first` on one at a time; those before it must be exact."""
        for t in range(first, self.tokens):
            self._step(t, self.tokens)

    def reset(self) -> None:
        """Do nothing: every position is read again, and later ones are not seen before they are overwritten."""

    def _step(self, first: int, stride: int) -> None:
        """Process tokens first, first + stride, … together, each with the newest z before it."""
        chosen = range(first, self.tokens, stride)
        if chosen:
            before_PC = self.carried_TC[[t - 1 for t in chosen]]
            if first == 0:
                before_PC[0] = self._before_C
            self._take(chosen, before_PC)

    def _take(self, chosen: range, before_PC: Floats | None) -> None:
        for begin in range(0, len(chosen), WIDTH):
            part = chosen[begin : begin + WIDTH]
            positions = [self._position + t for t in part]
            before = None if before_PC is None else before_PC[begin : begin + WIDTH]
            z_PC, carried_PC = self._compute([self._ids[t] for t in part], positions, before)
            taken = slice(part.start, part.stop, part.step)
            self.z_TC[taken], self.carried_TC[taken] = z_PC, carried_PC


def solve(
    chunk: PromptChunk, config: ExportedConfig, position: int, reader: PromptReader, free_tokens: Callable[[], float]
) -> ReadInfo:
    """Solve a chunk that begins at `position`; `free_tokens` measures what `solve/hardware.py` does in torch."""
    T = chunk.tokens
    segment = reader.segment or max(SHORTEST_SEGMENT, ceil(T / WIDTH))
    short = FEWEST_SEGMENTS * (reader.segment or SHORTEST_SEGMENT) > T
    if reader.solver == "sequential" or T == 1 or (reader.solver == "sweep" and short):
        chunk.read_from(0)
        return _info(config, position, T, "sequential", [(0, T)], exact=True)
    if config.correction is None:
        chunk.plain_pass()
        return _info(config, position, T, "plain", [], plain_pass=True, exact=True)
    if reader.solver == "jacobi":
        changes, runs = _iterate(chunk, reader.tolerance), (0, T)
        exact = all_exact(changes, T)
        return _info(config, position, T, "jacobi", [runs] * len(changes), changes, plain_pass=True, exact=exact)
    swept: Sweeps = solve_by_sweeps(chunk, reader.tolerance, segment, free_tokens())
    return _info(config, position, T, "sweep", swept.runs, swept.changes, plain_pass=True, exact=swept.exact)


def _iterate(chunk: PromptChunk, tolerance: float) -> tuple[float, ...]:
    """Repeat parallel passes until one changes no position by more than the tolerance; returns the changes."""
    chunk.plain_pass()
    changes = [inf]
    while len(changes) <= chunk.tokens and not changes[-1] <= tolerance:
        changes.append(chunk.parallel_pass())
    return tuple(changes[1:])


def _info(
    config: ExportedConfig,
    position: int,
    tokens: int,
    solver: str,
    runs: Sequence[tuple[int, int]],
    changes: tuple[float, ...] = (),
    *,
    plain_pass: bool = False,
    exact: bool,
) -> ReadInfo:
    """Report on a plain pass, if there was one, and on ranges (first, end) of tokens read with a correction."""

    def macs(first: int, end: int) -> int:
        return (end - first) * block_macs(config) + attention_macs_of(config, position + first, position + end)

    plain = macs(0, tokens)
    correction = correction_macs(config.correction, config.width, ffn_macs(config))
    corrected = sum(macs(*run) + (run[1] - run[0]) * correction for run in runs)
    return ReadInfo(
        solver=solver,
        tokens=tokens,
        seconds=0.0,
        passes=float(plain_pass) + sum(end - first for first, end in runs) / tokens,
        macs=corrected + plain * plain_pass,
        plain_macs=plain,
        changes=changes,
        exact=exact,
    )


def _largest_change(before_TC: Floats, z_TC: Floats) -> float:
    """The largest change of any position's z, relative to its norm; an unchanged zero counts as 0."""
    change_T, norm_T = np.linalg.norm(z_TC - before_TC, axis=1), np.linalg.norm(z_TC, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.where(change_T == 0.0, 0.0, change_T / norm_T).max())
