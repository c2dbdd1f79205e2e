"""The cost of a training step in multiply-accumulates, for every gradient mode."""

from contextready.model.config import ModelConfig
from contextready.model.cost import Account
from contextready.model.cost import account as account_of
from contextready.runs.config import RunConfig, TrainConfig
from contextready.solve.gradients import passes_through


def sequence_macs(
    account: Account, train: TrainConfig, passes: int | None, adjoint_steps: int = 0, tokens: int | None = None
) -> int:
    """Return the cost of forward and backward for one sequence with K = `passes`, or token by token if it is None.

    The sequence has `tokens` tokens, or else as many as the settings say.
    A backward costs about twice the forward that it goes through: one product for the weights and one for the inputs.
    Each of the `adjoint_steps` vector-Jacobian products with respect to z costs only the latter.
    """
    T = tokens or train.block_size
    if passes is None:
        return 3 * (account.macs_sequence(T, 1) + T * account.macs_correction)
    forward = account.macs_sequence(T, passes)
    through = passes_through(train.gradient, train.truncated_passes, passes)
    # The convergence term computes the correction that one more pass would get, and goes back through it.
    term = 3 * T * account.macs_correction if train.convergence_weight else 0
    if through == passes:
        return 3 * forward + term
    one_pass = account.macs_sequence(T, 2) - account.macs_sequence(T, 1)
    return forward + 2 * (through * one_pass + T * account.macs_head) + adjoint_steps * one_pass + term


def step_macs(account: Account, train: TrainConfig) -> float:
    """Return the multiply-accumulates of a step, for all its sequences, averaged over the K of the whole training."""
    if train.pass_schedule is None:
        return train.sequences_per_step * float(sequence_macs(account, train, None))
    costs = {k: sequence_macs(account, train, k, expected_adjoint_steps(train, k)) for k in _chances(train)}
    return train.sequences_per_step * sum(chance * costs[k] for k, chance in _chances(train).items())


def run_macs(config: RunConfig, done: int = 0) -> float:
    """Return the multiply-accumulates of the steps after `done`; 0 for pretrained models, whose shape is not known."""
    if not isinstance(config.model, ModelConfig):
        return 0.0
    return (config.train.steps - done) * step_macs(account_of(config.model), config.train)


def recomputed_macs(account: Account, train: TrainConfig) -> float:
    """Return the multiply-accumulates that `checkpoint_passes` adds to a step, which `step_macs` does not include."""
    if not train.checkpoint_passes:
        return 0.0
    T = train.block_size

    def again(k: int) -> int:
        # The head is never recomputed. The first pass may be, and it has no correction.
        before = k - passes_through(train.gradient, train.truncated_passes, k)
        return _without_head(account, T, k) - _without_head(account, T, before)

    return train.sequences_per_step * sum(chance * again(k) for k, chance in _chances(train).items())


def _without_head(account: Account, T: int, passes: int) -> int:
    return account.macs_sequence(T, passes) - T * account.macs_head if passes else 0


def _chances(train: TrainConfig) -> dict[int, float]:
    """Return how often each K is drawn over the whole training."""
    chances: dict[int, float] = {}
    for stage in () if train.pass_schedule is None else train.pass_schedule.stages:
        for k in stage.depths:
            chances[k] = chances.get(k, 0.0) + stage.fraction / len(stage.depths)
    return chances


def expected_adjoint_steps(train: TrainConfig, passes: int | None) -> int:
    """Return the expected number of adjoint products: `adjoint_steps` if it is set, otherwise one per pass."""
    if train.gradient != "implicit" or passes is None or passes == 1:
        return 0
    return passes if train.adjoint_steps is None else train.adjoint_steps
