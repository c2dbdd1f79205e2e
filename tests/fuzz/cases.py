"""Cases from numbers: which files of the corpus are damaged, how, and which loader opens them."""

import json
import random
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from fuzz.commands import random_command
from fuzz.edits import Edit, read_structure

Case = dict[str, Any]
"""A loader, the parts of the corpus it needs, edits of their files, whether manifests are renewed, and words."""

NUMBERS = [0, 1, -1, 2, 3, 7, 255, 1 << 16, 1 << 31, (1 << 31) - 1, 1 << 32, 1 << 53, 1 << 62, 1 << 63, 1 << 64, 10**10]
NUMBERS += [10**19, -(1 << 63), 0.5, -0.0, 1e-300, 1e308, 1.5]
RAW = ["NaN", "Infinity", "-Infinity", "1e400", "1" * 400, "1" * 5000, "-", "tru", '"\\ud800"', '"\\u0000"', ""]
RAW_YAML = ["!!python/object/apply:os.system ['true']", "*missing", "&a [*a]", "2020-99-99", "0o9", ".nan", ".inf"]
RAW_YAML += ["1:60:99", "!!binary 'x'", "!!int x", "!!timestamp x", "|\n  a", "{", "- a", "\t", "? x", "1_000", "0x_"]
RAW_YAML += ["&a [1,1,1,1,1,1,1,1,1]", "<<: 3", "!!set {a}", "!!omap [a]", "%YAML 9.9", "'\\x00'", "~", "no", "''"]
TEXTS = [
    "",
    "x",
    "12",
    "none",
    "true",
    "\x00",
    "../outside",
    "..",
    ".",
    "a/b",
    "é\U0001f600",
    "a" * 1000,
    "%s%n",
    "NaN",
]
TEXTS += ["<|endoftext|>", "add", "f4", "|u1", "?", "<f2", "F32", "BOOL", "F8_E4M3", "U64", "model.safetensors"]
OTHERS = [None, True, False, [], {}, [[]], {"a": {}}, [None], [0] * 5000, {"": 0}, [{}]]
KINDS = ["missing", "empty", "folder", "pipe", "zero", "loop", "sparse"]
CODE_KEYS: dict[str, list[tuple[str, Any]]] = {
    "config.json": [
        ("auto_map", {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel"}),
        ("model_type", "evil"),
        ("custom_pipelines", {"text-generation": {"impl": "evil.EvilModel", "pt": ["AutoModelForCausalLM"]}}),
        ("quantization_config", {"quant_method": "bitsandbytes", "load_in_8bit": True}),
        ("architectures", ["EvilModel"]),
        ("_name_or_path", "someone/something"),
        ("attn_implementation", "someone/kernel"),
        ("_attn_implementation", "kernels-community/flash-attn"),
        ("trust_remote_code", True),
    ],
    "tokenizer_config.json": [
        ("auto_map", {"AutoTokenizer": ["evil.EvilTokenizer", "evil.EvilTokenizer"]}),
        ("tokenizer_class", "EvilTokenizer"),
        ("chat_template", "{{ cycler.__init__.__globals__.os.system('touch \"$CONTEXTREADY_FUZZ_MARKER\"') }}"),
        ("tokenizer_file", "someone/something"),
        ("trust_remote_code", True),
    ],
    "generation_config.json": [("custom_generate", "evil"), ("trust_remote_code", True)],
}


@dataclass(frozen=True)
class Target:
    """A part of the corpus, and what opens it."""

    needs: tuple[str, ...]
    """Folders of the corpus that are copied; files of the first are damaged."""
    loaders: tuple[str, ...]
    commands: tuple[str, ...] = ()
    weight: int = 4


GENERATE = "river --max-tokens 2"
TARGETS = {
    "run": Target(
        ("run", "data"),
        ("checkpoint", "resume", "load", "metrics"),
        (
            f"generate run {GENERATE}",
            "eval run --tokens 64 --passes 1,2",
            "eval run --best --tokens 64 --passes 1",
            "export run out.gguf --tokens 0",
            "convert run out",
            "plot run --out out.png",
            "data prepare out data/../texts --tokenizer run/checkpoints/step-00000004",
        ),
        12,
    ),
    "tuned": Target(
        ("tuned", "ready", "other-data"),
        ("checkpoint-tuned",),
        (f"generate tuned {GENERATE}", "convert tuned out", "eval tuned --tokens 32 --passes 1"),
    ),
    "sharded": Target(("sharded", "data"), ("checkpoint-sharded",), (f"generate sharded {GENERATE}",), 1),
    "data": Target(
        ("data",),
        ("data", "train"),
        ("data show data", "data show data --split val", "train recipe/recipe.yaml out=new steps=1"),
        8,
    ),
    "tokenizer": Target(("tokenizer",), ("tokenizer",), ("data prepare out texts --tokenizer tokenizer",), 5),
    "base": Target(("base",), ("hf-base",), (f"generate base {GENERATE}", "convert base out"), 3),
    "ready": Target(
        ("ready", "other-data"),
        ("hf-ready",),
        (f"generate ready {GENERATE}", "convert ready out", "eval ready --data other-data --tokens 32 --passes 1"),
        5,
    ),
    "native": Target(("native",), ("hf-native",), (f"generate native {GENERATE}", "convert native out"), 3),
    "exported": Target(
        ("exported",),
        ("gguf",),
        (*(f"generate exported/{name}.gguf {GENERATE}" for name in ("f32", "q8_0", "llama")), "info exported/f32.gguf"),
        10,
    ),
    "states": Target(("states", "run"), ("state",), (f"generate run {GENERATE} --state states/session.state",), 6),
    "sources": Target(
        ("sources",),
        ("prepare",),
        tuple(f"data prepare out sources/{name} --vocab-size 300" for name in ("lines.jsonl", "lines.jsonl.gz")),
        5,
    ),
    "tokens": Target(
        ("tokens",),
        ("prepare-tokens",),
        ("data prepare out tokens/megatron.bin --end-id 0 --vocab-size 300 --val-fraction 0.3",),
        4,
    ),
    "recipe": Target(("recipe", "data"), ("recipe",), ("train recipe/recipe.yaml --dry-run",), 5),
}
LINES = 20
"""Weight of cases that only consist of a random command line."""


def make_case(corpus: Path, seed: int) -> Case:
    """The case with this number."""
    chance = random.Random(f"contextready {seed}")
    available = {name: target for name, target in TARGETS.items() if (corpus / name).is_dir()}
    names = [*available, "line"]
    weights = [*(target.weight for target in available.values()), LINES]
    name = chance.choices(names, weights)[0]
    if name == "line":
        words = random_command(chance)
        return {"loader": "command", "needs": needed(words), "edits": [], "renew": False, "words": words}
    target = available[name]
    edits = [edit for _ in range(chance.choice((1, 1, 1, 2, 3))) for edit in _edits(chance, corpus, name)]
    case = {"needs": list(target.needs), "edits": edits, "renew": chance.random() < 0.8, "words": []}
    if chance.random() < 0.3 and target.commands:
        words = chance.choice(target.commands).split()
        return case | {"loader": "command", "needs": sorted({*target.needs, *needed(words)}), "words": words}
    return case | {"loader": chance.choice(target.loaders)}


def needed(words: list[str]) -> list[str]:
    """The folders of the corpus that a command line names."""
    folders = {word.split("=")[-1].split("/")[0] for word in words} & {*TARGETS, "texts", "other-data", "evil"}
    if "recipe" in folders or "run" in folders or "sharded" in folders:
        folders.add("data")
    if "tuned" in folders:
        folders |= {"ready", "other-data"}
    if any("/../texts" in word for word in words):
        folders.add("texts")
    return sorted(folders)


@cache
def _files(corpus: Path, folder: str) -> list[str]:
    skipped = ("README.md", ".lock")
    found = sorted(path.relative_to(corpus).as_posix() for path in (corpus / folder).rglob("*") if path.is_file())
    return [name for name in found if not name.endswith((".py", *skipped))]


def _edits(chance: random.Random, corpus: Path, folder: str) -> list[Edit]:
    files = _files(corpus, folder)
    # Small files decide more than the large ones, and the newest checkpoint more than the one before it.
    weights = [
        0.5 if "00000002" in name and folder == "run" else 3.0 if name.endswith("manifest.json") else 1.0
        for name in files
    ]
    file = chance.choices(files, weights)[0]
    name = file.rpartition("/")[2]
    if folder in ("base", "ready", "native", "tokenizer", "tuned") and chance.random() < 0.15:
        return _hostile_code(chance, folder, files)
    if chance.random() < 0.04:
        return [{"file": file, "op": "kind", "kind": chance.choice(KINDS)}]
    inner, format = _format(name)
    if format == "gguf" and chance.random() < 0.15:
        return [{"file": file, "op": "append", "format": format, **_gguf_extra(chance, corpus / file)}]
    if name == "tokenizer.json" and chance.random() < 0.2:
        return [{"file": file, "op": "set", "format": "json", **_token_id(chance, corpus / file)}]
    if format is not None and chance.random() < (0.5 if inner else 0.75):
        edit = _structural(chance, corpus / file, inner, format)
        if edit is not None:
            return [{"file": file, **({"inner": inner} if inner else {}), **edit}]
    if name.endswith((".json", ".yaml")) and chance.random() < 0.1:
        return [{"file": file, "op": "text", **_odd_text(chance)}]
    return [{"file": file, **_of_bytes(chance, (corpus / file).stat().st_size)}]


def _format(name: str) -> tuple[str | None, str | None]:
    inner = next((ending for ending in ("gz", "zst") if name.endswith(f".{ending}")), None)
    stem = name.removesuffix(f".{inner}") if inner else name
    formats = {"json": "json", "jsonl": "jsonl", "yaml": "yaml", "gguf": "gguf"}
    formats |= {"safetensors": "safetensors", "state": "safetensors"}
    return inner, formats.get(stem.rpartition(".")[2])


@cache
def _structure(path: Path, inner: str | None, format: str) -> Any:
    from fuzz.edits import decompress

    content = path.read_bytes()
    return read_structure(decompress(content, inner) if inner else content, format)


def _structural(chance: random.Random, path: Path, inner: str | None, format: str) -> Edit | None:
    structure = _structure(path, inner, format)
    place, value, parent = _walk(chance, structure)
    if not place:
        return None
    edit: Edit = {"format": format, "path": place}
    roll = chance.random()
    if roll < 0.15:
        return edit | {"op": "remove"}
    if roll < 0.2 and isinstance(parent, dict):
        return edit | {"op": "rename", "name": chance.choice([*TEXTS, *(str(key) for key in parent)])}
    if roll < 0.24 and isinstance(parent, list):
        return edit | {"op": "repeat"}
    if format == "gguf":
        return edit | {"op": "set", "value": _gguf_value(chance, place, value, structure)}
    if roll < 0.28 and isinstance(parent, dict) and format != "yaml":
        text = (
            f"{json.dumps(value)[:5000]}, {json.dumps(place[-1])}: {json.dumps(_new_value(chance, value, structure))}"
        )
        return edit | {"op": "set", "raw": text}
    if roll < 0.4:
        return edit | {"op": "set", "raw": chance.choice(RAW_YAML if format == "yaml" else RAW)}
    if roll < 0.44:
        depth = chance.choice((20, 100, 900, 5000, 100_000))
        return edit | {"op": "set", "depth": depth, "bracket": chance.choice("[{")}
    return edit | {"op": "set", "value": _new_value(chance, value, structure)}


def _walk(chance: random.Random, structure: Any) -> tuple[list[Any], Any, Any]:
    """A random place in a structure: its path, its value and what holds it. Deep places are as likely as others."""
    place: list[Any] = []
    value, parent = structure, None
    while True:
        inside = value
        if isinstance(value, str) and value[:1] in "{[" and len(value) > 1:
            try:
                inside = json.loads(value)
            except ValueError:
                return place, value, parent
        if not isinstance(inside, dict | list) or not inside or (place and chance.random() < 0.2):
            return place, value, parent
        key = chance.choice(list(inside)) if isinstance(inside, dict) else chance.randrange(len(inside))
        place.append(key)
        value, parent = inside[key], inside


def _new_value(chance: random.Random, value: Any, structure: Any) -> Any:
    """Another value: of the same type as often as of another one, or one from elsewhere in the file."""
    roll = chance.random()
    if roll < 0.2:
        return _walk(chance, structure)[1]
    if roll < 0.6 and isinstance(value, int | float) and not isinstance(value, bool):
        near = [value + 1, value - 1, -value, 2 * value, value / 2, float(value)]
        return chance.choice([*NUMBERS, *near])
    if roll < 0.6 and isinstance(value, str):
        return chance.choice([*TEXTS, value + "x", value[:-1], value.upper()])
    if roll < 0.6 and isinstance(value, list) and value:
        return chance.choice([value[:-1], value * 2, value[::-1], value[0], [value]])
    return chance.choice([*NUMBERS, *TEXTS, *OTHERS])


def _gguf_value(chance: random.Random, place: list[Any], value: Any, structure: Any) -> Any:
    key = place[-1]
    if key == "type":
        return chance.choice([*range(14), 30, 39, 255, 1 << 31])
    if key == "dims":
        sizes = [0, 1, 2, 5, 32, 1 << 31, 1 << 62, 1 << 63, (1 << 64) - 1]
        return [chance.choice(sizes) for _ in range(chance.choice((0, 1, 2, 3, 4, 5, 6, 8)))]
    whole = [number for number in NUMBERS if isinstance(number, int)]
    if "count" in str(key):
        return chance.choice([*whole, 5, 6, 10**12])
    if isinstance(value, int) and not isinstance(value, bool):
        return chance.choice([*whole, value + 1, value - 1, 2 * value])
    return _new_value(chance, value, structure["fields"])


def _gguf_extra(chance: random.Random, path: Path) -> Edit:
    """A tensor or a field that the configuration does not name, or that claims to be something else."""
    structure = _structure(path, None, "gguf")
    if chance.random() < 0.7:
        extra = dict(chance.choice(structure["tensors"]))
        extra["name"] = chance.choice([extra["name"], "extra.weight", "layers.0.attn.qkv.bias", "a" * 70, ""])
        extra["dims"] = [1] * chance.choice((0, 1, 5, 6)) if chance.random() < 0.7 else extra["dims"]
        return {"path": ["tensors"], "value": extra}
    extra = {"key": "extra", "type": 9, "inner": chance.choice((0, 4, 8, 9, 12)), "count": chance.choice((3, 10**12))}
    return {"path": ["fields"], "value": extra | {"value": chance.choice(([], [1, 2, 3]))}}


def _token_id(chance: random.Random, path: Path) -> Edit:
    structure = _structure(path, None, "json")
    vocab = ["model", "vocab", chance.choice(list(structure["model"]["vocab"]))]
    place = chance.choice((vocab, ["added_tokens", 0, "id"]))
    return {"path": place, "value": chance.choice([number for number in NUMBERS if isinstance(number, int)])}


def _bomb() -> str:
    """YAML whose aliases describe millions of values."""
    levels = "".join(f"{after}: &{after} [{','.join([f'*{before}'] * 8)}]\n" for before, after in pairwise("abcdefg"))
    return f"a: &a [1, 1]\n{levels}width: *g\n"


def _odd_text(chance: random.Random) -> dict[str, Any]:
    return chance.choice(
        [
            {"before": "", "part": "[", "times": 100_000, "after": ""},
            {"before": "", "part": '{"a":', "times": 100_000, "after": "0" + "}" * 100_000},
            {"before": "", "part": "[", "times": 3000, "after": "]" * 3000},
            {"before": '{"a": ', "part": "1", "times": 100_000, "after": "}"},
            {"before": "\ufeff", "part": "{}", "times": 1, "after": ""},
            {"before": "a: &a [x]\n", "part": "b: *a\n", "times": 1000, "after": ""},
            {"before": _bomb(), "part": "", "times": 0, "after": ""},
            {"before": "", "part": " ", "times": 3_000_000, "after": "{}"},
            {"before": "null", "part": "", "times": 0, "after": ""},
            {"before": "3", "part": "", "times": 0, "after": ""},
            {"before": '"text"', "part": "", "times": 0, "after": ""},
            {"before": "[]", "part": "", "times": 0, "after": ""},
            {"before": "{}", "part": "", "times": 0, "after": ""},
        ]
    )


def _of_bytes(chance: random.Random, size: int) -> Edit:
    roll, at = chance.random(), chance.randrange(max(1, size))
    if chance.random() < 0.5:
        at = chance.randrange(max(1, min(size, 160)))  # headers are at the start
    if roll < 0.3:
        return {"op": "bytes", "offset": at, "delete": 1, "insert": f"{chance.randrange(256):02x}"}
    if roll < 0.5:
        width = chance.choice((1, 2, 4, 8))
        number = chance.choice([n for n in NUMBERS if isinstance(n, int)]) % (1 << 8 * width)
        aligned = at - at % width if chance.random() < 0.5 else at
        return {"op": "bytes", "offset": aligned, "delete": width, "insert": number.to_bytes(width, "little").hex()}
    if roll < 0.65:
        return {"op": "bytes", "offset": at, "delete": size, "insert": ""}
    if roll < 0.75:
        where, count = chance.choice((at, size)), chance.choice((1, 2, 8, 500))
        return {"op": "bytes", "offset": where, "delete": 0, "insert": chance.randbytes(count).hex()}
    if roll < 0.85:
        count = chance.choice((1, 8, 64, 1000))
        return {"op": "bytes", "offset": at, "delete": count, "insert": "00" * min(count, max(0, size - at))}
    if roll < 0.9:
        return {"op": "bytes", "offset": at, "delete": 2, "insert": chance.choice(("ff", "c328", "eda080", "0000"))}
    length = chance.randrange(1, 200)
    source = chance.randrange(max(1, size))
    return {"op": "copy", "offset": at, "delete": chance.choice((0, length)), "source": source, "length": length}


def _hostile_code(chance: random.Random, folder: str, files: list[str]) -> list[Edit]:
    """Edits that make a model folder ask for its own code."""
    edits: list[Edit] = []
    if "evil.py" not in files:
        edits.append({"file": f"{folder}/evil.py", "op": "place", "source": "evil/evil.py"})
    for file in files:
        keys = CODE_KEYS.get(file.rpartition("/")[2], [])
        if keys and chance.random() < 0.7:
            for key, value in chance.sample(keys, chance.choice((1, 2))):
                edits.append({"file": file, "op": "set", "format": "json", "path": [key], "value": value})
    roll = chance.random()
    if roll < 0.15:
        pickled = {"file": f"{folder}/pytorch_model.bin", "op": "place", "source": "evil/pytorch_model.bin"}
        edits += [pickled, {"file": f"{folder}/model.safetensors", "op": "kind", "kind": "missing"}]
    elif roll < 0.3:
        index = json.dumps({"metadata": {}, "weight_map": {"model.embed_tokens.weight": "pytorch_model.bin"}})
        edits.append({"file": f"{folder}/pytorch_model.bin", "op": "place", "source": "evil/pytorch_model.bin"})
        named = chance.choice(("model.safetensors.index.json", "pytorch_model.bin.index.json"))
        edits.append({"file": f"{folder}/{named}", "op": "text", "before": index, "part": "", "times": 0, "after": ""})
        if chance.random() < 0.5:
            edits.append({"file": f"{folder}/model.safetensors", "op": "kind", "kind": "missing"})
    elif roll < 0.4:
        edits.append({"file": f"{folder}/custom_generate/generate.py", "op": "place", "source": "evil/evil.py"})
    return edits
