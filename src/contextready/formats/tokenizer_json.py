"""tokenizer.json: checks that the native library leaves out, because it panics or aborts on such files instead."""

import base64
import binascii
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from contextready.errors import ContextReadyError
from contextready.formats.json_file import MOST_VALUES
from contextready.formats.regular import read_text

LARGEST = 128 << 20
"""Bytes of the largest file that is read; the largest real ones have some thirty MB."""
LARGEST_VOCABULARY = 1 << 24
"""Ids are below this; the largest real vocabularies have some hundred thousand."""
SPARSE = 1 << 16
"""The highest id may exceed 16 times the number of tokens by this much. Memory is needed for the ids in between."""
MOST_STEPS = 4096
"""Normalizers, pre-tokenizers, post-processors and decoders together, and their parts."""
MOST_GROWTH = 64
"""How many times longer all replacements together may make a text."""
LONGEST_PATTERN = 1 << 16
"""Characters of a regular expression."""


def read_tokenizer_json(path: Path) -> str:
    """Read a tokenizer.json and return its text, which is safe to pass on."""
    text = read_text(path, LARGEST)
    check_tokenizer_json(text, str(path))
    return text


def check_tokenizer_json(text: str, where: str) -> None:
    """Refuse ids, structures and steps on which the native library panics, aborts or fills the memory."""
    if len(text) > LARGEST:
        _refuse(where, f"it has {len(text):,} characters")
    value = _parse(text, where)
    if not isinstance(value, dict):
        _refuse(where, "it is not a JSON object")
    model = value.get("model")
    if not isinstance(model, dict):
        _refuse(where, "it has no model")
    _check_vocabulary(model.get("vocab"), where)
    _check_prefix(model, where)
    added = value.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(token, dict) for token in added):
        _refuse(where, "its added_tokens are not a list of objects")
    _check_ids([(token.get("content"), token.get("id")) for token in added], where)
    _check_steps([value.get(name) for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder")], where)


def _parse(text: str, where: str) -> Any:
    """Parse the JSON. The native library parses it again and is as strict as `parse_json`, which would take longer."""
    if sum(text.count(mark) for mark in ",[{") > MOST_VALUES:
        _refuse(where, f"it has more than {MOST_VALUES:,} JSON values")
    try:
        return json.loads(text)
    except RecursionError:
        raise ContextReadyError(f"{where} is nested too deeply to be read as JSON.") from None
    except ValueError as error:
        raise ContextReadyError(f"{where} cannot be read as JSON: {error}.") from None


def _check_vocabulary(vocabulary: Any, where: str) -> None:
    if isinstance(vocabulary, list):
        # A list of pairs (token, score); the positions are the ids.
        if len(vocabulary) > LARGEST_VOCABULARY:
            _refuse(where, f"it has {len(vocabulary):,} tokens")
        return
    if not isinstance(vocabulary, dict):
        _refuse(where, "its model has no vocabulary")
    ids = vocabulary.values()
    # A loop takes longer, so it only looks for an id that is known to be wrong.
    right = set(map(type, ids)) <= {int} and min(ids, default=0) >= 0 and max(ids, default=0) < LARGEST_VOCABULARY
    if not right:
        _check_ids(list(vocabulary.items()), where)
    highest = max(ids, default=0)
    if highest >= 16 * len(vocabulary) + SPARSE:
        _refuse(where, f"it has {len(vocabulary):,} tokens, but ids of up to {highest:,}")


def _check_prefix(model: dict[str, Any], where: str) -> None:
    """The native library cuts a prefix off the second part of every merge, which must be long enough."""
    prefix, merges = model.get("continuing_subword_prefix"), model.get("merges")
    if not prefix or not isinstance(prefix, str) or not isinstance(merges, list):
        return
    for merge in merges:
        second = (
            merge.split(" ")[-1] if isinstance(merge, str) else merge[-1] if isinstance(merge, list) and merge else ""
        )
        if not isinstance(second, str) or len(second) < len(prefix):
            _refuse(where, f"a merge lacks the prefix {ascii(prefix)[:64]}")


def _check_ids(pairs: list[tuple[Any, Any]], where: str) -> None:
    """Refuse the first id that is not a whole number of a sensible size."""
    for token, id in pairs:
        if type(id) is not int or not 0 <= id < LARGEST_VOCABULARY:
            shown = f"{id:,}" if type(id) is int and abs(id) < 10**20 else "not a small whole number"
            _refuse(
                where, f"the id of the token {ascii(token)[:64]} is {shown}, but ids are below {LARGEST_VOCABULARY:,}"
            )


def _check_steps(steps: Any, where: str) -> None:
    growth = 1.0
    for i, step in enumerate(_objects(steps)):
        if i >= MOST_STEPS:
            _refuse(where, f"it has more than {MOST_STEPS:,} steps")
        kind, pattern = step.get("type"), step.get("pattern")
        pattern = pattern if isinstance(pattern, dict) else {}
        if len(str(pattern.get("Regex", ""))) > LONGEST_PATTERN:
            _refuse(where, f"one of its regular expressions has more than {LONGEST_PATTERN:,} characters")
        if kind == "Replace":
            growth *= max(1, len(str(step.get("content", ""))) / max(1, len(str(pattern.get("String", "")))))
        if kind == "Prepend":
            growth *= 1 + len(str(step.get("prepend", ""))) // 64
        if growth > MOST_GROWTH:
            _refuse(where, f"its replacements make a text more than {MOST_GROWTH} times longer")
        if (kind == "Replace" and pattern.get("String") == "") or (kind == "Prepend" and step.get("prepend") == ""):
            _refuse(where, f"a step of type {kind} is empty")
        if kind == "FixedLength" and step.get("length") == 0:
            _refuse(where, "it cuts text into pieces of length 0")
        if kind == "Precompiled":
            _check_character_map(step.get("precompiled_charsmap"), where)


def _objects(root: Any) -> Iterator[dict[str, Any]]:
    """All objects in a JSON value, in no particular order."""
    left = [root]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            yield value
            left += value.values()
        elif isinstance(value, list):
            left += value


def _check_character_map(encoded: Any, where: str) -> None:
    """A map starts with the size of its first part, for which the native library allocates memory at once."""
    try:
        map = base64.b64decode(encoded, validate=True) if isinstance(encoded, str) else b""
    except (binascii.Error, ValueError):
        map = b""
    if len(map) < 4 or int.from_bytes(map[:4], "little") > len(map) - 4:
        _refuse(where, "its character map is damaged")


def _refuse(where: str, why: str) -> NoReturn:
    raise ContextReadyError(f"{where} is not a tokenizer: {why}.")
