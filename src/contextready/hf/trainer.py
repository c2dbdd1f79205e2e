"""What transformers' own Trainer needs to train a context-ready model as `crt train` does."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments
from transformers.trainer_callback import TrainerControl, TrainerState

from contextready.errors import ContextReadyError
from contextready.hf.configuration import ContextReadyConfig
from contextready.runs.config import PAPER_PASSES, TrainConfig
from contextready.train.schedule import passes_of_step


class RandomPasses(TrainerCallback):  # type: ignore[misc]
    """Draws K anew for every update, from `min_passes` to `passes`, by the seed of the training and the step alone.

    So every process draws the same, all batches of an accumulated update have the same, a resumed training repeats
    them, and they are those of `crt train`. Between updates the model's configuration is what it was.
    """

    def __init__(self, passes: int = PAPER_PASSES, min_passes: int = 2) -> None:
        if not 1 <= min_passes <= passes:
            raise ContextReadyError(f"min_passes={min_passes} must be from 1 to passes={passes}.")
        self.passes, self.min_passes = passes, min_passes
        self._before: int | None = None

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Set K for all batches of the update."""
        config = _config(kwargs["model"])
        drawn = TrainConfig(data="", out="", passes=self.passes, min_passes=self.min_passes, seed=args.seed)
        self._before, config.passes = config.passes, passes_of_step(drawn, state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Put the configuration back, before a checkpoint is written."""
        _config(kwargs["model"]).passes = self._before


def _config(model: nn.Module) -> Any:
    """The configuration that forward reads, whatever the model is wrapped in."""
    for part in model.modules():
        # By its name: loaded with trust_remote_code, the class is a copy.
        if isinstance(part, PreTrainedModel) and part.config.model_type == ContextReadyConfig.model_type:
            return part.config
    raise ContextReadyError(f"RandomPasses is for context-ready models, and {type(model).__name__} is none.")
