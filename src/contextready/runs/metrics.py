"""The metrics of a run: always written to metrics.jsonl, and on request to TensorBoard and Weights & Biases."""

import json
import os
import secrets
from pathlib import Path
from typing import Any

from contextready.errors import ContextReadyError
from contextready.extras import require
from contextready.files import staged_file, to_json
from contextready.runs.config import RunConfig

FILE = "metrics.jsonl"

Record = dict[str, Any]


class Metrics:
    """The metrics of a run that resumes after step `start`; records that a killed process logged later are dropped.

    A new run has no records yet, not even of step 0, so its `start` is -1.
    """

    def __init__(self, run: Path, config: RunConfig, start: int) -> None:
        self._path = run / FILE
        kept = [record for record in read_metrics(run) if record["step"] <= start] if self._path.exists() else []
        with staged_file(self._path) as staging:
            staging.write_text("".join(to_json(record) + "\n" for record in kept))
        self._file = self._path.open("a", buffering=1)
        self._board = self._wandb = None
        if config.train.tensorboard:
            require("tensorboard", "tensorboard")
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(run / "tensorboard"), purge_step=start + 1)
        if config.train.wandb is not None:
            wandb = require("wandb", "wandb")
            identity = run / "wandb-id"
            if start < 0 or not identity.exists():
                identity.write_text(secrets.token_hex(8))
            self._wandb = wandb.init(
                project=config.train.wandb,
                id=identity.read_text(),
                name=run.name,
                dir=str(run),
                resume="allow",
                config=config.as_dict()["model"] | config.as_dict()["train"],
            )

    def add(self, record: Record) -> None:
        """Write one record: its `step`, and numbers that each become a curve."""
        self._file.write(to_json(record) + "\n")
        curves = {key: value for key, value in record.items() if key != "step" and isinstance(value, int | float)}
        if self._board is not None:
            for key, value in curves.items():
                self._board.add_scalar(key, value, record["step"])
        if self._wandb is not None:
            self._wandb.log(curves, step=record["step"])

    def sync(self) -> None:
        """Flush the records to disk, so that no checkpoint is ahead of them."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file and finish the loggers."""
        self._file.close()
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


def read_metrics(run: Path) -> list[Record]:
    """Read all records of a run. A last line that a crash cut off is ignored."""
    path = run / FILE
    if not path.is_file():
        raise ContextReadyError(f"There is no run at {run}: it has no {FILE}.")
    lines = path.read_text().splitlines()
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError:
            if number < len(lines):
                raise ContextReadyError(f"{path}, line {number} is not JSON; the file is damaged.") from None
            continue
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            raise ContextReadyError(f"{path}, line {number} is not a record of a run, because it has no step.")
        records.append(record)
    return records
