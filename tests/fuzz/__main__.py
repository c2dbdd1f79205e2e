"""Opens damaged files and runs odd commands, many thousand times.

    python -m fuzz --cases 20000          from number 0 on; ends with one JSON line
    python -m fuzz --case 123             one case: what it does, and the traceback
    python -m fuzz --replay FILE          a kept crasher

A case is good if everything opens or is refused in a sentence (a command: exit code 0, 1, 2 or 130). Everything else is
a crasher: another exception, an abort, more than 10 seconds of processor time, more than 1 GB, code in a file that
runs, a connection.
"""

import argparse
import hashlib
import json
import select
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from fuzz.cases import Case, make_case
from fuzz.pool import Worker
from fuzz.worker import BAD, GOOD

KEPT = Path(__file__).parent / "crashers"
LARGEST_KEPT = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000, help="number of cases")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--workers", type=int, default=2, help="number of processes")
    parser.add_argument("--case", type=int, help="run only the case with this number and show it")
    parser.add_argument("--replay", type=Path, help="run a kept crasher and show it")
    parser.add_argument("--keep", type=Path, default=KEPT, help="folder for crashers")
    parser.add_argument("--corpus", type=Path, help="folder for the corpus; one that exists is used as it is")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        corpus = options.corpus or Path(scratch) / "corpus"
        again = Worker(corpus, Path(scratch) / "log")
        if options.replay is not None:
            show(json.loads(options.replay.read_text())["case"], again)
        elif options.case is not None:
            show(make_case(corpus, options.case), again)
        else:
            pool = [Worker(corpus, Path(scratch) / f"log-{i}") for i in range(options.workers)]
            tally = fuzz(corpus, pool, again, options.first, options.cases, options.keep)
            tally.show()
            sys.exit(bool(tally.kinds))


def show(case: Case, worker: Worker) -> None:
    """Print a case and what becomes of it."""
    print(json.dumps(case, indent=1)[:5000])
    result = worker.run(case)
    worker.stop()
    print(result.pop("traceback", ""))
    print(json.dumps(result))


class Tally:
    """Counts what happens, and keeps one example of every kind of crasher."""

    def __init__(self, again: Worker, keep: Path) -> None:
        self.again, self.keep, self.begun = again, keep, time.monotonic()
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.kinds: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        self.unconfirmed: list[int] = []
        self.slowest, self.largest, self.done = 0.0, 0, 0

    def add(self, number: int, case: Case, result: dict[str, Any]) -> None:
        """Count a case. On a busy machine a case may be slow by chance, so only what happens twice is a crasher."""
        if result["outcome"] not in (*GOOD, "traceback"):
            first, result = result, self.again.run(case)
            if result["outcome"] in GOOD:
                self.unconfirmed.append(number)
                print(f"case {number}: {first['outcome']} ({first.get('what')}), but not a second time", flush=True)
        self.done += 1
        self.outcomes[case["loader"], result["outcome"]] += 1
        self.slowest = max(self.slowest, result.get("seconds", 0.0))
        self.largest = max(self.largest, result.get("growth", 0))
        if result["outcome"] in GOOD:
            return
        kind = kind_of(result)
        self.kinds[kind] += 1
        if kind not in self.examples:
            self.examples[kind] = f"case {number}, {case['loader']}: {result.get('what')}"
            print(f"{kind} ({self.examples[kind]})", flush=True)
            self._keep(kind, number, case, result)

    def _keep(self, kind: str, number: int, case: Case, result: dict[str, Any]) -> None:
        """Write a crasher to a small file, with as few edits as possible; if it is still large, only its number."""
        for edit in case["edits"] if len(case["edits"]) > 1 else []:
            alone = case | {"edits": [edit]}
            if kind_of(self.again.run(alone)) == kind:
                case = alone
                break
        self.keep.mkdir(parents=True, exist_ok=True)
        about = {"kind": kind, "number": number, "what": result.get("what", "")}
        text = json.dumps(about | {"case": case}, indent=1)
        if len(text) > LARGEST_KEPT:
            text = json.dumps(about, indent=1)
        name = f"{result['outcome']}-{hashlib.sha256(kind.encode()).hexdigest()[:8]}.json"
        (self.keep / name).write_text(text + "\n")

    def show(self) -> None:
        """Print the tables, and one JSON line."""
        columns = sorted({outcome for _, outcome in self.outcomes}, key=lambda name: (name not in GOOD, name))
        print(f"\n{'loader':<20}" + "".join(f"{name:>26}" for name in columns))
        for loader in sorted({loader for loader, _ in self.outcomes}):
            print(f"{loader:<20}" + "".join(f"{self.outcomes[loader, name]:>26,}" for name in columns))
        for kind, count in self.kinds.most_common():
            print(f"{count:>6} × {kind} ({self.examples[kind]})")
        totals: Counter[str] = Counter()
        for (_, outcome), number in self.outcomes.items():
            totals[outcome] += number
        summary = {
            "benchmark": "fuzz",
            "cases": self.done,
            **{name: totals[name] for name in GOOD},
            **{name: totals[name] for name in BAD},
            "kinds": len(self.kinds),
            "unconfirmed": len(self.unconfirmed),
            "slowest_seconds": round(self.slowest, 2),
            "largest_growth_mb": round(self.largest / 1e6),
            "minutes": round((time.monotonic() - self.begun) / 60, 1),
        }
        print(json.dumps(summary))


def kind_of(result: dict[str, Any]) -> str:
    """What makes two crashers the same: what happened, and where in the package."""
    return f"{result['outcome']}, {result.get('what', '').partition(':')[0]}, {result.get('where', '')}"


def fuzz(corpus: Path, pool: list[Worker], again: Worker, first: int, count: int, keep: Path) -> Tally:
    """Run cases in all workers, and one that goes wrong a second time in the worker `again`."""
    tally, numbers = Tally(again, keep), iter(range(first, first + count))
    waiting: dict[Any, tuple[Worker, int, Case]] = {}

    def give(worker: Worker) -> None:
        number = next(numbers, None)
        if number is not None:
            case = make_case(corpus, number)
            worker.send(case)
            waiting[worker.process.stdout] = (worker, number, case)

    for worker in pool:
        give(worker)
    while waiting:
        for stream in select.select(list(waiting), [], [])[0]:
            worker, number, case = waiting.pop(stream)
            tally.add(number, case, worker.receive())
            if tally.done % 500 == 0:
                rate = tally.done / (time.monotonic() - tally.begun)
                found = f"{sum(tally.kinds.values())} crashers of {len(tally.kinds)} kinds"
                print(f"{tally.done:,} of {count:,} cases, {rate:.0f} per second, {found}", flush=True)
            give(worker)
    for worker in (*pool, again):
        worker.stop()
    return tally


if __name__ == "__main__":
    main()
