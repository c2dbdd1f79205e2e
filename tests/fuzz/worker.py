"""Runs cases in processes of their own, and watches their time, memory, network and the marker file.

The first process imports everything once. It reads one case per line from standard input and answers each with one
line. The cases run in copies of it (forks), so that an abort or a hang costs milliseconds. Everything else that the
package or a native library prints goes to a log file, so that the last words of a process that aborts are known.
"""

import contextlib
import faulthandler
import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

LIMIT = 10
"""Seconds of processor time that a case may take."""
WAITING = 3
"""How many times as long a case may take by the clock, because other processes may use the processor too."""
MOST_GROWTH = 1 << 30
"""Bytes by which the process may grow during a case."""
MACHINE = 1 << 29
"""The package believes that the machine has this much memory, so that what it allows stays below the limit."""
SPACE = 6 << 30
"""Bytes of address space that a case may reserve."""
CASES = 50
"""Cases that one process runs."""
PATIENCE = WAITING * LIMIT + 6
"""Seconds after which a process that does not answer is killed; its own alarm only stops Python code."""
OWN_FAULT = 70
"""Exit code of a process in which the fuzzer itself failed."""
GOOD = ("opened", "refused", "refused in several lines")
BAD = ("traceback", "abort", "hang", "memory", "execution", "connection")
NETWORK = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto")


class Hang(BaseException):
    """A case took too long. This is not an Exception, so that no handler in between catches it."""


connections: list[str] = []


def watch_network() -> None:
    """Note and refuse every connection. An audit hook sees all of them, however they are opened."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in NETWORK:
            address = arguments[1] if event == "socket.connect" else arguments[0]
            if isinstance(address, str) and event == "socket.connect":
                return  # a local socket
            connections.append(f"{event} {address!r}"[:200])
            raise ConnectionRefusedError("there is no network here")

    sys.addaudithook(hook)


def run_case(case: dict[str, Any], corpus: Path, scratch: Path) -> dict[str, Any]:
    """Prepare the files of a case, open them, and describe what happened."""
    from fuzz.corpus import MARKER, renew_manifest
    from fuzz.edits import apply
    from fuzz.loaders import LOADERS

    place, marker = scratch / "case", scratch / "marker"
    _clear(scratch)
    place.mkdir()
    for name in case["needs"]:
        shutil.copytree(corpus / name, place / name)
    apply(case["edits"], corpus, place)
    if case["renew"]:
        for manifest in place.rglob("manifest.json"):
            renew_manifest(manifest.parent)
    os.environ[MARKER] = str(marker)
    connections.clear()
    before, began = _status("VmRSS"), time.monotonic()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak of the resident memory
    result: dict[str, Any] = {}
    faulthandler.dump_traceback_later(WAITING * LIMIT + 3, file=sys.stderr)
    limit = case.get("limit", LIMIT)
    Clock.ends = time.process_time() + limit, began + WAITING * limit
    signal.setitimer(signal.ITIMER_REAL, limit, limit / 5)
    try:
        with contextlib.chdir(place):
            result["outcome"] = LOADERS[case["loader"]](case["words"])
    except Hang as hang:
        result |= {"outcome": "hang", **_where(hang)}
    except BaseException as error:
        # Commands may be interrupted, and MemoryError is one of the errors that is looked for.
        result |= {"outcome": "traceback", **_where(error)}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
    result["seconds"] = round(time.monotonic() - began, 3)
    result["growth"] = _status("VmHWM") - before
    if marker.exists():
        result |= {"outcome": "execution", "what": "code in the corpus ran"}
    elif connections:
        result |= {"outcome": "connection", "what": connections[0]}
    elif result["growth"] > MOST_GROWTH and result["outcome"] not in ("hang", "traceback"):
        result |= {"outcome": "memory", "what": f"grew by {result['growth'] / 1e9:.1f} GB"}
    return result


def _where(error: BaseException) -> dict[str, str]:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "contextready" in frame.filename]
    inner = ours[-1] if ours else frames[-1]
    file = inner.filename.rpartition("contextready/")[2]
    return {
        "what": f"{type(error).__name__}: {str(error)[:200]}",
        "where": f"{file}:{inner.lineno} {inner.name}",
        "traceback": "".join(traceback.format_exception(error))[-6000:],
    }


def _clear(folder: Path) -> None:
    """Empty the scratch folder; a case may have left folders without permissions or odd names."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def _status(name: str) -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))


class Clock:
    """When the current case has taken too long: in processor time, and by the clock."""

    ends = (0.0, 0.0)


