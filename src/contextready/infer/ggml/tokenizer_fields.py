"""The tokenizer in an exported file: tokenizer.json, and the model's conventions under GGUF's standard names."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from contextready.data.conventions import Conventions
from contextready.errors import ContextReadyError

if TYPE_CHECKING:
    from contextready.data.tokenizer import Tokenizer

JSON_KEY = "tokenizer.huggingface.json"
END_KEY = "contextready.end_token"
BEGINS_KEY = "tokenizer.ggml.add_bos_token"
TEMPLATE_KEY = "tokenizer.chat_template"
STOPS_KEY = "contextready.stop_token_ids"
NAMED = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
"""The special tokens that chat templates name, and where a file has their ids."""


def write_tokenizer(writer: Any, tokenizer: "Tokenizer") -> None:
    """Add a tokenizer to a `gguf.GGUFWriter`."""
    writer.add_string(JSON_KEY, tokenizer.inner.to_str())
    writer.add_string(END_KEY, tokenizer.end)
    conventions = tokenizer.conventions
    if conventions.begins:
        writer.add_bool(BEGINS_KEY, bool(tokenizer.begin_ids))
    if conventions.stop_ids:
        writer.add_array(STOPS_KEY, list(conventions.stop_ids))
    if conventions.chat_template is not None:
        writer.add_string(TEMPLATE_KEY, conventions.chat_template)
    for name, key in NAMED.items():
        id = tokenizer.inner.token_to_id(conventions.named.get(name, ""))
        if id is not None:
            writer.add_uint32(key, id)


def read_tokenizer(fields: dict[str, Any], where: str) -> "Tokenizer | None":
    """Build the tokenizer that the fields of a file describe, if they do; `where` names the file in messages."""
    from contextready.data.tokenizer import Tokenizer

    if JSON_KEY not in fields:
        return None
    text, end, template = fields[JSON_KEY], fields.get(END_KEY), fields.get(TEMPLATE_KEY)
    begins, stops = fields.get(BEGINS_KEY, False), fields.get(STOPS_KEY, [])
    named = {name: fields[key] for name, key in NAMED.items() if key in fields}
    if type(text) is not str or not all(type(one) in (str, type(None)) for one in (end, template)):
        _refuse(where)
    if type(begins) is not bool or type(stops) is not list or {type(id) for id in (*stops, *named.values())} - {int}:
        _refuse(where)
    conventions = Conventions(begins, tuple(stops), template)
    tokenizer = Tokenizer.parse(text, f"The tokenizer in {where}", end, conventions)
    names = {name: tokenizer.inner.id_to_token(id) for name, id in named.items() if 0 <= id < tokenizer.vocab_size}
    if len(names) < len(named) or None in names.values():
        _refuse(where)
    tokenizer.conventions = replace(conventions, named=names)
    return tokenizer


def _refuse(where: str) -> NoReturn:
    raise ContextReadyError(f"{where} is damaged: its fields do not describe a tokenizer; export it again.")
