"""Whether a model folder may run its own Python code: only inside `trusting(True)`, that is, if the user says so.

transformers would otherwise ask on standard input, where `crt generate` expects a prompt that could answer "y".
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Callable

OPTION = "--trust-remote-code"

_TRUSTED = ContextVar("trust_remote_code", default=False)


def add_trust_option(parser: "ArgumentParser", run: "Callable[[Namespace], None]") -> None:
    """Add the option to a command that loads model folders; it runs `run`."""
    parser.add_argument(
        OPTION,
        action="store_true",
        help="run the Python code in a model folder if it cannot be loaded without; only for authors you trust",
    )

    def trusting_run(options: "Namespace") -> None:
        with trusting(options.trust_remote_code):
            run(options)

    parser.set_defaults(run=trusting_run)


@contextmanager
def trusting(trusted: bool) -> Iterator[None]:
    """Allow or forbid the code of model folders that are loaded inside the block."""
    before = _TRUSTED.set(trusted)
    try:
        yield
    finally:
        _TRUSTED.reset(before)


def is_trusting() -> bool:
    """Whether the user allowed the code of model folders."""
    return _TRUSTED.get()


@contextmanager
def never_asking(offline: bool = False) -> Iterator[None]:
    """Keep transformers from asking on standard input, even where it does not pass on that code is forbidden.

    A folder can name any class of transformers as its tokenizer, and such a class is loaded without our arguments. With
    `offline`, the Hub is not contacted either: files on disk can name other models, which transformers would look up.
    """
    from huggingface_hub import constants
    from transformers import dynamic_module_utils as loader

    seconds, was_offline = loader.TIME_OUT_REMOTE_CODE, constants.HF_HUB_OFFLINE
    loader.TIME_OUT_REMOTE_CODE, constants.HF_HUB_OFFLINE = 0, was_offline or offline
    try:
        yield
    finally:
        loader.TIME_OUT_REMOTE_CODE, constants.HF_HUB_OFFLINE = seconds, was_offline
