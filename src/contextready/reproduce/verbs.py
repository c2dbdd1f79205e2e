"""The verbs `crt pointer` and `crt reproduce`."""

import argparse
from pathlib import Path

from contextready.errors import ContextReadyError
from contextready.verbs import Verbs, verb


def add_pointer(verbs: Verbs) -> None:
    """Describe `crt pointer`."""
    from contextready.data.pointer import PointerTask
    from contextready.settings import describe_settings

    pointer = verb(
        verbs,
        "pointer",
        "pointer chasing: train a model, watch its levels being solved",
        "Train a model on pointer chasing, the task on which depth can be counted, until every level\n"
        "is solved (0.99 of the answers right on 2,000 fresh sequences) or its steps are made. The\n"
        "same command goes on after any interruption. Writes the wave of levels as a picture.",
        f"settings of the task (the recipe pointer-mini has hops=4 keys=3):\n{describe_settings(PointerTask)}\n\n"
        "settings of model and training: see crt train --help.\n\n"
        "examples:\n"
        "  crt pointer --show hops=2 answers=visible                    as the paper prints it\n"
        "  crt pointer                                                  one context-ready layer\n"
        "  crt pointer correction=none layers=2 out=runs/n2             a transformer of two layers\n"
        "  crt pointer correction=none layers=1 extra_ffn=true out=runs/n1-ffn\n"
        "  crt pointer gradient=unroll passes=10 k_min=none out=runs/k10\n"
        "  crt pointer gradient=implicit passes=20 k_min=none out=runs/implicit\n"
        "  crt pointer pointer-d1-c256                                  the paper's",
    )
    pointer.add_argument(
        "settings", nargs="*", metavar="RECIPE|key=value", help="a recipe (default: pointer-mini), and changes to it"
    )
    pointer.add_argument("--show", action="store_true", help="print an example, and train nothing")
    pointer.set_defaults(run=_pointer)


def add_reproduce(verbs: Verbs) -> None:
    """Describe `crt reproduce`."""
    from contextready.reproduce.pointer_rows import PARTS, SCALES

    reproduce = verb(
        verbs,
        "reproduce",
        "the paper's experiments, with one command each",
        "Run an experiment of the paper, all its rows and both readings of the task, several at a\n"
        "time; the same command goes on where it stopped. Prints the tables of all that the folder\n"
        "holds, and writes them as report.md and report.json, with pictures as PNG and SVG.\n\n"
        "  headline   one context-ready layer against a transformer of two: minutes on two cores\n"
        "  table      transformers of every depth and one context-ready layer, in both readings\n"
        "  growth     one context-ready layer with more hops\n"
        "  parallel   one context-ready layer trained by parallel passes\n"
        "  all        all of them",
        "examples:\n"
        "  crt reproduce pointer --part headline\n"
        "  crt reproduce pointer --scale cpu --seeds 0,1,2\n"
        "  crt reproduce pointer --scale paper --part table",
    )
    reproduce.add_argument("experiment", choices=["pointer"], help="which one")
    reproduce.add_argument(
        "settings", nargs="*", metavar="key=value", help="settings that change every run, for example steps=500"
    )
    reproduce.add_argument(
        "--scale", choices=list(SCALES), default="cpu", help="miniature or as in the paper (default: cpu)"
    )
    reproduce.add_argument("--part", choices=[*PARTS, "all"], help="which rows to run (default: table)")
    reproduce.add_argument("--seeds", help="with which seeds, as 0,1,2 (default: 0)")
    reproduce.add_argument("--out", type=Path, help="folder of all runs (default: runs/pointer-SCALE)")
    reproduce.add_argument(
        "--jobs", type=int, help="runs at a time (default: one for each core, or one where there is a GPU)"
    )
    reproduce.add_argument("--report", action="store_true", help="only report what the folder holds; train nothing")
    reproduce.set_defaults(run=_reproduce)


def parse_seeds(text: str) -> list[int]:
    """`0,1,2` as numbers."""
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        raise ContextReadyError(f"--seeds {text} is not a list of numbers; write it as 0,1,2.") from None
    if len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise ContextReadyError(f"--seeds {text}: give each seed once, 0 or above.")
    return seeds


def _pointer(options: argparse.Namespace) -> int:
    from contextready.train.pointer import print_example, resolve_pointer, run_pointer

    config = resolve_pointer(options.settings)
    if options.show:
        print_example(config)
        return 0
    return run_pointer(config)


def _reproduce(options: argparse.Namespace) -> int:
    from contextready.reproduce.console import report, run_reproduce
    from contextready.reproduce.pointer_rows import PARTS

    out = options.out or Path(f"runs/pointer-{options.scale}")
    if options.report:
        for name in ("part", "seeds", "jobs", "settings"):
            if getattr(options, name) not in (None, []):
                given = " ".join(options.settings) if name == "settings" else f"--{name}"
                raise ContextReadyError(f"--report tells of all runs in {out} as they were made; leave {given} out.")
        return report(options.scale, out)
    if options.jobs is not None and options.jobs < 1:
        raise ContextReadyError(f"--jobs {options.jobs} is too few; give at least 1.")
    return run_reproduce(
        options.scale,
        PARTS if options.part == "all" else [options.part or "table"],
        parse_seeds("0" if options.seeds is None else options.seeds),
        out,
        options.settings,
        options.jobs,
    )
