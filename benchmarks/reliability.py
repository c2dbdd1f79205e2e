"""Repeats the reliability figures. Each one chosen prints a line of JSON when it is done.

    python benchmarks/reliability.py --kills 200      kill -9 inside saves; the resumed run ends bit-equal
    python benchmarks/reliability.py --signals 50     SIGTERM and SIGINT at any moment of `crt train`; likewise
    python benchmarks/reliability.py --faults         EIO and ENOSPC at every call of a save; nothing is lost
    python benchmarks/reliability.py --flips 1000     bit flips are detected, or change nothing
    python benchmarks/reliability.py --pairs 10       two processes write the same files at the same time
    python benchmarks/reliability.py --soak 30        minutes of loading, generating, saving, evaluating in one process

Models are tiny, so that almost all of the time is spent where things can go wrong. Except for the signals, processes
are copies (forks) of this one, so that a process that is killed costs milliseconds and not an import of torch.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "NO_COLOR": "1", "COLUMNS": "200"}
sys.path.append(str(Path(__file__).parent.parent / "tests"))

import torch
from disk_faults import READS, count_calls, errors_at, limit_file_size
from forks import Child, Ended, in_child
from train_helpers import make_data, metrics, recipe_file, run, start, sums, words

from contextready.cli.main import main as crt
from contextready.errors import ContextReadyError
from contextready.runs.checkpoint import newest_checkpoint, open_checkpoint

RUN = {"save_every": 1, "eval_every": 50, "log_every": 5, "dropout": 0.1, "keep": 2, "steps": 10**6}
"""A run that saves after every step; dropout makes it depend on the random number generators."""


def kills(count: int, place: Path, seed: int) -> dict[str, Any]:
    """Kill a run inside saves, again and again, then let it end and compare it with one that was never killed."""
    chance, folder = random.Random(seed), place / "run"
    data = make_data(place / "corpus")
    command = ["train", recipe_file(place), *words(data, folder, **RUN)]
    inside, all_kills, refused = 0, 0, 0
    while inside < count:
        before = newest_checkpoint(folder)
        child = Child(lambda: crt(command))
        _wait(child, lambda before=before: newest_checkpoint(folder) not in (None, before))
        time.sleep(chance.uniform(0.0, 0.02))
        child.signal(signal.SIGKILL)
        assert child.wait().code == -signal.SIGKILL
        all_kills += 1
        inside += any(path.name.startswith(".step-") for path in (folder / "checkpoints").iterdir())
        for checkpoint in (folder / "checkpoints").glob("step-*"):
            try:
                open_checkpoint(checkpoint).model()
            except ContextReadyError:
                refused += 1
        _progress("kills", inside, count)
    result = _resumed_like_a_whole_run(place, data, folder)
    return {"figure": "kills", "kills": all_kills, "inside_saves": inside, "damaged_checkpoints": refused, **result}


def signals(count: int, place: Path, seed: int) -> dict[str, Any]:
    """Interrupt `crt train` at any moment of its life, and resume it."""
    chance, folder = random.Random(seed), place / "run"
    data = make_data(place / "corpus")
    command = ["train", recipe_file(place), *words(data, folder, **RUN | {"save_every": 20})]
    began = time.monotonic()
    first = start(*command)
    while not (folder / "metrics.jsonl").exists():
        assert first.poll() is None, first.communicate()
        time.sleep(0.01)
    until_training = time.monotonic() - began
    first.send_signal(signal.SIGTERM)
    first.communicate()
    codes: Counter[str] = Counter()
    tracebacks = 0
    for number in range(count):
        process = start(*command)
        # Half of the signals arrive while the command starts. The interpreter itself needs the first moment.
        time.sleep(chance.uniform(0.1, 2 * until_training))
        sent = chance.choice((signal.SIGTERM, signal.SIGINT))
        process.send_signal(sent)
        _, err = process.communicate(timeout=120)
        codes[f"{sent.name} → {process.returncode}"] += 1
        if "Traceback" in err:
            tracebacks += 1
            print(err[-800:], file=sys.stderr)
        _progress("signals", number + 1, count)
    result = _resumed_like_a_whole_run(place, data, folder, save_every=20)
    return {"figure": "signals", "signals": count, "exit_codes": dict(codes), "tracebacks": tracebacks, **result}


def _resumed_like_a_whole_run(place: Path, data: Path, folder: Path, **changes: int) -> dict[str, Any]:
    """Resume a run for three more steps, and compare it with a run of the same length without interruption."""
    killed = newest_checkpoint(folder)
    assert killed is not None
    steps = int(killed.name[5:]) + 3
    ended = in_child(lambda: run(data, folder, **RUN | changes | {"steps": steps}).step)
    assert ended.value == steps, ended
    in_child(lambda: run(data, place / "whole", **RUN | changes | {"steps": steps}).step)
    newest, whole = newest_checkpoint(folder), newest_checkpoint(place / "whole")
    assert newest is not None
    assert whole is not None
    return {
        "steps": steps,
        "bit_equal": sums(newest) == sums(whole),
        "equal_metrics": metrics(folder) == metrics(place / "whole"),
        "leftovers": len([path for path in (folder / "checkpoints").iterdir() if path.name.startswith(".")]),
    }


def faults(place: Path) -> dict[str, Any]:
    """Let every call of a save fail in turn, and check that the checkpoint before it still loads and resumes."""
    data, base = make_data(place / "corpus"), place / "base"
    in_child(lambda: run(data, base, **RUN | {"steps": 3}).step)
    before = sums(newest_checkpoint(base))
    in_child(lambda: run(data, place / "whole", **RUN | {"steps": 4}).step)
    after = sums(newest_checkpoint(place / "whole"))
    folder = place / "run"
    command = ["train", recipe_file(place), *words(data, folder, **RUN | {"steps": 4})]

    def renew() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(base, folder)

    renew()
    calls = in_child(lambda: count_calls(lambda: crt(command))).value
    largest = max(path.stat().st_size for path in newest_checkpoint(folder).iterdir())
    plans: list[tuple[str, Any]] = []
    for number, name in enumerate(calls):
        # A full disk does not keep anyone from reading.
        for error in ("EIO",) if name in READS else ("EIO", "ENOSPC"):
            plans.append((f"{error} at call {number} ({name})", lambda n=number, e=error: errors_at(n, e)))
    for part in (0.001, 0.1, 0.5, 0.9, 0.999):
        plans.append((f"no byte after {part:.1%}", lambda size=int(part * largest): limit_file_size(size)))
    outcomes: Counter[str] = Counter()
    failures: list[str] = []
    resumed: dict[str, str | None] = {}
    for index, (what, plan) in enumerate(plans):
        renew()
        ended = in_child(lambda plan=plan: _with_fault(plan, command))
        problem = _after_fault(ended, folder, (before, after))
        # Most faults leave the same files, from which resuming needs to be shown only once.
        if problem is None and (left := _files(folder)) not in resumed:
            again = in_child(lambda: crt(command))
            good = again.value == 0 and sums(newest_checkpoint(folder)) == after
            resumed[left] = None if good else f"the run does not resume: {again.text[-400:]}"
        problem = problem or resumed[left]
        outcomes["failed" if problem else "ended without loss" if ended.value == 0 else "refused in a sentence"] += 1
        if problem:
            failures.append(f"{what}: {problem}")
            print(failures[-1], file=sys.stderr)
        _progress("faults", index + 1, len(plans))
    kinds = Counter(name for name in calls)
    return {"figure": "faults", "calls": dict(kinds), "faults": len(plans), **outcomes, "failures": failures[:20]}


def _with_fault(plan: Any, command: list[str]) -> int:
    with plan():
        return crt(command)


def _after_fault(ended: Ended, folder: Path, good: tuple[list[str], list[str]]) -> str | None:
    """What went wrong, if anything did: in the process, or in the checkpoint that is left."""
    if ended.value not in (0, 2) or "Traceback" in ended.text:
        return f"the command ended with {ended.value} ({ended.code}): {ended.text[-400:]}"
    if ended.value == 2 and ended.text.count("crt train: ") != 1:
        return f"no sentence: {ended.text[-400:]}"
    try:
        checkpoint = open_checkpoint(folder)
        checkpoint.model()
    except ContextReadyError as error:
        return f"no checkpoint can be loaded: {error}"
    return None if sums(checkpoint.folder) in good else "the checkpoint has other weights"


def _files(folder: Path) -> str:
    """The names of all files of a run, and its metrics without times."""
    names = sorted(f"{path.relative_to(folder)} {path.is_dir()}" for path in folder.rglob("*"))
    return "\n".join([*names, *metrics(folder)])


def flips(count: int, place: Path, seed: int) -> dict[str, Any]:
    """Flip one random bit of one random file and open the folder or file it belongs to."""
    from damage import PARTS, build, contents

    chance = random.Random(seed)
    made = in_child(lambda: build(place / "good"))
    assert made.code == 0, made
    good = {part: in_child(lambda part=part: contents(place / "good", part)).value for part in PARTS}
    assert all(good.values())
    outcomes: Counter[str] = Counter()
    by_part: dict[str, Counter[str]] = {part: Counter() for part in PARTS}
    failures: list[str] = []
    for number in range(count):
        part = chance.choice(list(PARTS))
        file = chance.choice(sorted(p for p in (place / "good" / part).rglob("*") if p.is_file() and p.stat().st_size))
        content = bytearray(file.read_bytes())
        at, bit = chance.randrange(len(content)), chance.randrange(8)
        file.write_bytes(content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :])
        ended = in_child(lambda part=part: contents(place / "good", part))
        file.write_bytes(content)
        where = f"bit {bit} of byte {at} of {file.relative_to(place / 'good')}"
        if ended.code != 0 or ended.value is None or "Traceback" in ended.text:
            outcome = "aborts" if ended.code < 0 else "tracebacks"
            failures.append(f"{where}: {ended.text[-300:]}")
        elif ended.value.startswith("refused: "):
            outcome = "detected"
        elif ended.value == good[part]:
            outcome = "harmless"
        else:
            outcome = "silent"
            failures.append(f"{where}: opens, but differs")
        outcomes[outcome] += 1
        by_part[part][outcome] += 1
        _progress("flips", number + 1, count)
    for failure in failures[:20]:
        print(failure, file=sys.stderr)
    counts = {name: outcomes[name] for name in ("detected", "harmless", "silent", "tracebacks", "aborts")}
    return {"figure": "flips", "flips": count, **counts, "parts": {part: dict(c) for part, c in by_part.items()}}


def pairs(rounds: int, place: Path) -> dict[str, Any]:
    """Start the same command twice at the same moment: one writes, the other is refused, and the result is whole."""
    from damage import open_result

    data = make_data(place / "corpus")
    in_child(lambda: run(data, place / "run", **RUN | {"steps": 2}).step)
    recipe, texts = recipe_file(place), str(place / "corpus" / "texts")
    made = {
        "train": lambda out: ["train", recipe, *words(data, out, **RUN | {"steps": 10})],
        "prepare": lambda out: ["data", "prepare", str(out), texts, "--vocab-size", "300", "--val-fraction", "0.2"],
        "convert": lambda out: ["convert", str(place / "run"), str(out)],
        "export": lambda out: ["export", str(place / "run"), f"{out}.gguf", "--tokens", "0"],
        "export --overwrite": lambda out: ["export", str(place / "run"), f"{out}.gguf", "--tokens", "0", "--overwrite"],
        "save-state": lambda out: [
            *("generate", str(place / "run"), "river", "--max-tokens", "3", "--save-state", f"{out}.state"),
        ],
    }
    outcomes: dict[str, Counter[str]] = {name: Counter() for name in made}
    failures: list[str] = []
    for name, command in made.items():
        for number in range(rounds):
            out = place / "pairs" / f"{name.split()[0]}-{number}-{len(name)}"
            out.parent.mkdir(exist_ok=True)
            if name == "train" and number % 2:
                out.mkdir()
                (out / ".lock").touch()
            moment = time.time() + 0.05
            both = [Child(lambda moment=moment, out=out, command=command: _at(moment, command(out))) for _ in range(2)]
            if name == "train" and number % 2:
                (out / ".lock").unlink()  # deleting the lock must not let the second process in
            ended = [child.wait() for child in both]
            codes = sorted(str(one.value) for one in ended)
            outcomes[name][" and ".join(codes)] += 1
            opened = in_child(lambda out=out, name=name: open_result(name.split()[0], out))
            tracebacks = [one.text[-500:] for one in ended if "Traceback" in one.text or one.value not in (0, 2)]
            if "0" not in codes or tracebacks or opened.value != "whole":
                failures.append(f"{name}: {codes} {tracebacks} {opened.value} {opened.text[-300:]}")
                print(failures[-1], file=sys.stderr)
            left = [path.name for path in out.parent.iterdir() if path.name.endswith(".partial")]
            if left:
                failures.append(f"{name}: left {left}")
            _progress(f"pairs: {name}", number + 1, rounds)
    return {"figure": "pairs", "rounds": rounds, "exit_codes": {k: dict(v) for k, v in outcomes.items()}} | {
        "failures": failures[:20]
    }


def _at(moment: float, command: list[str]) -> int:
    time.sleep(max(0.0, moment - time.time()))
    return crt(command)


def soak(minutes: float, place: Path) -> dict[str, Any]:
    """Load, generate, save, evaluate and export in one process, and watch its memory."""
    from damage import build, resident, use_everything

    build(place / "good")
    end, begun, rounds = time.monotonic() + 60 * minutes, time.monotonic(), 0
    sizes: list[tuple[float, int]] = []
    while time.monotonic() < end or rounds < 3:
        use_everything(place / "good", rounds)
        rounds += 1
        sizes.append((time.monotonic() - begun, resident()))
        _progress("soak: seconds", round(sizes[-1][0]), round(60 * minutes))
    # Caches of the allocator and of libraries fill up during the first fifth. Medians ignore single peaks.
    settled = [size for at, size in sizes if at > 0.2 * sizes[-1][0]] or [size for _, size in sizes]
    tenth = max(1, len(settled) // 10)
    early, late = sorted(settled[:tenth])[tenth // 2], sorted(settled[-tenth:])[tenth // 2]
    return {
        "figure": "soak",
        "minutes": minutes,
        "rounds": rounds,
        "resident_mb_after_warmup": round(early / 1e6, 1),
        "resident_mb_at_end": round(late / 1e6, 1),
        "growth_percent": round(100 * (late - early) / early, 2),
    }


def _wait(child: Child, condition: Any) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert child.is_running(), child.wait()
        assert time.monotonic() < deadline
        time.sleep(0.001)


def _progress(what: str, done: int, total: int) -> None:
    if sys.stderr.isatty() or done % max(1, total // 10) == 0:
        print(f"{what}: {done} of {total}", end="\r" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)


def main() -> None:
    """Repeat the chosen figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, metavar="N", help="kills inside saves")
    parser.add_argument("--signals", type=int, metavar="N", help="signals at random moments")
    parser.add_argument("--faults", action="store_true", help="errors of the disk at every call of a save")
    parser.add_argument("--flips", type=int, metavar="N", help="bit flips")
    parser.add_argument("--pairs", type=int, metavar="N", nargs="?", const=10, help="rounds of two processes")
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="minutes in one process")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random moments and places")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = {
        "kills": lambda place: kills(options.kills, place, options.seed),
        "signals": lambda place: signals(options.signals, place, options.seed),
        "faults": lambda place: faults(place),
        "flips": lambda place: flips(options.flips, place, options.seed),
        "pairs": lambda place: pairs(options.pairs, place),
        "soak": lambda place: soak(options.soak, place),
    }
    if not any(getattr(options, name) for name in chosen):
        parser.error("choose at least one figure")
    with tempfile.TemporaryDirectory() as place:
        # Copies of this process then need not import anything.
        run(make_data(Path(place)), Path(place) / "run", steps=2, dropout=0.1)
    for name, measure in chosen.items():
        if getattr(options, name):
            began = time.monotonic()
            with tempfile.TemporaryDirectory() as place:
                result = measure(Path(place))
            print(json.dumps({"benchmark": "reliability", **result, "seconds": round(time.monotonic() - began, 1)}))


if __name__ == "__main__":
    main()
