"""A run, its data and its exported file, and digests of all that they contain: what bit flips and long use act on."""

import contextlib
import hashlib
import importlib.util
import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from train_helpers import TINY, make_data

import contextready
from contextready.cli.main import main as crt
from contextready.data.shards import SPLITS, Data
from contextready.errors import ContextReadyError
from contextready.model.state import State
from contextready.runs.checkpoint import open_checkpoint
from contextready.runs.config import build_run
from contextready.train.trainer import train

HAS_GGML = importlib.util.find_spec("ggml") is not None and importlib.util.find_spec("gguf") is not None
PARTS = ("checkpoint", "data", *(("exported",) if HAS_GGML else ()))


def build(place: Path) -> None:
    """Train a tiny model and export it."""
    data = make_data(place / "corpus")
    data.rename(place / "data")
    settings = TINY | {"width": 32, "steps": 4, "data": str(place / "data"), "out": str(place / "run")}
    saved = train(build_run(settings)).checkpoint
    saved.rename(place / "checkpoint")
    if HAS_GGML:
        from contextready.infer.ggml.export import Export

        (place / "exported").mkdir()
        Export(place / "checkpoint", place / "exported" / "model.gguf", "q8_0", tokens=0).write()


def contents(place: Path, part: str) -> str:
    """A digest of everything that a part gives to its user, or the sentence with which it is refused."""
    try:
        return {"checkpoint": _checkpoint, "data": _data, "exported": _exported}[part](place / part)
    except ContextReadyError as error:
        return f"refused: {error}"


def _checkpoint(folder: Path) -> str:
    from contextready.data.tokenizer import Tokenizer

    opened = open_checkpoint(folder)
    opened.model()
    tensors = {f"{kind}/{k}": t for kind in ("model", "optimizer", "rng") for k, t in opened.tensors(kind).items()}
    settings = json.dumps([opened.config, asdict(opened.progress)], sort_keys=True)
    weights = {name: tensors[name].numpy() for name in sorted(tensors)}
    return _digest(settings, Tokenizer.load(folder).sha256, weights)


def _data(folder: Path) -> str:
    opened = Data(folder)
    tokenizer = opened.tokenizer()
    assert tokenizer is not None
    tokens = {split: opened.tokens(split) for split in SPLITS}
    arrays = {split: held.read(0, len(held)) for split, held in tokens.items()}
    settings = json.dumps([opened.vocab_size, opened.end_id, opened.identity, tokenizer.end])
    return _digest(settings, tokenizer.sha256, arrays)


def _exported(folder: Path) -> str:
    from contextready.infer.ggml.file import read_gguf

    opened = read_gguf(folder / "model.gguf")
    tokenizer = opened.tokenizer()
    arrays = {name: opened.weights[name].data for name in sorted(opened.weights)}
    settings = json.dumps([asdict(opened.config), opened.trained_length, tokenizer.end])
    return _digest(settings, tokenizer.sha256, arrays)


def _digest(settings: str, tokenizer: str, arrays: dict[str, Any]) -> str:
    digest = hashlib.sha256(f"{settings}\n{tokenizer}\n".encode())
    for name, array in arrays.items():
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def open_result(verb: str, out: Path) -> str:
    """Open what a command wrote; "whole" if it works."""
    if verb == "train":
        open_checkpoint(out).model()
    elif verb == "prepare":
        _data(out)
    elif verb == "save-state":
        State.load(f"{out}.state")
    else:
        path = out if verb == "convert" else out.with_name(f"{out.name}.gguf")
        contextready.load(path, threads=1).generate("river", max_tokens=2)
    return "whole"


def use_everything(place: Path, number: int) -> None:
    """Load, generate, save, evaluate and export once."""
    model = contextready.load(place / "checkpoint", threads=1)
    model.generate("river stone", max_tokens=8, seed=number)
    model.score("river stone light")
    open_checkpoint(place / "checkpoint").model()
    Data(place / "data").tokenizer()
    said = io.StringIO()
    checkpoint, state, data = (str(place / name) for name in ("checkpoint", "some.state", "data"))
    generate = ["generate", checkpoint, "river", "--max-tokens", "4"]
    commands = [
        [*generate, "--save-state", state],
        [*generate, "--state", state],
        ["eval", checkpoint, "--data", data, "--tokens", "256", "--passes", "1,2"],
    ]
    if HAS_GGML:
        exported = str(place / "exported" / "model.gguf")
        commands.append(["export", checkpoint, exported, "--type", "q8_0", "--tokens", "0", "--overwrite"])
        commands.append(["generate", exported, "river", "--max-tokens", "4"])
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        for command in commands:
            if crt(command) != 0:
                raise RuntimeError(said.getvalue())


def resident() -> int:
    """The resident memory of this process in bytes."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS"))
