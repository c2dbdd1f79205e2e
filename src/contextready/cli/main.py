"""The command `crt`: thin verbs over importable functions."""

import argparse
import os
import sys
from collections.abc import Sequence

from contextready import __version__
from contextready.cli import (
    bench,
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
    train,
    unshard,
)
from contextready.errors import ContextReadyError

VERBS = (
    demo,
    data,
    train,
    plan,
    unshard,
    eval,
    convert,
    generate,
    export,
    bench,
    plot,
    pointer,
    reproduce,
    info,
    exact,
)
"""In the order of `crt --help`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; bad input prints one sentence and returns 2."""
    parser = build_parser()
    options, rest = parser.parse_known_args(arguments)
    # argparse closes a list of words at the first option: crt train mini-d1 --dry-run steps=5
    more = getattr(options, "more_words", None)
    if more and rest and not any(word.startswith("-") or ("=" not in word and more == "settings") for word in rest):
        setattr(options, more, [*getattr(options, more), *rest])
        rest = []
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        code: int | None = options.run(options)
        sys.stdout.flush()
    except ContextReadyError as error:
        print(f"crt {options.verb}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader left (`crt info --json | head`): nothing is wrong, and the interpreter must not try to flush again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"crt {options.verb}: a file could not be read or written: {error}", file=sys.stderr)
        return 2
    return code or 0


def build_parser() -> argparse.ArgumentParser:
    """Describe every verb and option.

    A verb that takes any number of words says in its defaults under which name: `more_words`.
    """
    parser = argparse.ArgumentParser(
        prog="crt", description="Context-ready language models: train, measure, see and check them."
    )
    parser.add_argument("--version", action="version", version=f"contextready {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for module in VERBS:
        module.add(verbs)
    return parser


if __name__ == "__main__":
    sys.exit(main())
