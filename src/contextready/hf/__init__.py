"""Hugging Face: context-ready models there, and any pretrained causal language model made context-ready.

May import train, runs and what is under them; not bench or pointer. Importing a class from here registers all of them
with Hugging Face's Auto classes.
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
