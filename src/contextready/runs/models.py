"""The model of a run, whichever kind it is: this package's own, or a pretrained Hugging Face one.

What is to be known of the latter is provided by the room that registers itself as the model kind `pretrained`.
"""

from pathlib import Path
from typing import Any

from contextready import registry
from contextready.errors import ContextReadyError
from contextready.extras import require
from contextready.files import read_json
from contextready.model.config import ModelConfig
from contextready.model.context_ready import ContextReady, build_model
from contextready.model.cost import Account, account
from contextready.runs.config import PretrainedModelConfig


def start_model(config: ModelConfig | PretrainedModelConfig) -> ContextReady:
    """The model at step 0, on the CPU."""
    return build_model(config) if isinstance(config, ModelConfig) else hugging_face().start(config)


def rebuild_model(config: ModelConfig | PretrainedModelConfig, described: dict[str, Any] | None) -> ContextReady:
    """The model of a checkpoint, before its weights are filled in."""
    return build_model(config) if isinstance(config, ModelConfig) else hugging_face().rebuild(config, described)


def describe_model(model: ContextReady, config: ModelConfig | PretrainedModelConfig) -> Any:
    """What `rebuild_model` needs besides the settings, as JSON; none for this package's own models."""
    return None if isinstance(config, ModelConfig) else hugging_face().describe(model)


def cost_of(config: ModelConfig | PretrainedModelConfig, model: ContextReady | None = None) -> Account:
    """What the model costs; a pretrained one is opened if it is not given."""
    if isinstance(config, ModelConfig):
        return account(config)
    cost: Account = hugging_face().cost(model or start_model(config), config.correction)
    return cost


def check_tokenizer(config: ModelConfig | PretrainedModelConfig, data_sha256: str | None, folder: Path) -> None:
    """Refuse data that was not made with a pretrained model's own tokenizer."""
    if isinstance(config, ModelConfig):
        return
    tokenizer = hugging_face().native_tokenizer(config.pretrained)
    if tokenizer is None or tokenizer.sha256 != data_sha256:
        raise ContextReadyError(
            f"The data {folder} was not made with the tokenizer of {config.pretrained}; prepare it with "
            f"crt data prepare --tokenizer {config.pretrained}."
        )


def is_pretrained(path: str | Path) -> bool:
    """Whether this is a folder with a model in Hugging Face's format."""
    file = Path(path) / "config.json"
    config = read_json(file) if file.is_file() else None
    return isinstance(config, dict) and "model_type" in config


def hugging_face() -> Any:
    """What provides pretrained models."""
    require("transformers", "hf")
    return registry.provider("model", "pretrained")
