"""The model of a run, whichever kind it is: this package's own, or a pretrained one of Hugging Face."""

from pathlib import Path
from typing import Any

from torch import nn

from contextready.errors import ContextReadyError
from contextready.extras import require
from contextready.model.accounting import Account, account
from contextready.model.build import ModelConfig, build_model
from contextready.model.context_ready import ContextReady
from contextready.model.transformer import Transformer
from contextready.train.config import PretrainedModelConfig

EXTRA = "hf"


def start_model(config: ModelConfig | PretrainedModelConfig) -> Transformer | ContextReady:
    """The model at step 0, on the CPU."""
    if isinstance(config, ModelConfig):
        return build_model(config)
    require("transformers", EXTRA)
    from contextready.hf.finetune import start

    return start(config)


def rebuild_model(
    config: ModelConfig | PretrainedModelConfig, described: dict[str, Any] | None
) -> Transformer | ContextReady:
    """The model of a checkpoint, before its weights are filled in."""
    if isinstance(config, ModelConfig):
        return build_model(config)
    require("transformers", EXTRA)
    from contextready.hf.finetune import rebuild

    assert described is not None
    return rebuild(config, described)


def describe_model(model: nn.Module, config: ModelConfig | PretrainedModelConfig) -> Any:
    """What `rebuild_model` needs besides the settings, as JSON; none for this package's own models."""
    if isinstance(config, ModelConfig):
        return None
    from contextready.hf.finetune import describe

    assert isinstance(model, ContextReady)
    return describe(model)


def cost_of(config: ModelConfig | PretrainedModelConfig, model: Transformer | ContextReady | None = None) -> Account:
    """What the model costs; a pretrained one is opened if it is not given."""
    if isinstance(config, ModelConfig):
        return account(config)
    from contextready.hf.finetune import cost

    model = model or start_model(config)
    assert isinstance(model, ContextReady)
    return cost(model, config.correction)


def check_tokenizer(config: ModelConfig | PretrainedModelConfig, data_sha256: str | None, folder: Path) -> None:
    """Refuse data that was not made with a pretrained model's own tokenizer."""
    if isinstance(config, ModelConfig):
        return
    from contextready.hf.load import native_tokenizer

    tokenizer = native_tokenizer(config.pretrained)
    if tokenizer is None or tokenizer.sha256 != data_sha256:
        raise ContextReadyError(
            f"The data {folder} was not made with the tokenizer of {config.pretrained}; prepare it with "
            f"crt data prepare --tokenizer {config.pretrained}."
        )
