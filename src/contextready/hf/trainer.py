"""A callback with which transformers' Trainer trains a context-ready model as `crt train` does."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments
from transformers.trainer_callback import TrainerControl, TrainerState

from contextready.errors import ContextReadyError
from contextready.hf.configuration import ContextReadyConfig
from contextready.runs.config import PAPER_PASSES, TrainConfig
from contextready.train.schedule import passes_of_step


class RandomPasses(TrainerCallback):  # type: ignore[misc]
    """Draws a new K for every update, from `min_passes` to `passes`, from the training seed and the step alone.

    So all processes and all batches of an accumulated update use the same K, a resumed training repeats the sequence,
    and `crt train` draws the same one. Between updates the model's configuration has its original value.
    """

    def __init__(self, passes: int = PAPER_PASSES, min_passes: int = 2) -> None:
        if not 1 <= min_passes <= passes:
            raise ContextReadyError(
                f"min_passes must be at least 1 and at most passes, but got min_passes={min_passes}, passes={passes}."
            )
        self.passes, self.min_passes = passes, min_passes
        self._before: int | None = None

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Set K for all batches of this update."""
        config = _config(kwargs["model"])
        drawn = TrainConfig(data="", out=".", passes=f"{self.min_passes}..{self.passes}", seed=args.seed)
        self._before, config.passes = config.passes, passes_of_step(drawn, state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Restore the configuration before a checkpoint is written."""
        _config(kwargs["model"]).passes = self._before


def _config(model: nn.Module) -> Any:
    """The configuration that forward reads, found through any wrappers around the model."""
    for part in model.modules():
        # Compared by name, because trust_remote_code loads a copy of the class.
        if isinstance(part, PreTrainedModel) and part.config.model_type == ContextReadyConfig.model_type:
            return part.config
    raise ContextReadyError(
        f"RandomPasses needs a context-ready model, but got {type(model).__name__}; convert it with crt convert first."
    )
