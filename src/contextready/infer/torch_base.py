"""What the PyTorch engines share: how tokens, rows and states are checked, and how a prompt is read."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache, partial

import torch
from torch import Tensor

from contextready.infer.engine import Logits, check_capacity, check_ids, check_row, check_step
from contextready.model.context_ready import ContextReady
from contextready.model.state import State
from contextready.solve.early import check_early, early_model
from contextready.solve.prompt_reader import PromptReader
from contextready.solve.reading import ReadInfo


class TorchEngine(ABC):
    """What both engines share: a state in and out of each row, and how a prompt is read into it."""

    name = "eager"

    def __init__(self, model: ContextReady, rows: int, capacity: int, history: int, reader: PromptReader) -> None:
        self.model, self.rows, self.history, self.reader = model, rows, history, reader
        check_early(model, reader)
        self._early = cache(partial(early_model, model, reader))
        """The model for early passes over prompts, created for the first prompt that needs it."""
        weight = next(model.backbone.parameters())
        self.device = weight.device
        self.capacity: int | None = capacity
        with torch.no_grad():
            z_11C = weight.new_zeros(1, 1, model.backbone.width)
            self.vocab_size: int = model.backbone.head(z_11C).shape[-1]

    @torch.no_grad()
    def read(self, row: int, tokens: Sequence[int]) -> tuple[Logits, ReadInfo]:
        """Append a prompt to a row; returns logits (V,) after its last token."""
        z_11C, info = self._checked_read(row, tokens)
        return as_numpy(self.model.backbone.head(z_11C)[0, 0]), info

    @torch.no_grad()
    def append(self, row: int, tokens: Sequence[int]) -> ReadInfo:
        """Append tokens to a row without computing logits."""
        return self._checked_read(row, tokens)[1]

    @torch.no_grad()
    def step(self, tokens: Sequence[int], rows: Sequence[int] | None = None) -> Logits:
        """Read one token in each of these rows, by default in all; returns logits (tokens, V)."""
        stepping = check_step(tokens, rows, self.rows, self.vocab_size)
        check_capacity(self.capacity, max(self.position(row) for row in stepping) + 1)
        # Neighbours share a run of memory, so they are stepped next to each other.
        order = sorted(range(len(stepping)), key=stepping.__getitem__)
        logits_RV = self._step([stepping[i] for i in order], [tokens[i] for i in order])
        if order == list(range(len(order))):
            return as_numpy(logits_RV)
        return as_numpy(logits_RV[torch.tensor(order, device=self.device).argsort()])

    def _checked_read(self, row: int, tokens: Sequence[int]) -> tuple[Tensor, ReadInfo]:
        check_row(row, self.rows)
        check_ids(tokens, self.vocab_size)
        check_capacity(self.capacity, self.position(row) + len(tokens))
        return self._read(row, torch.tensor([list(tokens)], device=self.device))

    @abstractmethod
    def _step(self, rows: list[int], tokens: list[int]) -> Tensor:
        """Read one token in each of these rows, in ascending order; returns logits (rows, V)."""

    @abstractmethod
    def _read(self, row: int, tokens_1T: Tensor) -> tuple[Tensor, ReadInfo]:
        """Read tokens into a row; returns z of the last one."""

    @abstractmethod
    def position(self, row: int) -> int:
        """Number of tokens that this row has read."""

    @abstractmethod
    def state(self, row: int) -> State:
        """The state of a row, as a value that shares no memory with the engine."""

    @abstractmethod
    def load(self, row: int, state: State | None) -> None:
        """Continue a row from a state with one row; None starts before the first token."""

    def free(self, row: int) -> None:
        """Forget what a row has read."""
        self.load(row, None)

    def copy_row(self, source: int, target: int) -> None:
        """Make one row continue from where another is."""
        self.load(target, self.state(source))

    def checked(self, row: int, state: State | None) -> State:
        """The state to continue a row from; refuses one of another model."""
        check_row(row, self.rows)
        if state is None:
            return self.model.init_state(1, self.history)
        width, weight = self.model.backbone.width, next(self.model.backbone.parameters())
        self.model.check_state(state, weight.new_empty(1, 1, width))
        return state


def as_numpy(logits: Tensor) -> Logits:
    """Logits as numpy numbers in float32."""
    values: Logits = logits.float().cpu().numpy()
    return values
