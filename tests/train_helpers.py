"""A tiny corpus, tiny runs, and `crt` in its own process."""

import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

from contextready.data.prepare import Preparation, prepare
from contextready.files import describe_file
from contextready.runs.config import build_run
from contextready.runs.metrics import read_metrics
from contextready.train.trainer import Interrupts, Trainer, train

WORDS = ("river", "stone", "light", "under", "small", "green", "walks", "seven", "often", "names", "holds", "water")

TINY = {
    "vocab_size": 300,
    "width": 16,
    "layers": 1,
    "heads": 2,
    "block_size": 16,
    "batch_size": 4,
    "steps": 12,
    "passes": "2..3",
    "gradient": "unroll",
    "warmup": 4,
    "lr": 1e-2,
    "eval_every": 4,
    "eval_tokens": 256,
    "save_every": 4,
    "keep": 2,
    "log_every": 2,
    "precision": "fp32",
    "device": "cpu",
    "correction": "add",
    "correction_init": "random",
    "correction_scale": 1.0,
}


def write_corpus(folder, seed=0, documents=120):
    """Text files with a little structure, so that there is something to learn."""
    folder.mkdir(parents=True)
    chooser = random.Random(seed)
    for number in range(documents):
        words = [WORDS[chooser.randrange(len(WORDS))] for _ in range(60)]
        (folder / f"{number:03d}.txt").write_text(" ".join(words) + ".")
    return folder


def make_data(folder, seed=0, vocab_size=300, tokenizer=None):
    """Prepare the tiny corpus; the same seed gives the same files."""
    if not (folder / "data").exists():
        texts = write_corpus(folder / "texts", seed)
        size = None if tokenizer else vocab_size
        prepare(folder / "data", Preparation([str(texts)], [], 0.2, size, tokenizer=tokenizer))
    return folder / "data"


def tiny(data, out, **changes):
    """The checked settings of a tiny run."""
    settings = TINY | {"data": str(data), "out": str(out)} | changes
    if settings["correction"] is None:
        settings = {key: value for key, value in settings.items() if key != "passes"}
    return build_run(settings)


def run(data, out, **changes):
    return train(tiny(data, out, **changes))


def trainer(data, out, **changes):
    """A trainer in this process, without its lock and signals."""
    out.mkdir(parents=True, exist_ok=True)
    return Trainer(tiny(data, out, **changes))


def no_interrupts():
    return Interrupts()


def words(data, out, **changes):
    """The same tiny run as key=value words, for use with a recipe file."""
    settings = TINY | {"data": data, "out": out} | changes
    if settings["correction"] is None or settings.get("gradient") == "bptt":
        settings = {key: value for key, value in settings.items() if key != "passes"}
    return [f"{key}={value}" for key, value in settings.items()]


def recipe_file(folder):
    """A recipe that sets nothing that matters."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "mine.yaml"
    path.write_text("seed: 0\n")
    return str(path)


def start(*arguments, **options):
    """Start `crt` in its own process, with one thread."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "400", "NO_COLOR": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "contextready", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        **options,
    )


def finish(*arguments):
    """Run `crt` and return its exit code, output and errors."""
    process = start(*arguments)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def metrics(run_folder):
    """All records without their times, as text, so that NaN equals itself."""
    records = [{key: value for key, value in r.items() if key != "seconds"} for r in read_metrics(Path(run_folder))]
    return [json.dumps(record) for record in records]


def kept_steps(run_folder):
    return sorted(int(path.name[5:]) for path in (Path(run_folder) / "checkpoints").iterdir())


def sums(checkpoint):
    """SHA-256 of the two files that determine the state of the training."""
    names = ("model.safetensors", "optimizer.safetensors")
    return [hashlib.sha256((Path(checkpoint) / name).read_bytes()).hexdigest() for name in names]


def describe_again(checkpoint, name):
    """Update the manifest after a file was edited on purpose."""
    path = Path(checkpoint) / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"][name] = describe_file(Path(checkpoint) / name)
    path.write_text(json.dumps(manifest))


def change_weights(checkpoint, change):
    """Edit the weights of a checkpoint on disk; `change` gets the tensors by name."""
    from safetensors.torch import load_file, save_file

    file = Path(checkpoint) / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file)
    describe_again(checkpoint, "model.safetensors")
