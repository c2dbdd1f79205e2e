"""Chat templates: a conversation as the text that a model was trained to continue.

Templates come with models and are Jinja programs. Each is rendered in a process of its own (`template_worker.py`), in
the sandbox that transformers uses, so that it can neither read files, nor hang, nor fill the memory.
"""

import json
import os
import selectors
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from contextready.errors import ContextReadyError
from contextready.extras import require

WORKER = "contextready.infer.template_worker"
SECONDS = 20
"""Within which a template must be rendered, including the start of its process."""
LARGEST_ANSWER = 128 << 20
"""Bytes of a rendered text as JSON."""

Message = dict[str, str]
"""A message of a conversation: its `role` (system, user or assistant) and its `content`."""


class ChatTemplate:
    """The chat template of a model."""

    def __init__(self, source: str, named: Mapping[str, str], where: str) -> None:
        """`named` are the special tokens that templates name, such as bos_token; `where` is the model, for messages."""
        require("jinja2", "hf")
        self._source, self._named, self._where = source, dict(named), where
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def render(self, messages: Sequence[Message]) -> str:
        """Write a conversation as text, up to where the model's next answer begins."""
        plain = [{"role": message["role"], "content": message["content"]} for message in messages]
        variables = {
            **self._named,
            "messages": plain,
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        }
        with self._lock:
            if self._process is None:
                self._start()
            return self._ask(variables)

    def _start(self) -> None:
        # In a session of its own, so that Ctrl-C in a terminal does not reach it.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        self._end = weakref.finalize(self, _end, self._process)
        self._ask(self._source)

    def _ask(self, request: Any) -> str:
        assert self._process is not None
        try:
            answer = json.loads(_exchange(self._process, json.dumps(request).encode() + b"\n"))
        except TimeoutError:
            self._stop(f"takes more than {SECONDS} seconds")
        except (OSError, ValueError):
            self._stop("needs too much memory, or its process ended")
        except BaseException:
            # The answer may still come, and must not be taken for that of the next request.
            self._forget()
            raise
        if "error" in answer:
            if request is self._source:
                self._stop(f"cannot be read: {answer['error']}")
            self._refuse(f"does not accept this conversation: {answer['error']}")
        text: str = answer["text"]
        return text

    def _forget(self) -> None:
        self._end()
        self._process = None

    def _stop(self, why: str) -> NoReturn:
        self._forget()
        self._refuse(why)

    def _refuse(self, why: str) -> NoReturn:
        raise ContextReadyError(f"The chat template of {self._where} {why}.") from None


def _exchange(process: "subprocess.Popen[bytes]", request: bytes) -> bytes:
    """Send a line and return the line that answers it."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(request)
    process.stdin.flush()
    deadline, answer = time.monotonic() + SECONDS, bytearray()
    with selectors.DefaultSelector() as waiting:
        waiting.register(process.stdout, selectors.EVENT_READ)
        while not answer.endswith(b"\n"):
            if not waiting.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            part = os.read(process.stdout.fileno(), 1 << 16)
            answer += part
            if not part or len(answer) > LARGEST_ANSWER:
                raise ConnectionError
    return bytes(answer)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
