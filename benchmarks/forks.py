"""Functions in copies (forks) of this process, which can be killed or abort without harm."""

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

FAILED = 70
"""Exit code of a process whose function raised an exception."""


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int
    """0, or FAILED after an exception, or minus the number of the signal that ended it."""
    value: Any
    """What the function returned; None if it did not."""
    text: str
    """What it printed."""


class Child:
    """A running copy of this process that calls a function, whose result must be plain values."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115  (closed in `wait`)
        self._answer, writes = os.pipe()
        self._ended: int | None = None
        self.process = os.fork()
        if self.process:
            os.close(writes)
            return
        code = FAILED
        try:
            for stream in (1, 2):
                os.dup2(self._printed.fileno(), stream)
            value = json.dumps(function()).encode()
            sys.stdout.flush()
            sys.stderr.flush()
            os.write(writes, value)
            code = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)

    def signal(self, number: int) -> None:
        """Send the process a signal."""
        os.kill(self.process, number)

    def is_running(self) -> bool:
        """Whether the process has not ended yet."""
        if self._ended is None:
            ended, status = os.waitpid(self.process, os.WNOHANG)
            self._ended = status if ended else None
        return self._ended is None

    def wait(self, seconds: float = 120.0) -> Ended:
        """Wait for the process; one that takes too long is killed."""
        deadline = time.monotonic() + seconds
        while self.is_running():
            if time.monotonic() > deadline:
                self.signal(signal.SIGKILL)
                deadline += seconds
            time.sleep(0.001)
        assert self._ended is not None
        with os.fdopen(self._answer, "rb") as answer, self._printed as printed:
            value = answer.read()
            printed.seek(0)
            text = printed.read().decode(errors="replace")
        return Ended(os.waitstatus_to_exitcode(self._ended), json.loads(value) if value else None, text)


def in_child(function: Callable[[], Any]) -> Ended:
    """Call a function in a copy of this process and wait for it."""
    return Child(function).wait()
