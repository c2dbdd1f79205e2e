"""The engine for any other backbone: it works through the backbone's own cache."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from contextready.infer.engine import check_capacity, check_row
from contextready.infer.torch_base import TorchEngine
from contextready.model.cache import KVCache
from contextready.model.context_ready import ContextReady
from contextready.model.padded import PaddedCache
from contextready.model.state import State
from contextready.solve.prefill import prefill
from contextready.solve.prompt_reader import PromptReader
from contextready.solve.reading import ReadInfo


class StateEngine(TorchEngine):
    """One state per row. Rows step together if the backbone can do that exactly, and otherwise one after the other."""

    def __init__(self, model: ContextReady, rows: int, capacity: int, history: int, reader: PromptReader) -> None:
        super().__init__(model, rows, capacity, history, reader)
        with torch.no_grad():
            self._apart: dict[int, State] = {row: model.init_state(1, history) for row in range(rows)}
        self._together: _Together | None = None
        """The rows that stepped together last; all others are apart."""

    def position(self, row: int) -> int:
        """Number of tokens that this row has read."""
        together = self._together
        if together is not None and row in together.rows:
            return together.cache.positions_B[together.rows.index(row)]
        return self._apart[row].position

    def state(self, row: int) -> State:
        """The state of a row."""
        check_row(row, self.rows)
        together = self._together
        if together is not None and row in together.rows:
            return together.state(row)
        # States are immutable values, so no copy is needed.
        return self._apart[row]

    def load(self, row: int, state: State | None) -> None:
        """Continue a row from a state with one row; None starts before the first token."""
        state = self.checked(row, state)
        check_capacity(self.capacity, state.position)
        self._separate([row])
        self._apart[row] = state

    def _read(self, row: int, tokens_1T: Tensor) -> tuple[Tensor, ReadInfo]:
        self._separate([row])
        result = prefill(self.model, tokens_1T, self._apart[row], **asdict(self.reader))
        self._apart[row] = result.state
        return result.z_B1C, result.info

    def _step(self, rows: list[int], tokens: list[int]) -> Tensor:
        tokens_R1 = torch.tensor(tokens, device=self.device)[:, None]
        if len(rows) > 1 and self._can_step_together(rows):
            if self._together is None or self._together.rows != rows:
                self._separate()
                self._together = _Together.of(rows, [self._apart.pop(row) for row in rows])
            together = self._together
            result = self.model.recur(self.model.embed(tokens_R1), together.newest_R1C, together.cache)
            self._together = together.advanced(result.carried_BTC, result.cache)
            return self.model.backbone.head(result.z_BTC)[:, 0]
        self._separate(rows)
        logits = []
        for row, token_1 in zip(rows, tokens_R1, strict=True):
            logits_11V, self._apart[row] = self.model.stream(token_1[None], self._apart[row])
            logits.append(logits_11V[:, 0])
        return torch.cat(logits)

    def _can_step_together(self, rows: Sequence[int]) -> bool:
        if not getattr(self.model.backbone, "steps_rows_together", False):
            return False
        caches = [self._apart[row].cache for row in rows if row in self._apart]
        # A cache that holds fewer positions than it has read cannot be told apart from one with padding.
        return all(isinstance(cache, KVCache) and cache.length == cache.position for cache in caches)

    def _separate(self, rows: Sequence[int] | None = None) -> None:
        """Give the rows that stepped together their own states again, if these rows, or any, are among them."""
        together = self._together
        if together is not None and (rows is None or not set(rows).isdisjoint(together.rows)):
            self._apart |= {row: together.state(row) for row in together.rows}
            self._together = None


@dataclass(frozen=True, eq=False)
class _Together:
    """The states of rows that step together, with their caches as one."""

    rows: list[int]
    cache: PaddedCache
    carried_RKC: list[Tensor]
    """The carried vectors of every row, (1, K, C), where K may differ."""
    histories: list[int]

    @classmethod
    def of(cls, rows: list[int], states: list[State]) -> "_Together":
        """Join the states of these rows."""
        cache = PaddedCache.of([state.cache for state in states if isinstance(state.cache, KVCache)])
        return cls(rows, cache, [state.carried_BRC for state in states], [state.history for state in states])

    @property
    def newest_R1C(self) -> Tensor:
        """What the newest position of every row carries over."""
        return torch.cat([carried_1KC[:, -1:] for carried_1KC in self.carried_RKC])

    def advanced(self, carried_R1C: Tensor, cache: PaddedCache) -> "_Together":
        """The rows after one more token."""
        joined = [
            torch.cat((before_1KC, new_1C[None]), dim=1)[:, -history - 1 :]
            for before_1KC, new_1C, history in zip(self.carried_RKC, carried_R1C, self.histories, strict=True)
        ]
        return replace(self, cache=cache, carried_RKC=joined)

    def state(self, row: int) -> State:
        """The state of one row, as a copy."""
        i = self.rows.index(row)
        return State(self.cache.row(i), self.carried_RKC[i], self.histories[i])
