"""Batches as a pure function of their index, so that any step can be repeated and every rank finds its own rows."""

import numpy as np
import torch
from torch import Tensor

from contextready.data.shards import IGNORED, TokenArray
from contextready.errors import ContextReadyError

ROUNDS = 4


class Sequences:
    """A split cut into consecutive sequences of T inputs, so that each token but the first is a target once."""

    def __init__(self, tokens: TokenArray, block_size: int, split: str = "train") -> None:
        self.tokens, self.block_size = tokens, block_size
        self.count = (len(tokens) - 1) // block_size
        if self.count < 1:
            raise ContextReadyError(
                f"block_size={block_size} is longer than the {split} data ({len(tokens):,} tokens); "
                "use a smaller block_size or more text."
            )

    def read(self, indices: np.ndarray, offset: int = 0) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets (B, T) of these sequences, all shifted by `offset` tokens.

        Targets that the loss does not count are IGNORED.
        """
        both_BT, counted = self._read(self.tokens, indices, offset), self.tokens.counted
        targets_BT = both_BT[:, 1:]
        if counted is not None:
            targets_BT = targets_BT.masked_fill(self._read(counted, indices, offset)[:, 1:] == 0, IGNORED)
        return both_BT[:, :-1], targets_BT

    def _read(self, tokens: TokenArray, indices: np.ndarray, offset: int) -> Tensor:
        T = self.block_size
        rows = [tokens.read(self.start(int(i)) + offset, T + 1) for i in indices]
        return torch.from_numpy(np.stack(rows).astype(np.int64))

    def start(self, index: int) -> int:
        """Return where a sequence begins in the split."""
        return index * self.block_size


class RandomSequences(Sequences):
    """Sequences that begin anywhere in a split, drawn with replacement, so that they may overlap."""

    def __init__(self, tokens: TokenArray, block_size: int, count: int, seed: int, split: str = "train") -> None:
        super().__init__(tokens, block_size, split)
        self.count, self.starts_N = count, np.random.default_rng(seed).integers(len(tokens) - block_size, size=count)

    def start(self, index: int) -> int:
        """Return where a sequence begins in the split."""
        return int(self.starts_N[index])


class Batches:
    """Endless shuffled training sequences. Every epoch visits each once, in its own order and at its own offset."""

    def __init__(self, tokens: TokenArray, block_size: int, seed: int) -> None:
        self.sequences, self.seed = Sequences(tokens, block_size), seed
        # The last one is left out, so that every epoch can shift all sequences by its own offset.
        self.per_epoch = max(1, self.sequences.count - 1)

    def read(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets of sequences `first` to `first + count - 1`, counted over the whole run."""
        numbers = np.arange(first, first + count)
        inputs, targets = [], []
        for epoch in np.unique(numbers // self.per_epoch):
            places = numbers[numbers // self.per_epoch == epoch] % self.per_epoch
            seed = (self.seed, int(epoch))
            offset = (
                int(np.random.default_rng(seed).integers(self.sequences.block_size)) if self.sequences.count > 1 else 0
            )
            x_BT, y_BT = self.sequences.read(shuffled(places, self.per_epoch, seed), offset)
            inputs.append(x_BT)
            targets.append(y_BT)
        return torch.cat(inputs), torch.cat(targets)


def shuffled(places: np.ndarray, size: int, seed: tuple[int, ...]) -> np.ndarray:
    """Map these indices through a seeded permutation of 0 … size - 1, without building the permutation.

    A Feistel network permutes the next power of four. An index that lands outside `size` is mapped again until it is
    inside.
    """
    half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    keys = np.random.default_rng(seed).integers(1 << 63, size=ROUNDS, dtype=np.uint64)
    result = places.astype(np.uint64)
    outside = np.ones(len(result), bool)
    while outside.any():
        left, right = result[outside] >> np.uint64(half), result[outside] & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right, key) & mask)
        result[outside] = (left << np.uint64(half)) | right
        outside = result >= size
    return result.astype(np.int64)


def _mixed(x: np.ndarray, key: np.uint64) -> np.ndarray:
    """Scramble 64-bit numbers (the finalizer of splitmix64)."""
    with np.errstate(over="ignore"):
        x = (x + key) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: np.ndarray = x ^ (x >> np.uint64(31))
        return mixed
