"""Evaluate a trained model: perplexity after K passes and in streaming mode, and its contraction rate."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from contextready.data.batches import RandomSequences, Sequences
from contextready.data.shards import Data
from contextready.errors import ContextReadyError
from contextready.measure.contraction import EmpiricalRate, empirical_rate
from contextready.measure.perplexity import Score, parallel_scores, sequential_score
from contextready.model.context_ready import ContextReady
from contextready.runs.checkpoint import Checkpoint
from contextready.runs.passes import largest_passes

PASSES = (1, 2, 3, 5, 10)
CONVERGED = 5
"""The K that counts as converged: the paper's "Corr." column is PPL(K=1) - PPL(K=5)."""
RATE_TOKENS = 1 << 13
"""Number of tokens over which L̂ is measured."""
SAMPLE_SEED = 42
"""The seed of random batches, so that models with equal batch and block sizes are scored on the same ones."""


@dataclass(frozen=True)
class Evaluation:
    """Scores of one model on the sequences of its validation data."""

    tokens: int
    sequences: int
    block_size: int
    bytes_per_token: float | None
    parallel: dict[int, Score]
    sequential: Score | None
    rate: float | None
    """L̂: how large the last change of the correction is relative to the change before it, at the worst position."""
    norm_rate: float | None
    """The same ratio for the largest change over all positions."""
    rate_corrections: int | None
    """The number of the correction at which the rates were measured."""
    channel_rate: float | None = None
    """The same ratio for the largest change of any single channel."""
    sample: int | None = None
    """The number of random batches that were scored, if it was not the validation split in order."""

    @property
    def correction(self) -> tuple[float, float] | None:
        """The paper's "Corr.", PPL(K=1) - PPL(K=5), and its standard error."""
        if 1 not in self.parallel or CONVERGED not in self.parallel:
            return None
        return self.parallel[1].perplexity_above(self.parallel[CONVERGED])

    @property
    def sequential_gap(self) -> tuple[float, float] | None:
        """Streaming perplexity minus the perplexity at the largest K, and the standard error of the difference."""
        if self.sequential is None:
            return None
        return self.sequential.perplexity_above(self.parallel[max(self.parallel)])

    def as_record(self) -> dict[str, Any]:
        """The evaluation as plain JSON values."""

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
            "channel_rate": self.channel_rate,
            "sample": self.sample,
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
    sample: int | None = None,
    batch_size: int = 1,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Score the validation split, or its first `tokens` tokens, in sequences of `block_size` tokens.

    With `sample`, score that many random batches of `batch_size` sequences instead, always the same ones.
    Every token except the first is predicted once. Tokens after the last complete sequence are ignored. Every sequence
    starts without context, both in parallel and in streaming mode. L̂ is measured on the first `RATE_TOKENS` tokens, at
    correction number `corrections`.
    """
    if not passes or min(passes) < 1:
        given = ",".join(map(str, passes)) or "none"
        raise ContextReadyError(f"--passes must be numbers of at least 1, for example 1,2,5, but got {given}.")
    sequences = Sequences(data.tokens("val"), block_size, "validation")
    if sample is not None:
        if tokens is not None:
            raise ContextReadyError("--sample draws random batches, so --tokens does not apply; leave one of them out.")
        sequences = RandomSequences(sequences.tokens, block_size, sample * batch_size, SAMPLE_SEED, "validation")
    if tokens is not None and tokens < block_size:
        raise ContextReadyError(
            f"--tokens must be at least {block_size}, the length of one sequence, but got {tokens}."
        )
    count = sequences.count if tokens is None else min(sequences.count, tokens // block_size)
    total = count * block_size * (1 + (model.is_recurrent and sequential))

    def done(n: int) -> None:
        advance(n, total)

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
        rate=None if rates is None else rates.rate,
        norm_rate=None if rates is None else rates.norm_rate,
        rate_corrections=None if rates is None else corrections,
        channel_rate=None if rates is None else rates.channel_rate,
        sample=sample,
    )


def evaluate_checkpoint(
    checkpoint: Checkpoint, data: Data, device: torch.device, block_size: int | None = None, **options: Any
) -> Evaluation:
    """Evaluate a trained model, by default at the block size it was trained with; L̂ is measured at its training K."""
    trained = checkpoint.config["train"]
    passes = largest_passes(trained)
    corrections = CONVERGED if passes is None or passes == 1 else passes
    if options.get("sample") is not None and "batch_size" not in trained:
        raise ContextReadyError(
            f"{checkpoint.folder} does not record the batch size of its training, which --sample needs; leave --sample "
            "out, or evaluate the run itself."
        )
    batch_size = trained.get("batch_size", 1) * trained.get("accumulate", 1)
    model = checkpoint.model().to(device)
    return evaluate(
        model,
        data,
        block_size or trained["block_size"],
        corrections=corrections,
        batch_size=batch_size,
        **options,
    )


def _rates(model: ContextReady, sequences: Sequences, corrections: int) -> EmpiricalRate:
    rows = torch.arange(min(sequences.count, max(1, RATE_TOKENS // sequences.block_size))).numpy()
    inputs_BT, _ = sequences.read(rows)
    return empirical_rate(model, inputs_BT.to(next(model.parameters()).device), corrections)
