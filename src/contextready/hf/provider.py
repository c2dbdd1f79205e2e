"""What runs need from this package: pretrained models to start from or rebuild, their costs, tokenizers and folders."""

from contextready.hf.finetune import cost, describe, rebuild, start
from contextready.hf.folder import open_folder
from contextready.hf.load import native_tokenizer

__all__ = ["cost", "describe", "native_tokenizer", "open_folder", "rebuild", "start"]
