"""The model of a run, which is either a native model or a pretrained Hugging Face model.

The code for Hugging Face models is in the package that registers itself as the model kind `pretrained`.
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
from contextready.model.transformer import Transformer
from contextready.runs.config import PretrainedModelConfig


def start_model(config: ModelConfig | PretrainedModelConfig, described: dict[str, Any] | None = None) -> ContextReady:
    """Build the model as it is at step 0, on the CPU; `described` is what a checkpoint says about it."""
    return build_model(config) if isinstance(config, ModelConfig) else hugging_face().start(config, described)


def rebuild_model(config: ModelConfig | PretrainedModelConfig, described: dict[str, Any] | None) -> ContextReady:
    """Build the model of a checkpoint, before its weights are loaded."""
    return build_model(config) if isinstance(config, ModelConfig) else hugging_face().rebuild(config, described)


def describe_model(model: ContextReady, config: ModelConfig | PretrainedModelConfig) -> Any:
    """Return what `rebuild_model` needs besides the settings, as JSON values; None for native models."""
    return None if isinstance(config, ModelConfig) else hugging_face().describe(model)


def cost_of(config: ModelConfig | PretrainedModelConfig, model: ContextReady | None = None) -> Account:
    """Compute the cost of a model. A pretrained model is loaded unless it is passed as `model`."""
    if isinstance(config, ModelConfig):
        return account(config)
    cost: Account = hugging_face().cost(model or start_model(config))
    return cost


def native_backbone_of(model: ContextReady, folder: Path) -> Transformer:
    """Return the native transformer of a model that was loaded from this folder; it is an error if it has none."""
    if isinstance(model.backbone, Transformer):
        return model.backbone
    raise ContextReadyError(
        f"{folder} holds a Hugging Face model that does not run natively, which is not supported here. This command "
        f"says whether it has a native form, and writes it: crt convert {folder} OUT"
    )


def check_tokenizer(config: ModelConfig | PretrainedModelConfig, data_sha256: str | None, folder: Path) -> None:
    """Raise an error if a pretrained model is to be trained on data that another tokenizer created."""
    if isinstance(config, ModelConfig):
        return
    tokenizer = hugging_face().native_tokenizer(config.pretrained)
    if tokenizer is None or tokenizer.sha256 != data_sha256:
        raise ContextReadyError(
            f"{folder} was not prepared with the tokenizer of {config.pretrained}. Prepare the data with: "
            f"crt data prepare OUT FILES --tokenizer {config.pretrained}"
        )


def is_pretrained(path: str | Path) -> bool:
    """Whether this is a folder with a model in Hugging Face format."""
    file = Path(path) / "config.json"
    config = read_json(file) if file.is_file() else None
    return isinstance(config, dict) and "model_type" in config


def hugging_face() -> Any:
    """Import the module that provides pretrained models."""
    require("transformers", "hf")
    return registry.provider("model", "pretrained")