def _check_time(number: int, frame: FrameType | None) -> None:
    if time.process_time() > Clock.ends[0] or time.monotonic() > Clock.ends[1]:
        raise Hang("it takes too long")


def prepare(corpus: Path, scratch: Path) -> None:
    """Write the corpus if it is missing, and open all of it, which imports what cases use; then set the limits."""
    import torch

    # One thread, also for ggml, so that processor time is time.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[os.getpid() % len(cores)]})
    torch.set_num_threads(1)
    from fuzz.cases import TARGETS
    from fuzz.corpus import build_corpus

    if not corpus.exists():
        build_corpus(corpus)
    for folder, target in TARGETS.items():
        if (corpus / folder).is_dir():
            case = {"needs": sorted({*target.needs, "data", "texts"}), "edits": [], "renew": False, "words": []}
            for loader in target.loaders:
                run_case(case | {"loader": loader}, corpus, scratch)
    plot = {"loader": "command", "needs": ["run"], "edits": [], "renew": False}
    run_case(plot | {"words": ["plot", "run", "--out", "out.png"]}, corpus, scratch)
    # What the package allows on a small machine stays below the limit of this process.
    with contextlib.suppress(ImportError):
        from contextready.formats import limits

        limits.total_memory = lambda: MACHINE
    used = _status("VmSize")
    resource.setrlimit(resource.RLIMIT_AS, (used + SPACE, used + SPACE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, _check_time)
    watch_network()


class Child:
    """A copy of this process that runs cases until it dies, or has run enough of them."""

    def __init__(self, corpus: Path, scratch: Path) -> None:
        self.cases = 0
        reads, self._requests = os.pipe()
        self._answers, writes = os.pipe()
        self.process = os.fork()
        if self.process == 0:
            os.close(self._requests)
            os.close(self._answers)
            try:
                with os.fdopen(reads) as requests, os.fdopen(writes, "w", buffering=1) as answers:
                    for line in requests:
                        answers.write(json.dumps(run_case(json.loads(line), corpus, scratch)) + "\n")
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(OWN_FAULT)
        os.close(reads)
        os.close(writes)

    def run(self, line: str) -> str | None:
        """The answer to a case as a line; None if there is none in time."""
        self.cases += 1
        with contextlib.suppress(BrokenPipeError):
            os.write(self._requests, line.encode())
        answer, deadline = b"", time.monotonic() + PATIENCE
        while not answer.endswith(b"\n"):
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            part = os.read(self._answers, 1 << 16) if ready else b""
            if not part:
                return None
            answer += part
        return answer.decode()

    def end(self) -> int | None:
        """End the process; returns its exit code if it had ended by itself, negative if a signal ended it."""
        # A process that is dying closes its pipes a moment before it can be waited for.
        for _ in range(100):
            ended, status = os.waitpid(self.process, os.WNOHANG)
            if ended:
                break
            time.sleep(0.001)
        else:
            os.kill(self.process, signal.SIGKILL)
            os.waitpid(self.process, 0)
        os.close(self._requests)
        os.close(self._answers)
        return os.waitstatus_to_exitcode(status) if ended else None


def main() -> None:
    """Answer the cases on standard input."""
    corpus, log = Path(sys.argv[1]), Path(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    faulthandler.enable(file=sys.stderr)
    child = None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        prepare(corpus, Path(scratch))
        print(json.dumps({"outcome": "ready"}), file=answers)
        for line in sys.stdin:
            child = child or Child(corpus, Path(scratch))
            os.ftruncate(handle, 0)
            answer = child.run(line)
            if answer is None:
                code = child.end()
                child = None
                if code == OWN_FAULT:
                    raise RuntimeError("the fuzzer itself failed")
                what = "inside native code" if code is None else f"the process ended with {code}"
                died = {"outcome": "hang" if code is None else "abort", "what": what, **last_words(log)}
                answer = json.dumps(died) + "\n"
            elif child.cases >= CASES or json.loads(answer)["outcome"] not in GOOD:
                child.end()
                child = None
            answers.write(answer)


def last_words(log: Path) -> dict[str, str]:
    """What a process printed before it died, and the innermost place in the package in Python's own traceback."""
    said, where = log.read_text(errors="replace")[-5000:], "native code"
    for line in said.splitlines():
        if "contextready/" in line and "File" in line:
            file, _, rest = line.partition("contextready/")[2].partition('", line ')
            number, _, name = rest.partition(" in ")
            where = f"{file}:{number} {name}"
            break
    return {"where": where, "traceback": said}


if __name__ == "__main__":
    main()
