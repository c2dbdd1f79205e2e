"""Conversations as tokens: written with a model's own chat template, with a mask of the assistant's answers."""

import json
from collections.abc import Callable
from typing import Any

from contextready.errors import ContextReadyError
from contextready.hf.load import first_line, load_tokenizer


def chat_encoder(source: str) -> Callable[[str], tuple[list[int], list[bool]]]:
    """Return a function from a conversation (JSON text of messages) to its ids and to which of them are answers.

    An answer is what the template adds for a message of the assistant after the prompt to generate one, including the
    tokens that end it. So the model learns to stop, but not to write questions.
    """
    tokenizer = load_tokenizer(source)
    if not tokenizer.chat_template:
        raise ContextReadyError(
            f"{source} has no chat template; use the folder of a model that was made for conversations."
        )
    if not tokenizer.is_fast:
        raise ContextReadyError(f"The tokenizer of {source} has no tokenizer.json, which conversations need.")

    def encode(document: str) -> tuple[list[int], list[bool]]:
        messages = json.loads(document)
        text, spans = "", []
        for number, message in enumerate(messages, 1):
            whole = _written(tokenizer, source, messages[:number], prompt=False)
            prompt = text
            if message["role"] == "assistant":
                prompt = _written(tokenizer, source, messages[: number - 1], prompt=True)
                spans.append((len(prompt), len(whole)))
            if not whole.startswith(text) or not whole.startswith(prompt):
                raise ContextReadyError(
                    f"The chat template of {source} changes earlier messages when another one follows, so the answers "
                    "cannot be told from the rest; prepare the conversations as text instead."
                )
            text = whole
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        counted = [any(a <= start and start < end <= b for a, b in spans) for start, end in encoded["offset_mapping"]]
        return encoded["input_ids"], counted

    return encode


def _written(tokenizer: Any, source: str, messages: list[dict[str, str]], prompt: bool) -> str:
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    except Exception as error:  # templates raise errors of their own
        raise ContextReadyError(
            f"The chat template of {source} does not accept a conversation: {first_line(error)}"
        ) from None
    return text
