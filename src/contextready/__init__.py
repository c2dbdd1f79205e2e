"""The Context-Ready Transformer: train in parallel, stream exactly, check every claim.

Needs torch and numpy; anything else is imported where it is used.
"""

from contextready.errors import ContextReadyError
from contextready.model.accounting import Account, account
from contextready.model.build import ModelConfig, build_model
from contextready.model.config import TransformerConfig
from contextready.model.context_ready import ContextReady
from contextready.model.correction import CORRECTIONS, build_correction
from contextready.model.state import State
from contextready.model.transformer import Transformer
from contextready.solve.unroll import UnrollInfo, unroll

__version__ = "0.1.0"

__all__ = [
    "CORRECTIONS",
    "Account",
    "ContextReady",
    "ContextReadyError",
    "ModelConfig",
    "State",
    "Transformer",
    "TransformerConfig",
    "UnrollInfo",
    "account",
    "build_correction",
    "build_model",
    "unroll",
]
