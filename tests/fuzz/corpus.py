"""The files that the fuzzer damages: tiny examples of every format, written by the package itself.

Everything in the folder has relative paths and fixed times, so the same code always writes the same bytes, and a case
can be repeated from its number.
"""

import contextlib
import gzip
import hashlib
import importlib.util
import io
import json
import shutil
import struct
from pathlib import Path

import numpy as np
from train_helpers import TINY, WORDS, write_corpus

SETTINGS = TINY | {"width": 32, "steps": 4, "eval_every": 2, "save_every": 2, "bias": True, "window": 8, "data": "data"}
HAS_GGML = importlib.util.find_spec("ggml") is not None and importlib.util.find_spec("gguf") is not None
HAS_ZSTD = importlib.util.find_spec("zstandard") is not None
HAS_PARQUET = importlib.util.find_spec("pyarrow") is not None
MARKER = "CONTEXTREADY_FUZZ_MARKER"
"""Environment variable with the file that every piece of hostile code in the corpus would create."""
CODE = f"""
import os
if os.environ.get({MARKER!r}):
    open(os.environ[{MARKER!r}], "w").close()
from transformers import LlamaConfig as EvilConfig, LlamaForCausalLM as EvilModel
from transformers import PreTrainedTokenizerFast as EvilTokenizer
def generate(*arguments, **options):
    raise RuntimeError("this code must not run")
"""
PICKLE = b"cposix\nsystem\n(S'touch \"$" + MARKER.encode() + b"\"'\ntR."
SECONDS = 0.5
"""Stands for every measured time."""


def build_corpus(folder: Path) -> Path:
    """Write the corpus to a new folder and return it."""
    folder.mkdir(parents=True)
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        _write_texts()
        _write_runs()
        _write_hugging_face()
        _write_exports()
        _write_evil()
    return folder


def _write_texts() -> None:
    from contextready.data.prepare import Preparation, prepare

    write_corpus(Path("texts"), documents=24)
    prepare(Path("data"), Preparation(["texts"], [], 0.2, 300, shard_tokens=300))
    Path("tokenizer").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(Path("data") / name, Path("tokenizer") / name)
    lines = "".join(
        json.dumps({"text": f"{word} " * 9, "id": i, "meta": {"source": [word]}}) + "\n" for i, word in enumerate(WORDS)
    )
    sources = Path("sources")
    sources.mkdir()
    (sources / "text.txt").write_text("\n\n".join(" ".join(WORDS) for _ in range(8)))
    (sources / "lines.jsonl").write_text(lines)
    (sources / "lines.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
    if HAS_ZSTD:
        import zstandard

        (sources / "lines.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(lines.encode()))
    if HAS_PARQUET:
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.table({"text": [f"{word} " * 9 for word in WORDS]}), sources / "table.parquet")
    Path("tokens").mkdir()
    ids, lengths = np.arange(120, dtype="<u2") % 290, np.full(12, 10, "<i4")
    ids[9::10] = 0
    ids.tofile("tokens/nano.bin")
    ids.astype("<i4").tofile("tokens/megatron.bin")
    offsets, bounds = np.arange(12, dtype="<i8") * 40, np.arange(13, dtype="<i8")
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, len(lengths), len(bounds))
    Path("tokens/megatron.idx").write_bytes(head + lengths.tobytes() + offsets.tobytes() + bounds.tobytes())
    Path("prompts.txt").write_text("river stone\nlight under\n")


def _write_runs() -> None:
    from contextready.cli.main import main
    from contextready.infer.torch_engine import torch_engine
    from contextready.runs.checkpoint import open_checkpoint
    from contextready.runs.config import build_run
    from contextready.train.trainer import train

    train(build_run(SETTINGS | {"out": "run"}))
    train(build_run(SETTINGS | {"out": "sharded", "parallel": "fsdp", "steps": 2}))
    for out in ("run", "sharded"):
        _fix_times(Path(out))
    Path("recipe").mkdir()
    text = "".join(f"{key}: {json.dumps(value)}\n" for key, value in (SETTINGS | {"out": "run", "steps": 6}).items())
    Path("recipe/recipe.yaml").write_text(f"# A tiny run.\n{text}")
    Path("states").mkdir()
    generate = ["generate", "run", "river stone light", "--max-tokens", "4", "--history", "2"]
    assert main([*generate, "--save-state", "states/session.state"]) == 0
    engine = torch_engine(open_checkpoint(Path("run")).model(), "eager", rows=1, capacity=16)
    engine.step([1])
    engine.state(0).save("states/plain.state")


def _write_hugging_face() -> None:
    if importlib.util.find_spec("transformers") is None:
        return
    from hf_helpers import KNOWN, save, tiny_lm

    from contextready.cli.main import main
    from contextready.data.prepare import Preparation, prepare
    from contextready.hf.load import load_tokenizer
    from contextready.runs.config import build_run
    from contextready.train.trainer import train

    save(Path("base"), tiny_lm("llama", vocab_size=KNOWN).float(), load_tokenizer("tokenizer"))
    assert main(["convert", "base", "ready"]) == 0
    assert main(["convert", "run", "native"]) == 0
    of_model = ("vocab_size", "width", "layers", "heads", "bias", "window", "correction")
    settings = {key: value for key, value in SETTINGS.items() if key not in of_model} | {"data": "other-data"}
    prepare(Path("other-data"), Preparation(["texts"], [], 0.2, tokenizer="ready"))
    train(build_run(settings | {"out": "tuned", "pretrained": "ready", "steps": 2}))
    _fix_times(Path("tuned"))


def _write_exports() -> None:
    if not HAS_GGML:
        return
    from contextready.infer.ggml.export import Export

    Path("exported").mkdir()
    for kind in ("f32", "q8_0"):
        Export(Path("run"), Path(f"exported/{kind}.gguf"), kind, tokens=0).write()
    if importlib.util.find_spec("transformers") is not None:
        Export(Path("ready"), Path("exported/llama.gguf"), "f32", tokens=0).write()


def _write_evil() -> None:
    """Write code that must never run; edits copy these files into model folders."""
    evil = Path("evil")
    evil.mkdir()
    (evil / "evil.py").write_text(CODE)
    (evil / "pytorch_model.bin").write_bytes(PICKLE)


def _fix_times(run: Path) -> None:
    """Replace the measured times in a run's files, which would differ every time."""
    for path in run.glob("checkpoints/*/trainer.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"seconds": SECONDS}, indent=1))
        renew_manifest(path.parent)
    metrics = run / "metrics.jsonl"
    records = [json.loads(line) | {"seconds": SECONDS} for line in metrics.read_text().splitlines()]
    metrics.write_text("".join(json.dumps(record) + "\n" for record in records))


def renew_manifest(folder: Path) -> None:
    """Write the present sizes and checksums into a manifest, if it still has the shape of one."""
    path = folder / "manifest.json"
    if not _is_small_file(path):
        return
    try:
        manifest = json.loads(path.read_text())
        for name, described in manifest["files"].items():
            file = folder / name
            if _is_small_file(file):
                content = file.read_bytes()
                described |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        path.write_text(json.dumps(manifest, indent=1))
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError):
        return  # it is no manifest any more


def _is_small_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 26
