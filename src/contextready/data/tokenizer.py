"""Byte-level BPE: trained here, or an existing tokenizer.json of any kind."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from contextready.errors import ContextReadyError

FILE = "tokenizer.json"
END = "<|endoftext|>"
KNOWN_ENDS = (END, "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "<|eot_id|>", "[SEP]")


class Tokenizer:
    """Text to ids and back, with one token that ends documents."""

    def __init__(self, inner: Any, end: str | None = None) -> None:
        """Wrap a `tokenizers.Tokenizer`; `end` names its end token, else the usual names are tried."""
        self.inner = inner
        # Padding or cutting belongs to whoever made the file; a corpus is neither padded nor cut.
        inner.no_padding()
        inner.no_truncation()
        # A document that writes about "<|endoftext|>" must not end there.
        inner.encode_special_tokens = True
        self.end = end or next((name for name in KNOWN_ENDS if inner.token_to_id(name) is not None), None)
        if self.end is None or inner.token_to_id(self.end) is None:
            missing = f"no token '{end}'" if end else f"none of the usual end tokens ({', '.join(KNOWN_ENDS)})"
            raise ContextReadyError(f"This tokenizer has {missing}; name the one that ends documents with --end-token.")
        self.end_id: int = inner.token_to_id(self.end)
        self.vocab_size: int = max(inner.get_vocab(with_added_tokens=True).values()) + 1

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Learn a byte-level BPE (GPT-2's splitting, every byte known) of this many tokens, end token included."""
        from tokenizers import Tokenizer as Inner
        from tokenizers import decoders, models, pre_tokenizers, trainers

        if not 257 <= vocab_size <= 2**31:
            raise ContextReadyError(
                f"A vocabulary of {vocab_size} is impossible: give at least 257 (bytes and the end)."
            )
        inner = Inner(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        inner.train_from_iterator(texts, trainer)
        return cls(inner, END)

    @classmethod
    def load(cls, path: Path, end: str | None = None) -> "Tokenizer":
        """Read a tokenizer.json, or the folder that holds one (a Hugging Face model, a checkpoint, prepared data)."""
        from tokenizers import Tokenizer as Inner

        file = path / FILE if path.is_dir() else path
        if not file.is_file():
            raise ContextReadyError(f"There is no tokenizer at {file}; give a tokenizer.json or a folder with one.")
        try:
            inner = Inner.from_file(str(file))
        except Exception as error:  # tokenizers raises bare Exception
            raise ContextReadyError(f"{file} is not a tokenizer: {error}.") from None
        return cls(inner, end or _end_from_config(file.parent))

    @property
    def sha256(self) -> str:
        """What tells two tokenizers apart."""
        return hashlib.sha256(self.inner.to_str().encode()).hexdigest()

    def save(self, folder: Path) -> None:
        """Write tokenizer.json, and the end token as Hugging Face names it."""
        (folder / FILE).write_text(self.inner.to_str(pretty=True), encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"eos_token": self.end, "tokenizer_class": "PreTrainedTokenizerFast"})
        )

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without any special token added; uses every core."""
        return [encoding.ids for encoding in self.inner.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; the end token shows."""
        text: str = self.inner.decode(ids, skip_special_tokens=False)
        return text


def _end_from_config(folder: Path) -> str | None:
    """The end token a Hugging Face tokenizer_config.json names."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return None
    try:
        named = json.loads(path.read_text(encoding="utf-8")).get("eos_token")
    except (ValueError, AttributeError):
        return None
    return named.get("content") if isinstance(named, dict) else named
