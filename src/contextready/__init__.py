"""The Context-Ready Transformer: train in parallel, stream exactly, check every claim.

    model = contextready.load("runs/mini-d1")
    print(model.generate("The people of"))

Needs torch and numpy; any other package is imported where it is used. Names are imported when they are first used, so
an exported file runs without importing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from contextready import registry
from contextready.errors import ContextReadyError

if TYPE_CHECKING:
    from contextready.infer.language_model import LanguageModel, TextScore, load
    from contextready.model.config import ModelConfig, TransformerConfig
    from contextready.model.context_ready import ContextReady, build_model
    from contextready.model.correction import CORRECTIONS
    from contextready.model.correction_module import build_correction
    from contextready.model.cost import Account, account
    from contextready.model.state import State
    from contextready.model.transformer import Transformer
    from contextready.solve.unroll import UnrollInfo, unroll

__version__ = "0.2.0"

__all__ = [
    "CORRECTIONS",
    "Account",
    "ContextReady",
    "ContextReadyError",
    "LanguageModel",
    "ModelConfig",
    "State",
    "TextScore",
    "Transformer",
    "TransformerConfig",
    "UnrollInfo",
    "account",
    "build_correction",
    "build_model",
    "load",
    "unroll",
]

_HOMES = {
    "CORRECTIONS": "model.correction",
    "Account": "model.cost",
    "ContextReady": "model.context_ready",
    "LanguageModel": "infer.language_model",
    "ModelConfig": "model.config",
    "State": "model.state",
    "TextScore": "infer.language_model",
    "Transformer": "model.transformer",
    "TransformerConfig": "model.config",
    "UnrollInfo": "solve.unroll",
    "account": "model.cost",
    "build_correction": "model.correction_module",
    "build_model": "model.context_ready",
    "load": "infer.language_model",
    "unroll": "solve.unroll",
}


# Kinds of models and tasks that other packages add to runs; each is imported when a run first needs it.
registry.register("model", "pretrained", "contextready.hf.provider")
registry.register("task", "pointer", "contextready.pointer.provider")
registry.register("task", "word", "contextready.state.word")
registry.register("task", "assign", "contextready.state.assign")
registry.register("task", "stack", "contextready.state.stack")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
