"""The tokenizer: a byte-level BPE trained here, or any existing tokenizer.json."""

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
    """Converts text to ids and back; one of its tokens marks the end of a document."""

    def __init__(self, inner: Any, end: str | None = None) -> None:
        """Wrap a `tokenizers.Tokenizer`; `end` names its end token (default: the first of the usual names it has)."""
        self.inner = inner
        # The file may ask for padding or truncation; a corpus needs neither.
        inner.no_padding()
        inner.no_truncation()
        # A document that contains the text "<|endoftext|>" must not end there.
        inner.encode_special_tokens = True
        self.end = end or next((name for name in KNOWN_ENDS if inner.token_to_id(name) is not None), None)
        if self.end is None or inner.token_to_id(self.end) is None:
            missing = f"no token '{end}'" if end else f"none of the usual end tokens ({', '.join(KNOWN_ENDS)})"
            raise ContextReadyError(f"This tokenizer has {missing}; name the one that ends documents with --end-token.")
        self.end_id: int = inner.token_to_id(self.end)
        self.vocab_size: int = max(inner.get_vocab(with_added_tokens=True).values()) + 1

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Train a byte-level BPE with this many tokens, including the end token; it splits words like GPT-2."""
        from tokenizers import Tokenizer as Inner
        from tokenizers import decoders, models, pre_tokenizers, trainers

        if not 257 <= vocab_size <= 2**31:
            raise ContextReadyError(
                f"The vocabulary size must be at least 257 (256 bytes and the end token), but got {vocab_size}."
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
        """Load a tokenizer.json, or the one in a folder (a Hugging Face model, a checkpoint, prepared data)."""
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
        """A hash that identifies this tokenizer."""
        return hashlib.sha256(self.inner.to_str().encode()).hexdigest()

    def save(self, folder: Path) -> None:
        """Write tokenizer.json, and a tokenizer_config.json that names the end token for Hugging Face."""
        (folder / FILE).write_text(self.inner.to_str(pretty=True), encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"eos_token": self.end, "tokenizer_class": "PreTrainedTokenizerFast"})
        )

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without special tokens; uses all cores."""
        return [encoding.ids for encoding in self.inner.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of these ids, including any end tokens."""
        text: str = self.inner.decode(ids, skip_special_tokens=False)
        return text


def _end_from_config(folder: Path) -> str | None:
    """Return the end token that a Hugging Face tokenizer_config.json names, if any."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return None
    try:
        named = json.loads(path.read_text(encoding="utf-8")).get("eos_token")
    except (ValueError, AttributeError):
        return None
    return named.get("content") if isinstance(named, dict) else named
