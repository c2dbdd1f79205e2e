"""`crt unshard`: a plain checkpoint from a sharded one."""

import argparse
from pathlib import Path

from contextready.cli.options import Verbs, verb


def add(verbs: Verbs) -> None:
    """Describe `crt unshard`."""
    unshard = verb(
        verbs,
        "unshard",
        "a plain checkpoint from a sharded one",
        "Write the checkpoint of a run with parallel=fsdp as plain safetensors. The metadata of a\n"
        "sharded checkpoint is a pickle, which can run code when it is read: only for your own runs.",
    )
    unshard.add_argument("checkpoint", type=Path, help="run (its newest checkpoint is used) or checkpoint")
    unshard.add_argument("out", type=Path, help="folder to make")
    unshard.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    from contextready.runs.checkpoint import unshard

    print(f"Wrote {unshard(options.checkpoint, options.out)}. Next: crt eval {options.out}")
