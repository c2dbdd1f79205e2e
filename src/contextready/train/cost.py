"""What a training step costs in multiply-accumulates, whatever its gradient goes through."""

from contextready.model.cost import Account
from contextready.runs.config import TrainConfig
from contextready.solve.gradients import passes_through


def sequence_macs(account: Account, train: TrainConfig, passes: int | None, adjoint_steps: int = 0) -> int:
    """Forward and backward of one sequence with K = `passes` and this many adjoint products; none: one stream.

    A backward costs about twice the forward it goes back through: a product for the weights and one for the inputs.
    A vector-Jacobian product with respect to z costs only the latter.
    """
    T = train.block_size
    if passes is None:
        return 3 * (account.macs_sequence(T, 1) + T * account.macs_correction)
    forward = account.macs_sequence(T, passes)
    through = passes_through(train.gradient, train.truncated_passes, passes)
    if through == passes:
        return 3 * forward
    one_pass = account.macs_sequence(T, 2) - account.macs_sequence(T, 1)
    return forward + 2 * (through * one_pass + T * account.macs_head) + adjoint_steps * one_pass


def step_macs(account: Account, train: TrainConfig) -> float:
    """A step's multiply-accumulates, all sequences together, on average over the K it may draw."""
    costs = [sequence_macs(account, train, k, expected_adjoint_steps(train, k)) for k in _depths(train)]
    return train.sequences_per_step * sum(costs) / len(costs)


def recomputed_macs(account: Account, train: TrainConfig) -> float:
    """What `checkpoint_passes` computes a second time in a step: work that the step's own count leaves out."""
    if not train.checkpoint_passes:
        return 0.0
    T = train.block_size
    depths = [k for k in _depths(train) if k is not None]
    before = [k - passes_through(train.gradient, train.truncated_passes, k) for k in depths]
    # The head is never computed again; the first pass, where it is, has no correction.
    again = [_without_head(account, T, k) - _without_head(account, T, b) for k, b in zip(depths, before, strict=True)]
    return train.sequences_per_step * sum(again) / len(again)


def _without_head(account: Account, T: int, passes: int) -> int:
    return account.macs_sequence(T, passes) - T * account.macs_head if passes else 0


def _depths(train: TrainConfig) -> list[int] | list[None]:
    """Every K that a step may draw."""
    return [None] if train.passes is None else list(range(train.min_passes or train.passes, train.passes + 1))


def expected_adjoint_steps(train: TrainConfig, passes: int | None) -> int:
    """Products of the adjoint: as many as asked for, or about as many as the forward takes passes to settle."""
    if train.gradient != "implicit" or passes is None or passes == 1:
        return 0
    return passes if train.adjoint_steps is None else train.adjoint_steps
