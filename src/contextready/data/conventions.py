"""The conventions of a model's own tokenizer: how its texts begin and end, and how its conversations are written."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Conventions:
    """What a model expects around plain text."""

    begins: bool = False
    """Whether a prompt gets the tokens that the tokenizer adds to a text, such as a begin token."""
    stop_ids: tuple[int, ...] = ()
    """The tokens that end a completion; none for the tokenizer's end token."""
    chat_template: str | None = None
    """The Jinja template that writes a conversation as text."""
    named: Mapping[str, str] = field(default_factory=dict)
    """Special tokens under the names that templates use, such as bos_token."""


PLAIN = Conventions()
"""Those of a model that was trained here on prepared data."""
