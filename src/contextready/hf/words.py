"""Words as single tokens of a pretrained model, for tasks whose sequences are written in its own vocabulary."""

from collections.abc import Sequence
from typing import Any

from contextready.errors import ContextReadyError
from contextready.hf.load import load_config, load_tokenizer

BEFORE = ("=", "\n")
"""What each word is encoded after, because tokens differ at the beginning of a text; the second if the first and the
word are one token together, as == is."""
MOST_NAMED = 3


def word_ids(source: str, words: Sequence[str]) -> list[int]:
    """Return the token of each word in running text: all of them after a space or, if some are split, without spaces.

    It is an error if words are split either way, or if two words are the same token.
    """
    tokenizer = load_tokenizer(source)
    befores = {text: _encoded(tokenizer, text) for text in BEFORE}

    def single(word: str, space: str) -> int | None:
        for text, before in befores.items():
            found = _encoded(tokenizer, f"{text}{space}{word}")
            if len(found) == len(before) + 1 and found[:-1] == before and found[-1] != tokenizer.unk_token_id:
                return found[-1]
        return None

    for space in (" ", ""):
        ids = {word: single(word, space) for word in words}
        split = [word for word, token in ids.items() if token is None]
        if not split:
            break
    else:
        named = ", ".join(f"'{word}'" for word in split[:MOST_NAMED])
        raise ContextReadyError(
            f"{len(split)} of the {len(words)} words of this task are not single tokens of {source} (such as {named}); "
            "choose a task or sizes whose words are letters or digits."
        )
    found = [token for token in ids.values() if token is not None]
    if len(set(found)) < len(words):
        raise ContextReadyError(f"Two words of this task are the same token of {source}; choose another task.")
    return found


def begin_id(source: str) -> int:
    """Return the token that texts of a pretrained model begin with, or the one that ends them if there is none."""
    tokenizer = load_tokenizer(source)
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    raise ContextReadyError(f"The tokenizer of {source} has no token that begins or ends a text; name one in it.")


def longest_text(source: str) -> int | None:
    """Return how many tokens a pretrained model can read, if its configuration says so."""
    most = getattr(load_config(source).get_text_config(), "max_position_embeddings", None)
    return None if most is None else int(most)


def _encoded(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids
