"""What runs ask of Hugging Face: models to start from and to rebuild, their cost, their tokenizers, their folders."""

from contextready.hf.finetune import cost, describe, rebuild, start
from contextready.hf.folder import open_folder
from contextready.hf.load import native_tokenizer

__all__ = ["cost", "describe", "native_tokenizer", "open_folder", "rebuild", "start"]
