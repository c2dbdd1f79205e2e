"""`crt unshard`: convert a sharded checkpoint to a plain one."""

import argparse
from pathlib import Path

from contextready.cli.options import Verbs, verb


def add(verbs: Verbs) -> None:
    """Describe `crt unshard`."""
    unshard = verb(
        verbs,
        "unshard",
        "convert a sharded checkpoint to a plain one",
        "Convert the checkpoint of a run with parallel=fsdp to plain safetensors, which every verb can\n"
        "open. The metadata of a sharded checkpoint is a pickle, which can run code when it is loaded,\n"
        "so use this on your own runs only.",
        "crt unshard runs/sharded runs/plain\n"
        "crt unshard runs/sharded/checkpoints/step-00001000 runs/plain    # an earlier checkpoint",
    )
    unshard.add_argument("checkpoint", type=Path, help="run, whose newest checkpoint is converted, or checkpoint")
    unshard.add_argument("out", type=Path, help="folder to create")
    unshard.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    from contextready.runs.checkpoint import unshard

    print(f"Wrote {unshard(options.checkpoint, options.out)}. Next: crt eval {options.out}")
