"""From a configuration to a model."""

from dataclasses import dataclass

from contextready.model.config import TransformerConfig
from contextready.model.context_ready import ContextReady
from contextready.model.correction import build_correction, check_correction
from contextready.model.transformer import Transformer


@dataclass(frozen=True)
class ModelConfig(TransformerConfig):
    """A transformer, or with `correction` set, a context-ready model around it."""

    correction: str | None = None
    """add, concat, blind, block_head or tied; memoryless: a control without the past; none: a plain transformer."""
    correction_init: str = "random"
    """random, or zero: the correction's output layer starts at zero, so the model starts as its transformer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_correction("add" if self.correction is None else self.correction, self.correction_init)


def build_model(config: ModelConfig) -> Transformer | ContextReady:
    """Make the model, freshly initialised, on torch's current default device and dtype."""
    backbone = Transformer(config)
    if config.correction is None:
        return backbone
    correction = build_correction(config.correction, backbone, config.correction_init, config.bias)
    return ContextReady(backbone, correction)
