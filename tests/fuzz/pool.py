"""A worker as an object: starts the process, gives it cases and takes its answers."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from fuzz.worker import GOOD

TESTS = Path(__file__).parent.parent
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MPLBACKEND": "agg",
    "COLUMNS": "200",
    "PYTHONWARNINGS": "ignore",
}


class Worker:
    """One process of `worker.py`."""

    def __init__(self, corpus: Path, log: Path) -> None:
        self.log = log
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fuzz.worker", str(corpus), str(log)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ
            | ENVIRONMENT
            | {"PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(TESTS)]).strip(os.pathsep)},
            text=True,
        )
        self.receive()

    def send(self, case: dict[str, Any]) -> None:
        """Give the process a case."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(case) + "\n")
        self.process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        """Wait for the answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the fuzzer itself failed: {self.log.read_text(errors='replace')[-5000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def run(self, case: dict[str, Any]) -> dict[str, Any]:
        """Run one case and wait for it."""
        self.send(case)
        return self.receive()

    def stop(self) -> None:
        """End the process."""
        self.process.communicate()


def twice(worker: Worker, case: dict[str, Any]) -> dict[str, Any]:
    """What becomes of a case. On a busy machine a case may be slow by chance, so only what happens twice counts."""
    result = worker.run(case)
    return result if result["outcome"] in GOOD else worker.run(case)
