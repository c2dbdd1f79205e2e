"""Conversations in .jsonl files: lists of messages, each with a role and a text."""

import json
from typing import Any

from contextready.errors import ContextReadyError

ROLES = ("system", "user", "assistant")


def checked_messages(messages: list[Any], where: str) -> str:
    """Check that this is a conversation, and return it as JSON text."""
    for message in messages:
        known = isinstance(message, dict) and message.get("role") in ROLES and isinstance(message.get("content"), str)
        if not known:
            raise ContextReadyError(
                f"{where} has a message without a role ({', '.join(ROLES)}) or without text as its content."
            )
    if not any(message["role"] == "assistant" for message in messages):
        raise ContextReadyError(f"{where} has no message of the assistant, so there is nothing to learn from it.")
    plain = [{"role": message["role"], "content": message["content"]} for message in messages]
    return json.dumps(plain, ensure_ascii=False)
