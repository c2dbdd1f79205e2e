"""The metrics of a run: always written to metrics.jsonl, and on request to TensorBoard and Weights & Biases."""

import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contextready.errors import ContextReadyError
from contextready.extras import require
from contextready.files import staged_file, to_json, writing
from contextready.formats.json_file import parse_json
from contextready.formats.record import Count, read_record
from contextready.formats.regular import open_regular, read_text
from contextready.runs.config import RunConfig
from contextready.runs.records import Macs

FILE = "metrics.jsonl"
LONGEST_LINE = 1 << 20
"""Bytes; real lines have a few hundred."""

Record = dict[str, Any]


@dataclass(frozen=True)
class Line:
    """The known keys of a line. Numbers that are not finite are written as null, and a task may add other keys."""

    step: Count
    tokens: Count = 0
    seconds: float = 0.0
    macs: Macs = 0
    loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    passes: Count | None = None
    residual: float | None = None
    val_loss: float | None = None
    val_loss_error: float | None = None
    val_perplexity: float | None = None
    accuracy: list[float | None] | None = None
    levels_solved: Count | None = None
    solved: bool | None = None


class Metrics:
    """The metrics of a run that resumes after step `start`; records that a killed process logged later are dropped.

    A new run has no records yet, not even of step 0, so its `start` is -1.
    """

    def __init__(self, run: Path, config: RunConfig, start: int) -> None:
        self._path = run / FILE
        kept = [record for record in read_metrics(run) if record["step"] <= start] if self._path.exists() else []
        with staged_file(self._path) as staging:
            staging.write_text("".join(to_json(record) + "\n" for record in kept))
        # Not buffered, so that nothing is left to be written when the disk is full.
        with writing(self._path):
            self._file = self._path.open("ab", buffering=0)
        self._board = self._wandb = None
        if config.train.tensorboard:
            require("tensorboard", "tensorboard")
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(run / "tensorboard"), purge_step=start + 1)
        if config.train.wandb is not None:
            wandb = require("wandb", "wandb")
            identity = run / "wandb-id"
            if start < 0 or not identity.exists():
                with staged_file(identity) as staging:
                    staging.write_text(secrets.token_hex(8))
            self._wandb = wandb.init(
                project=config.train.wandb,
                id=read_text(identity, LONGEST_LINE),
                name=run.name,
                dir=str(run),
                resume="allow",
                config=config.as_dict()["model"] | config.as_dict()["train"],
            )

    def add(self, record: Record) -> None:
        """Write one record: its `step`, and numbers that each become a curve."""
        left = memoryview(f"{to_json(record)}\n".encode())
        with writing(self._path):
            while left:
                left = left[self._file.write(left) :]
        curves = {key: value for key, value in record.items() if key != "step" and isinstance(value, int | float)}
        if self._board is not None:
            for key, value in curves.items():
                self._board.add_scalar(key, value, record["step"])
        if self._wandb is not None:
            self._wandb.log(curves, step=record["step"])

    def sync(self) -> None:
        """Flush the records to disk, so that no checkpoint is ahead of them."""
        with writing(self._path):
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
    records: list[Record] = []
    damaged = None
    for number, line in enumerate(_lines(path), 1):
        if damaged is not None:
            raise ContextReadyError(f"{path}, line {damaged} is not JSON; the file is damaged.")
        try:
            record = parse_json(line.decode("utf-8"), "it")
        except (ContextReadyError, UnicodeDecodeError):
            damaged = number
            continue
        if not isinstance(record, dict) or type(record.get("step")) is not int:
            raise ContextReadyError(f"{path}, line {number} is not a record of a run, because it has no step.")
        read_record(Line, record, f"{path}, line {number}", extra=True)
        records.append(record)
    return records


def _lines(path: Path) -> Iterator[bytes]:
    with open_regular(path) as (file, _):
        while line := file.readline(LONGEST_LINE):
            yield line
