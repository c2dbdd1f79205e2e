"""What a trained model is worth: perplexity by K and as it streams, and how fast its unroll contracts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from contextready.data.batches import Sequences
from contextready.data.shards import Data
from contextready.errors import ContextReadyError
from contextready.measure.contraction import empirical_rate
from contextready.measure.perplexity import Score, parallel_scores, sequential_score
from contextready.model.context_ready import ContextReady
from contextready.runs.checkpoint import Checkpoint

PASSES = (1, 2, 3, 5, 10)
CONVERGED = 5
"""The paper's "Corr." column is PPL(K=1) - PPL(K=5)."""
RATE_TOKENS = 1 << 13
"""Over how many tokens L̂ is taken."""


@dataclass(frozen=True)
class Evaluation:
    """Scores of one model on the sequences of a validation set."""

    tokens: int
    sequences: int
    block_size: int
    bytes_per_token: float | None
    parallel: dict[int, Score]
    sequential: Score | None
    rate: float | None
    """L̂, the largest ratio of any position."""
    norm_rate: float | None
    """The ratio of the largest changes."""
    rate_corrections: int | None
    """At which correction the rates were taken."""

    @property
    def correction(self) -> tuple[float, float] | None:
        """The paper's "Corr.": PPL(K=1) - PPL(K=5), and its standard error."""
        if 1 not in self.parallel or CONVERGED not in self.parallel:
            return None
        return self.parallel[1].perplexity_above(self.parallel[CONVERGED])

    @property
    def sequential_gap(self) -> tuple[float, float] | None:
        """How much higher the sequential perplexity is than the largest K's, and its standard error."""
        if self.sequential is None:
            return None
        return self.sequential.perplexity_above(self.parallel[max(self.parallel)])

    def as_record(self) -> dict[str, Any]:
        """Plain JSON values."""

        def score(s: Score) -> dict[str, Any]:
            return {
                "loss": s.loss,
                "loss_error": s.loss_error,
                "perplexity": s.perplexity,
                "perplexity_error": s.perplexity_error,
            } | bits(s)

        def bits(s: Score) -> dict[str, Any]:
            value, error = (None, None) if self.bytes_per_token is None else s.bits_per_byte(self.bytes_per_token)
            return {"bits_per_byte": value, "bits_per_byte_error": error}

        return {
            "tokens": self.tokens,
            "sequences": self.sequences,
            "block_size": self.block_size,
            "parallel": {str(k): score(s) for k, s in self.parallel.items()},
            "sequential": None if self.sequential is None else score(self.sequential),
            "correction": None if self.correction is None else list(self.correction),
            "sequential_gap": None if self.sequential_gap is None else list(self.sequential_gap),
            "rate": self.rate,
            "norm_rate": self.norm_rate,
            "rate_corrections": self.rate_corrections,
        }


def evaluate(
    model: ContextReady,
    data: Data,
    block_size: int,
    *,
    passes: Sequence[int] = PASSES,
    corrections: int = CONVERGED,
    sequential: bool = True,
    tokens: int | None = None,
    advance: Callable[[int, int], None] = lambda done, of: None,
) -> Evaluation:
    """Score the validation split in sequences of `block_size` (all of it, or the first `tokens`).

    Every token but the first is predicted once; what is left over after the last whole sequence is left out. Sequences
    start afresh, in parallel and in streaming alike. L̂ is taken at correction number `corrections` over the first ones.
    """
    if not passes or min(passes) < 1:
        raise ContextReadyError("Give the numbers of passes to evaluate, each at least 1, for example 1,2,5.")
    sequences = Sequences(data.tokens("val"), block_size, "validation")
    if tokens is not None and tokens < block_size:
        raise ContextReadyError(f"--tokens {tokens} is less than one sequence of {block_size}; give more.")
    count = sequences.count if tokens is None else min(sequences.count, tokens // block_size)
    of = count * block_size * (1 + (model.is_recurrent and sequential))

    def done(n: int) -> None:
        advance(n, of)

    wanted = sorted(set(passes)) if model.is_recurrent else [1]
    was_training = model.training
    model.eval()
    parallel = parallel_scores(model, sequences, wanted, count, done)
    streamed = rates = None
    if model.is_recurrent:
        if sequential:
            streamed = sequential_score(model, sequences, count, done)
        rates = _rates(model, sequences, corrections)
    model.train(was_training)
    return Evaluation(
        tokens=count * block_size,
        sequences=count,
        block_size=block_size,
        bytes_per_token=data.bytes_per_token("val"),
        parallel=parallel,
        sequential=streamed,
        rate=None if rates is None else rates[0],
        norm_rate=None if rates is None else rates[1],
        rate_corrections=None if rates is None else corrections,
    )


def evaluate_checkpoint(
    checkpoint: Checkpoint, data: Data, device: torch.device, block_size: int | None = None, **options: Any
) -> Evaluation:
    """Evaluate a trained model at its own block size, with L̂ at the K it was trained with."""
    trained = checkpoint.config["train"]
    corrections = CONVERGED if trained["passes"] in (None, 1) else trained["passes"]
    model = checkpoint.model().to(device)
    return evaluate(model, data, block_size or trained["block_size"], corrections=corrections, **options)


def _rates(model: ContextReady, sequences: Sequences, corrections: int) -> tuple[float, float]:
    rows = torch.arange(min(sequences.count, max(1, RATE_TOKENS // sequences.block_size))).numpy()
    inputs_BT, _ = sequences.read(rows)
    measured = empirical_rate(model, inputs_BT.to(next(model.parameters()).device), corrections)
    return measured.rate, measured.norm_rate
