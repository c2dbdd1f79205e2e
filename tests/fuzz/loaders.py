"""Every way in which the package opens a file, as functions that run in a folder with copies of corpus files."""

import contextlib
import io
import os
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from fuzz.corpus import MARKER, SETTINGS

from contextready.errors import ContextReadyError

REFUSED = (0, 1, 2, 130)
"""Exit codes with which a command may end."""


class EndedBadlyError(Exception):
    """A command that ended in another way than it may."""


def _attempt(*actions: Callable[[], Any]) -> str:
    """Run every action; refusing is allowed, and every other exception escapes."""
    outcome = "opened"
    for action in actions:
        try:
            action()
        except ContextReadyError as error:
            outcome = "refused" if "\n" not in str(error).strip() else "refused in several lines"
    return outcome


def checkpoint(words: list[str], run: str = "run") -> str:
    from contextready.runs.checkpoint import open_checkpoint

    def use(best: bool) -> None:
        opened = open_checkpoint(Path(run), best)
        opened.model()
        for name in ("optimizer", "rng"):
            opened.tensors(name)

    return _attempt(lambda: use(False), lambda: use(True), lambda: open_checkpoint(Path(run), verify=False).vocab_size)


def resume(words: list[str]) -> str:
    from contextready.runs.config import build_run
    from contextready.train.trainer import train

    return _attempt(lambda: train(build_run(SETTINGS | {"out": "run", "steps": 5})))


def train_on(words: list[str]) -> str:
    from contextready.runs.config import build_run
    from contextready.train.trainer import train

    return _attempt(lambda: train(build_run(SETTINGS | {"out": "new", "steps": 1})))


def data(words: list[str]) -> str:
    from contextready.data.shards import Data

    def use(split: str) -> None:
        opened = Data(Path("data"), verify=[split])
        tokens = opened.tokens(split)
        opened.bytes_per_token(split)
        _ = opened.identity
        tokenizer = opened.tokenizer()
        ids = tokens.read(0, min(len(tokens), 700))
        if tokenizer is not None:
            tokenizer.decode(ids[:20].tolist())

    return _attempt(lambda: use("train"), lambda: use("val"))


def tokenizer(words: list[str], folder: str = "tokenizer") -> str:
    from contextready.data.tokenizer import Tokenizer

    def use() -> None:
        opened = Tokenizer.load(Path(folder))
        ids = opened.encode_batch(["river stone", "naïve <|endoftext|> \N{SNOWMAN}"])
        opened.decode(ids[0])
        _ = opened.sha256

    return _attempt(use)


def gguf(words: list[str]) -> str:
    from contextlib import closing

    from contextready.infer.ggml.engine import GgmlEngine
    from contextready.infer.ggml.file import read_gguf

    def use(path: Path) -> None:
        opened = read_gguf(path)
        with closing(GgmlEngine(path, rows=1, capacity=8, threads=1)) as engine:
            engine.step([0])
        opened.tokenizer()

    return _attempt(*(partial(use, path) for path in sorted(Path("exported").glob("*.gguf"))))


def state(words: list[str]) -> str:
    from contextready.infer.session import Session
    from contextready.infer.torch_engine import torch_engine
    from contextready.model.state import State
    from contextready.runs.checkpoint import open_checkpoint

    model = open_checkpoint(Path("run")).model()

    def use(state: State) -> None:
        engine = torch_engine(model, "eager", rows=1, capacity=64)
        engine.load(0, state)
        engine.step([1])
        state.rollback(state.position)

    return _attempt(
        lambda: use(State.load("states/plain.state")),
        lambda: use(Session.load(Path("states/session.state")).state),
        lambda: use(Session.load(Path("states/session.state")).rollback(1).state),
    )


def load(words: list[str]) -> str:
    import contextready

    return _attempt(lambda: contextready.load("run", threads=1).generate("river", max_tokens=2))


def hugging_face(words: list[str], folder: str) -> str:
    import contextready
    from contextready.hf.folder import open_folder

    return _attempt(
        lambda: open_folder(Path(folder)).model(),
        lambda: contextready.load(folder, threads=1).generate("river", max_tokens=2),
    )


def metrics(words: list[str]) -> str:
    from contextready.evaluate.curves import AXES, crossovers, read_curve
    from contextready.runs.metrics import read_metrics

    return _attempt(
        lambda: read_metrics(Path("run")),
        *(lambda axis=axis: crossovers([read_curve(Path("run"), axis)] * 2) for axis in AXES),
    )


def recipe(words: list[str]) -> str:
    from contextready.runs.recipes import check_inputs, load_recipe, resolve

    name = "recipe/recipe.yaml"
    return _attempt(
        lambda: load_recipe(name),
        lambda: check_inputs(name, [], resolve(name, [])),
        lambda: resolve(name, ["width=16", "correction=none"]),
    )


def prepare(words: list[str]) -> str:
    from contextready.data.prepare import Preparation, prepare

    return _attempt(
        *(
            lambda path=path: prepare(Path(f"out-{path.name}"), Preparation([str(path)], [], 0.3, 270))
            for path in sorted(Path("sources").iterdir())
        )
    )


def prepare_tokens(words: list[str]) -> str:
    from contextready.data.prepare import Preparation, prepare

    return _attempt(
        *(
            lambda name=name: prepare(Path(f"out-{name}"), Preparation([f"tokens/{name}"], [], 0.3, 300, end_id=0))
            for name in ("nano.bin", "megatron.bin")
        )
    )


def command(words: list[str]) -> str:
    """Run `crt` as from a shell: everything that is printed is looked at, and standard input says yes."""
    from contextready.cli.main import main

    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace")
    before = sys.stdin
    sys.stdin = io.StringIO("y\n" * 5)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = main(words)
            except SystemExit as ending:
                code = ending.code if isinstance(ending.code, int) else 1
    finally:
        sys.stdin = before
    err.flush()
    said = err.buffer.getvalue().decode()  # type: ignore[attr-defined]
    if code not in REFUSED:
        raise EndedBadlyError(f"exit code {code}: {said[-300:]}")
    if "Traceback" in said:
        raise EndedBadlyError(f"a traceback was printed: {said[-300:]}")
    return "opened" if code == 0 else "refused"


def misbehave(how: str) -> str:
    """Do what a case must never do, so that the fuzzer can be tested itself."""
    if how == "abort":
        os.abort()
    elif how == "hang":
        time.sleep(60)
    elif how == "memory":
        len(b"x" * (11 << 27))
    elif how == "execution":
        Path(os.environ[MARKER]).touch()
    elif how == "connection":
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", 9))
    else:
        raise KeyError(how)
    return "opened"


LOADERS: dict[str, Callable[[list[str]], str]] = {
    "misbehave": lambda words: misbehave(words[0]),
    "checkpoint": checkpoint,
    "checkpoint-tuned": lambda words: checkpoint(words, "tuned"),
    "checkpoint-sharded": lambda words: checkpoint(words, "sharded"),
    "resume": resume,
    "train": train_on,
    "data": data,
    "tokenizer": tokenizer,
    "gguf": gguf,
    "state": state,
    "load": load,
    "hf-base": lambda words: hugging_face(words, "base"),
    "hf-ready": lambda words: hugging_face(words, "ready"),
    "hf-native": lambda words: hugging_face(words, "native"),
    "metrics": metrics,
    "recipe": recipe,
    "prepare": prepare,
    "prepare-tokens": prepare_tokens,
    "command": command,
}
