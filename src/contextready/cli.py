"""The command `crt`: thin verbs over importable functions."""

import argparse
import os
import sys
from collections.abc import Sequence

from contextready import __version__
from contextready.errors import ContextReadyError
from contextready.model.build import ModelConfig
from contextready.settings import describe_settings


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; bad input prints one sentence and returns 2."""
    options = build_parser().parse_args(arguments)
    try:
        options.run(options)
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
        print(f"crt {options.verb}: the output could not be written: {error}", file=sys.stderr)
        return 2
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Describe every verb and option."""
    parser = argparse.ArgumentParser(
        prog="crt", description="Context-ready language models: see, measure and check them."
    )
    parser.add_argument("--version", action="version", version=f"contextready {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    info = verbs.add_parser(
        "info",
        help="what a model costs: FLOPs, parameters, cache",
        description="Print FLOPs per token, parameters and cache bytes of models, without allocating weights.\n"
        "With no argument: every model of the paper, beside the paper's figures.",
        epilog=f"settings:\n{describe_settings(ModelConfig)}\n\n"
        "examples:\n"
        "  crt info owt-d5-c1120\n"
        "  crt info owt-d5-c1120 owt-n12-c768 --dtype bfloat16\n"
        "  crt info vocab_size=4096 width=128 layers=1 heads=4 correction=add",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    info.add_argument("what", nargs="*", help="names of the paper's models, or settings key=value, or both")
    info.add_argument("--context", type=int, help="tokens in the context (default: the model's block size, or 1024)")
    info.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16", "float64"], default="float32", help="type of the cache"
    )
    info.add_argument("--json", action="store_true", help="print one JSON line instead of a table")
    info.set_defaults(run=_info)

    demo = verbs.add_parser(
        "demo",
        help="see the method work on a small random model",
        description="Stream tokens one by one through a small randomly initialised model, solve for all of them at "
        "once in parallel passes, and show that both are one function.",
    )
    demo.add_argument("--tokens", type=int, default=48, help="length of the sequence (default: 48)")
    demo.add_argument("--layers", type=int, default=1, help="D, the number of blocks (default: 1)")
    demo.add_argument("--width", type=int, default=64, help="C, a multiple of 8 (default: 64)")
    demo.add_argument("--seed", type=int, default=0, help="seed of the weights and tokens (default: 0)")
    demo.set_defaults(run=_demo)
    return parser


def _info(options: argparse.Namespace) -> None:
    from contextready.info import print_info

    print_info(options.what, options.context, options.dtype, options.json)


def _demo(options: argparse.Namespace) -> None:
    from contextready.demo import print_demo

    print_demo(options.tokens, options.layers, options.width, options.seed)


if __name__ == "__main__":
    sys.exit(main())
