"""Options that `crt generate` and `crt chat` share: how tokens are chosen, what computes them, and their limits."""

import argparse
import sys
from typing import TYPE_CHECKING, Any

from contextready.cli.options import whole_number
from contextready.formats.limits import MOST_ROWS, check_count

if TYPE_CHECKING:
    from contextready.infer.language_model import LanguageModel
    from contextready.infer.sampling import Sampling

LONGEST = 1 << 28
"""The most tokens in a completion, and in its context."""
LIMITS = {
    "max_tokens": (1, LONGEST),
    "samples": (1, MOST_ROWS),
    "seed": (0, 2**64 - 1),
    "top_k": (1, 2**31),
    "logprobs": (0, 2**31),
    "context": (1, LONGEST),
    "chunk": (1, LONGEST),
    "rollback": (0, LONGEST),
    "history": (0, 1 << 20),
}
"""The smallest and the largest value of every number of the command line."""


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how a token is chosen."""
    parser.add_argument("--seed", type=whole_number, metavar="N", default=0, help="random seed")
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        default=0.8,
        help="0 always takes the most likely token; 1 samples as trained",
    )
    parser.add_argument(
        "--top-k", type=whole_number, metavar="N", help="sample from the k most likely tokens (default: off)"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        default=1.0,
        help="sample from the most likely tokens whose probabilities reach p",
    )
    parser.add_argument(
        "--min-p", type=float, metavar="P", default=0.0, help="drop tokens less likely than p times the most likely one"
    )
    parser.add_argument(
        "--repetition-penalty",
        type=float,
        metavar="R",
        default=1.0,
        help="values above 1 make earlier tokens less likely",
    )


def add_reading_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what computes and how prompts are read."""
    parser.add_argument(
        "--engine", metavar="NAME", help="eager or compiled; exported files run on ggml (default: eager)"
    )
    parser.add_argument(
        "--solver",
        metavar="NAME",
        help="how prompts are read: sweep, jacobi or sequential (default: sweep, or sequential for exported files)",
    )
    parser.add_argument(
        "--tolerance", type=float, metavar="E", help="relative error at which sweep and jacobi stop (default: 0.05)"
    )
    parser.add_argument("--chunk", type=whole_number, metavar="N", help="prompt tokens solved at once (default: 4096)")
    parser.add_argument(
        "--bf16-passes",
        metavar="WHEN",
        help="make early passes over prompts in bf16 and exact ones in fp32, to the same tolerance: on, off, or auto, "
        "if the hardware multiplies bf16 natively (default: auto)",
    )
    parser.add_argument(
        "--precision",
        metavar="NAME",
        default="fp32",
        help="fp32; bf16, which rounds all matrices; or auto, bf16 if the hardware multiplies it natively",
    )
    parser.add_argument("--threads", type=whole_number, metavar="N", help="CPU threads (default: measured)")
    parser.add_argument("--device", metavar="NAME", default="auto", help="cpu, cuda, mps or auto")


def sampling_of(options: argparse.Namespace) -> "Sampling":
    """Return the choice of tokens that was requested."""
    from contextready.infer.sampling import Sampling

    return Sampling(options.temperature, options.top_k, options.top_p, options.min_p, options.repetition_penalty)


def opening_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the keywords of `contextready.load` that were requested."""
    chosen = {name: getattr(options, name) for name in ("solver", "tolerance", "chunk", "bf16_passes")}
    return {
        "engine": options.engine,
        "threads": options.threads,
        "device": options.device,
        "precision": options.precision,
        **{name: value for name, value in chosen.items() if value is not None},
    }


def note_emulation(opened: "LanguageModel", precision: str) -> None:
    """Say so if bf16 was asked for on hardware that only emulates it."""
    if precision != "bf16":
        return
    from contextready.device import multiplies_bf16

    if not multiplies_bf16(next(opened.model.backbone.parameters()).device):
        print(
            "Note: this hardware emulates bf16, which is slower than fp32; with --precision auto it computes in fp32.",
            file=sys.stderr,
        )


def check_limits(options: argparse.Namespace) -> None:
    """Refuse numbers that are too small or absurdly large."""
    from contextready.infer.engine import check_threads

    check_threads("--threads", options.threads)
    for name, (low, high) in LIMITS.items():
        value = getattr(options, name, None)
        if value is not None:
            check_count(f"--{name.replace('_', '-')}", value, low, high)
