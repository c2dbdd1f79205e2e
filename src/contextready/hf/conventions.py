"""A pretrained model's tokenizer with its conventions: begin and end tokens, special tokens, the chat template."""

from typing import Any

from contextready.data.conventions import Conventions
from contextready.data.tokenizer import Tokenizer
from contextready.errors import ContextReadyError
from contextready.runs.checkpoint import Checkpoint


def checkpoint_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Load the tokenizer of a checkpoint that was trained from a pretrained model."""
    from contextready.hf.native import tokenizer_of_pretrained  # needs transformers

    described = checkpoint.described or {}
    ends = described.get("generation_config", {}).get("eos_token_id")
    return conventional_tokenizer(tokenizer_of_pretrained(checkpoint), ends, str(checkpoint.folder))


def conventional_tokenizer(loaded: Any, ends: Any, where: str) -> Tokenizer:
    """Turn a tokenizer of transformers into one that encodes prompts as it does.

    `ends` is eos_token_id of the model's generation settings: an id, a list of ids, or nothing.
    """
    inner = getattr(loaded, "backend_tokenizer", None)
    if inner is None:
        raise ContextReadyError(
            f"The tokenizer of {where} is not a fast one; save one there with tokenizer.save_pretrained(FOLDER)."
        )
    stops = [] if ends is None else ends if isinstance(ends, list) else [ends]
    if not all(type(stop) is int for stop in stops):
        raise ContextReadyError(f"The generation settings of {where} name end tokens that are not whole numbers.")
    template = loaded.chat_template
    if isinstance(template, dict):  # several, by their names
        template = template.get("default")
    return Tokenizer(
        inner,
        loaded.eos_token,
        where,
        Conventions(
            begins=True, stop_ids=tuple(stops), chat_template=template or None, named=dict(loaded.special_tokens_map)
        ),
    )
