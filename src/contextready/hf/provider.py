"""What runs need from this package: pretrained models to start from or rebuild, their costs, tokens and folders."""

from contextready.hf.conventions import checkpoint_tokenizer
from contextready.hf.finetune import cost, describe, rebuild, start
from contextready.hf.folder import open_folder
from contextready.hf.load import native_tokenizer
from contextready.hf.words import begin_id, longest_text, word_ids

__all__ = [
    "begin_id",
    "checkpoint_tokenizer",
    "cost",
    "describe",
    "longest_text",
    "native_tokenizer",
    "open_folder",
    "rebuild",
    "start",
    "word_ids",
]
