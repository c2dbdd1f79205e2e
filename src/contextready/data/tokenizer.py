"""The tokenizer: a byte-level BPE trained here, or any existing tokenizer.json."""

import hashlib
import json
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from contextready.data.conventions import PLAIN, Conventions
from contextready.errors import ContextReadyError
from contextready.formats.json_file import read_json
from contextready.formats.limits import check_memory
from contextready.formats.tokenizer_json import LARGEST_VOCABULARY, check_tokenizer_json, read_tokenizer_json

FILE = "tokenizer.json"
END = "<|endoftext|>"
KNOWN_ENDS = (END, "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "<|eot_id|>", "[SEP]")
LARGEST_SETTINGS = 16 << 20
"""Bytes of the largest tokenizer_config.json that is read; some list thousands of tokens."""
ENCODING_BYTES = 200
"""Bytes of memory that encoding takes per byte of text (measured: 140 to 175)."""
_ENCODING = threading.Lock()
"""Whether special tokens are read is a setting of the native library's object, which threads may share."""


class Tokenizer:
    """Converts text to ids and back; one of its tokens marks the end of a document.

    `encode_batch` is for the documents of a corpus, and `encode_prompts` for what a model is to continue.
    """

    def __init__(
        self,
        inner: Any,
        end: str | None = None,
        where: str = "This tokenizer",
        conventions: Conventions = PLAIN,
    ) -> None:
        """Wrap a `tokenizers.Tokenizer`; `end` names its end token (default: the first of the usual names it has).

        `where` names the tokenizer in error messages. `conventions` are those of the model that it belongs to.
        """
        self.inner, self._where, self.conventions = inner, where, conventions
        # The file may ask for padding or truncation; a corpus needs neither.
        inner.no_padding()
        inner.no_truncation()
        self.end = end or next((name for name in KNOWN_ENDS if inner.token_to_id(name) is not None), None)
        if self.end is None or inner.token_to_id(self.end) is None:
            missing = f"no token '{end}'" if end else f"none of the usual end tokens ({', '.join(KNOWN_ENDS)})"
            raise ContextReadyError(f"This tokenizer has {missing}; name the one that ends documents with --end-token.")
        self.end_id: int = inner.token_to_id(self.end)
        self.vocab_size: int = max(inner.get_vocab(with_added_tokens=True).values()) + 1
        if self.vocab_size > LARGEST_VOCABULARY:
            raise ContextReadyError(
                f"{where} has ids of up to {self.vocab_size - 1:,}, but at most {LARGEST_VOCABULARY - 1:,} are "
                "supported; use another tokenizer."
            )

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Train a byte-level BPE with this many tokens, including the end token; it splits words like GPT-2."""
        from tokenizers import Tokenizer as Inner
        from tokenizers import decoders, models, pre_tokenizers, trainers

        if vocab_size < 257:
            raise ContextReadyError(
                f"The vocabulary size must be at least 257 (256 bytes and the end token), but got {vocab_size}."
            )
        if vocab_size > LARGEST_VOCABULARY:
            raise ContextReadyError(
                f"The vocabulary size must be at most {LARGEST_VOCABULARY:,}, but got {vocab_size}."
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
        file = path / FILE if path.is_dir() else path
        if not file.is_file():
            raise ContextReadyError(f"There is no tokenizer at {file}; give a tokenizer.json or a folder with one.")
        return cls._build(read_tokenizer_json(file), str(file), end or _end_from_config(file.parent))

    @classmethod
    def parse(
        cls,
        text: str,
        where: str,
        end: str | None = None,
        conventions: Conventions = PLAIN,
    ) -> "Tokenizer":
        """Build a tokenizer from the text of a tokenizer.json; `where` names its origin in error messages."""
        check_tokenizer_json(text, where)
        return cls._build(text, where, end, conventions)

    @classmethod
    def _build(
        cls,
        checked: str,
        where: str,
        end: str | None,
        conventions: Conventions = PLAIN,
    ) -> "Tokenizer":
        with _native(f"{where} is not a tokenizer"):
            inner = _inner(checked)
        return cls(inner, end, where, conventions)

    @property
    def sha256(self) -> str:
        """A hash that identifies this tokenizer."""
        with _native(f"{self._where} cannot be written"):
            return hashlib.sha256(self.inner.to_str().encode()).hexdigest()

    def save(self, folder: Path) -> None:
        """Write tokenizer.json, and a tokenizer_config.json that names the end token for Hugging Face."""
        (folder / FILE).write_text(self.inner.to_str(pretty=True), encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"eos_token": self.end, "tokenizer_class": "PreTrainedTokenizerFast"})
        )

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without special tokens; uses all cores.

        A document that contains the text "<|endoftext|>" does not end there.
        """
        return self._encode(texts, special=False, begin=False)

    def encode_prompts(self, texts: Sequence[str], *, begin: bool = True) -> list[list[int]]:
        """Return the ids of each text as the model's own tokenizer has them, for the model to continue.

        The names of special tokens in a text are those tokens, and a model whose texts begin with a token gets it,
        unless `begin` is false because the text continues another one or names the token itself.
        """
        return self._encode(texts, special=True, begin=begin and self.conventions.begins)

    def _encode(self, texts: Sequence[str], *, special: bool, begin: bool) -> list[list[int]]:
        size = sum(_utf8_size(text) for text in texts)
        check_memory(ENCODING_BYTES * size, f"Tokenizing {size / 1e6:,.0f} MB of text at once", "use shorter texts.")
        with _ENCODING, _native(f"{self._where} cannot encode this text"):
            self.inner.encode_special_tokens = not special
            return [encoding.ids for encoding in self.inner.encode_batch_fast(texts, add_special_tokens=begin)]

    @cached_property
    def begin_ids(self) -> list[int]:
        """The tokens that a prompt begins with, if any."""
        return self.encode_prompts([""])[0]

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The special tokens, which are not text."""
        with _native(f"{self._where} cannot list its tokens"):
            return frozenset(id for id, token in self.inner.get_added_tokens_decoder().items() if token.special)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens that end a completion."""
        return self.conventions.stop_ids or (self.end_id,)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of these ids, including any end tokens."""
        with _native(f"{self._where} cannot decode these ids"):
            text: str = self.inner.decode(ids, skip_special_tokens=False)
        return text


@lru_cache(maxsize=4)
def _inner(checked: str) -> Any:
    """Build the native tokenizer. Opening the same one again shares it.

    tokenizers 0.23 never frees about 0.4 kB of every tokenizer that has encoded text, which adds up in a process that
    opens models again and again.
    """
    from tokenizers import Tokenizer as Inner

    return Inner.from_str(checked)


def _utf8_size(text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise ContextReadyError(
            "The text contains half of a surrogate pair, which is not a valid character; it must be UTF-8."
        ) from None


def _end_from_config(folder: Path) -> str | None:
    """Return the end token that a Hugging Face tokenizer_config.json names, if any."""
    path = folder / "tokenizer_config.json"
    if not path.exists():
        return None
    settings = read_json(path, LARGEST_SETTINGS)
    named = settings.get("eos_token") if isinstance(settings, dict) else None
    named = named.get("content") if isinstance(named, dict) else named
    if named is not None and not isinstance(named, str):
        raise ContextReadyError(f"{path} has an eos_token that is not a string; correct it, or pass --end-token.")
    return named


@contextmanager
def _native(failure: str) -> Iterator[None]:
    """Report errors of the native library in a sentence that starts with `failure`."""
    try:
        yield
    except Exception as error:  # the library raises bare Exceptions
        raise ContextReadyError(f"{failure}: {_one_line(error)}.") from None
    except BaseException as error:
        # A panic in Rust is not even an Exception, and its class cannot be imported.
        if type(error).__name__ != "PanicException":
            raise
        raise ContextReadyError(f"{failure}: {_one_line(error)}.") from None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300].rstrip(".")
