"""Pretrained models on disk, data for them, and the command that fine-tunes them."""

from hf_helpers import KNOWN, save, tiny_lm, train_tokenizer
from train_helpers import make_data

WORDS = {
    "block_size": 16,
    "batch_size": 4,
    "steps": 4,
    "passes": 3,
    "gradient": "unroll",
    "warmup": 1,
    "lr": 1e-2,
    "weight_decay": 0.1,
    "schedule": "constant",
    "eval_every": 2,
    "eval_tokens": 256,
    "save_every": 1,
    "keep": 9,
    "log_every": 1,
    "precision": "fp32",
    "device": "cpu",
}


def make_place(place):
    """Pretrained models on disk, and data prepared with their tokenizer; returns the folder."""
    tokenizer = train_tokenizer(place / "tokenizer")
    for name, family in (("llama", "llama"), ("tied", "llama-tied"), ("gpt2", "gpt2")):
        save(place / name, tiny_lm(family, vocab_size=KNOWN).float(), tokenizer)
    make_data(place / "corpus", tokenizer=str(place / "llama"))
    return place


def arguments(place, out, **changes):
    """The words of a `crt train convert` command."""
    settings = {"pretrained": "llama", "data": place / "corpus" / "data", "out": out} | WORDS | changes
    if not str(settings["pretrained"]).startswith("/"):
        settings["pretrained"] = place / settings["pretrained"]
    return ["train", "convert", *(f"{key}={value}" for key, value in settings.items())]
