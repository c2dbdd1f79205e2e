# PYTHON_ARGCOMPLETE_OK
"""The command `crt`: thin verbs over importable functions."""

import argparse
import os
import sys
from collections.abc import Sequence

from contextready import __version__
from contextready.cli import (
    bench,
    chat,
    convert,
    data,
    demo,
    eval,
    exact,
    export,
    generate,
    info,
    plan,
    plot,
    pointer,
    reproduce,
    task,
    train,
    unshard,
)
from contextready.cli.options import HelpFormatter, VerbParser, check_words, one_line
from contextready.errors import ContextReadyError

VERBS = (
    demo,
    data,
    train,
    eval,
    plot,
    generate,
    chat,
    export,
    convert,
    bench,
    plan,
    unshard,
    pointer,
    task,
    reproduce,
    info,
    exact,
)
"""In the order of `crt --help`."""

DESCRIPTION = """\
Train, convert, stream, measure and export context-ready language models.

examples:
  crt demo                                                # a first look, in a few minutes
  crt data prepare data/mini default --vocab-size 4096    # prepare text
  crt train mini-d1                                       # train one context-ready layer on it
  crt generate runs/mini-d1 "The people of"               # continue a prompt
  crt convert HuggingFaceTB/SmolLM2-135M smollm2-crt      # add a correction to a pretrained model

Run crt VERB --help for the examples and options of a verb."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb. Bad input prints one sentence and returns 2."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        options = _parse(words)
    except KeyboardInterrupt:
        return 130
    if options is None:
        return 0
    try:
        check_words(words)
        code: int | None = options.run(options)
        sys.stdout.flush()
    except ContextReadyError as error:
        return _refuse(options.verb, str(error))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader has left, as in `crt info --json | head`. The interpreter must not try to flush again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _refuse(options.verb, f"a file could not be read or written: {error}")
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        return _refuse(options.verb, "there is not enough memory; choose smaller sizes, or close other programs.")
    return code or 0


def _parse(words: list[str]) -> argparse.Namespace | None:
    """Parse the command line; None means that only the help was asked for."""
    parser = build_parser()
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(parser)
    options, rest = parser.parse_known_args(words)
    # argparse closes a list of words at the first option, as in: crt train mini-d1 --dry-run steps=5
    more = getattr(options, "more_words", None)
    if more and rest and not any(word.startswith("-") or ("=" not in word and more == "settings") for word in rest):
        setattr(options, more, [*getattr(options, more), *rest])
        rest = []
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if options.verb is None:
        parser.print_help()
        return None
    return options


def _refuse(verb: str, sentence: str) -> int:
    print(f"crt {verb}: {one_line(sentence)}", file=sys.stderr)
    return 2


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether Python, numpy or torch could not allocate memory; torch reports that as an error of its own."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "DefaultCPUAllocator" in str(error)
    )


def build_parser() -> argparse.ArgumentParser:
    """Describe every verb and option, without importing torch.

    A verb that takes any number of words sets `more_words` in its defaults to the name under which they are stored.
    """
    parser = VerbParser(prog="crt", description=DESCRIPTION, formatter_class=HelpFormatter)
    parser.add_argument("--version", action="version", version=f"contextready {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", title="verbs")
    for module in VERBS:
        module.add(verbs)
    return parser
