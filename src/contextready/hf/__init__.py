"""Hugging Face integration: context-ready models for transformers, and conversion of pretrained causal language models.

May import train, runs and the packages below them, but not bench or pointer. Importing a class from here registers all
classes with Hugging Face's Auto classes.
"""

from typing import Any

from contextready.extras import require

NAMES = (
    "BaseTransformerConfig",
    "BaseTransformerForCausalLM",
    "ContextReadyConfig",
    "ContextReadyForCausalLM",
)


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    require("transformers", "hf")
    from contextready.hf import modeling

    return getattr(modeling, name)
