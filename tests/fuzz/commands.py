"""Random command lines over every verb: options and words that the parser knows, with values that make little sense.

Numbers are either tiny or absurd. Between the two lies work that is only long, such as a training of a thousand steps.
"""

import argparse
import random
from functools import cache
from typing import Any

from contextready.state.names import TASKS

MODELS = ["run", "run", "run/checkpoints/step-00000002", "native", "ready", "exported/f32.gguf", "tuned", "sharded"]
PATHS = [
    "data",
    "texts",
    "recipe/recipe.yaml",
    "states/session.state",
    "tokenizer",
    "sources/lines.jsonl",
    "evil/evil.py",
]
PATHS += [
    "tokens/megatron.bin",
    "exported",
    "missing/",
    "/missing/file",
    "",
    ".",
    "a\udcffb",
    "x" * 300,
    "/dev/null",
    "a\x00b",
]
INTEGERS = ["0", "1", "2", "3", "-1", "-7", "1000000000000", "4611686018427387904", "9223372036854775808", "1" * 400]
INTEGERS += ["1e3", "0x10", "½", "", "nan", "1_0", " 1", "+1", "1" * 5000]
FLOATS = ["0", "1", "0.5", "-1", "nan", "inf", "-inf", "1e308", "1e-320", "1e400", "", "x", "1,5", "1" * 400]
WORDS = ["river", "", " ", "none", "add", "auto", "cpu", "cuda:99", "meta", "../x", "x", "a,b", ",", "1,2", "1,0", "-1"]
WORDS += [
    "é\U0001f600",
    "a\udcff",
    "%s",
    "{}",
    "$(x)",
    "--",
    "-",
    "=",
    "a=",
    "=b",
    "a=b",
    "0,1",
    "1" * 400,
    "x.png",
    "x.pdf",
]
VALUES = ["0", "1", "2", "4", "-1", "none", "true", "false", "", "nan", "inf", "1e9", "x", "0.5", "10000000000", "add"]
VALUES += ["4611686018427387904", "1000000000000", "1" * 400, "1e400", "sweep", "cosine", "bptt", "implicit", "\udcff"]
KEYS_OF_LENGTH = ("steps", "eval_every", "save_every", "log_every", "warmup", "accumulate", "hops", "data", "out")
KEYS_OF_LENGTH += ("wandb", "pretrained", "compile")
"""Settings whose absurd values are only long, or lead elsewhere, but are not wrong."""
SKIPPED = ("--trust-remote-code", "--help", "-h")
"""The first is the user's own decision."""


@cache
def _verbs() -> dict[str, list[Any]]:
    """The options of every verb, and of every verb below a verb."""
    from contextready.cli.main import build_parser

    found: dict[str, list[Any]] = {}

    def visit(parser: argparse.ArgumentParser, name: str) -> None:
        below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        if below:
            for key, inner in below[0].choices.items():
                visit(inner, f"{name} {key}".strip())
        else:
            found[name] = [action for action in parser._actions if not {*SKIPPED} & {*action.option_strings}]

    visit(build_parser(), "")
    return found


@cache
def _keys() -> list[str]:
    from contextready.runs.config import MODEL_KEYS, PRETRAINED_KEYS, TRAIN_KEYS

    return [key for key in (*MODEL_KEYS, *TRAIN_KEYS, *PRETRAINED_KEYS) if key not in KEYS_OF_LENGTH]


def random_command(chance: random.Random) -> list[str]:
    """The words of one command."""
    verb = chance.choice(list(_verbs()))
    if chance.random() < 0.03:
        # The first word after convert may be a name on the Hub, which the command then looks up there.
        first = [] if verb == "convert" else [chance.choice([*WORDS, "--help", "--json"])]
        return [verb.split()[0], *first, chance.choice(["--help", "--json", *WORDS[-10:]])]
    words = verb.split()
    fixed = {
        "demo": lambda: ["--steps", chance.choice(("0", "-1", "x", "nan"))],
        "bench": lambda: _bench(chance),
        "train": lambda: _train(chance),
        "pointer": lambda: _pointer(chance),
        "task": lambda: _task(chance),
        "reproduce": lambda: ["pointer", "--report", "--out", chance.choice([*MODELS[:2], *PATHS[8:]])],
        "unshard": lambda: [chance.choice(("run", "native", *PATHS)), "out"],
        "exact": lambda: ["--tokens", "8"],
        "eval": lambda: [chance.choice(MODELS[:3]), "--tokens", "32", "--passes", "1,2"],
        "generate": lambda: [chance.choice(MODELS), chance.choice(("river", *WORDS)), "--max-tokens", "2"],
        "chat": lambda: [chance.choice(MODELS), "--max-tokens", "2"],
        "export": lambda: [
            chance.choice((*MODELS, *PATHS)),
            chance.choice(("out.gguf", "out.gguf", *PATHS)),
            "--tokens",
            "0",
        ],
        "convert": lambda: [
            _local(chance, (*MODELS, "base", *PATHS)),
            chance.choice(("out", "out", "run", "/dev/null/x")),
        ],
        "plot": lambda: [chance.choice(("run", *PATHS)), "--out", chance.choice(("out.png", "out.svg", *WORDS))],
        "info": lambda: _settings(chance, 3),
        "plan": lambda: ["recipe/recipe.yaml", *_settings(chance, 2)],
        "data prepare": lambda: _prepare(chance),
        "data show": lambda: [chance.choice(("data", "data", "other-data", *PATHS)), "--count", "2", "--tokens", "8"],
    }
    words += fixed.get(verb, lambda: [chance.choice((*MODELS, *PATHS))])()
    if verb in ("demo", "reproduce", "unshard"):
        return words
    options = [action for action in _verbs()[verb] if action.option_strings]
    for action in chance.sample(options, min(len(options), chance.choice((0, 1, 1, 2, 3)))):
        words += _option(chance, action)
    return words


def _option(chance: random.Random, action: argparse.Action) -> list[str]:
    name = chance.choice(action.option_strings)
    if action.nargs == 0:
        return [name]
    if name in ("--tasks", "--tasks-path", "--peers"):
        return [name, chance.choice(("", "x", "nothing=missing.jsonl", "missing/"))] if name != "--peers" else []
    if action.type is int:
        return [name, chance.choice(INTEGERS)]
    if action.type is float:
        return [name, chance.choice(FLOATS)]
    if action.type is not None:
        return [name, chance.choice([*PATHS, *MODELS])]
    if name in ("--tokenizer", "--val"):
        return [name, chance.choice(PATHS)]
    return [name, chance.choice([*WORDS, *INTEGERS[:9]])]


def _settings(chance: random.Random, most: int) -> list[str]:
    count = chance.randrange(most + 1)
    return [f"{chance.choice([*_keys(), 'unknown'])}={chance.choice(VALUES)}" for _ in range(count)]


def _train(chance: random.Random) -> list[str]:
    """A run of the tiny recipe, which ends after two more steps; most only show what they would do."""
    words = ["recipe/recipe.yaml", *_settings(chance, 3)]
    if not any(word.startswith("pretrained=") for word in words):
        words.append("out=new")
    words.append("steps=2")
    return [*words, "--dry-run"] if chance.random() < 0.5 else words


def _pointer(chance: random.Random) -> list[str]:
    keys = ["keys", "values", "hops", "answers", "window", "seed", "width", "layers", "batch_size", "passes"]
    settings = [f"{chance.choice(keys)}={chance.choice(VALUES)}" for _ in range(chance.randrange(3))]
    return [*settings, "--show"] if chance.random() < 0.7 else [*settings, "steps=1", "eval_tokens=64", "out=new"]


def _task(chance: random.Random) -> list[str]:
    keys = ["length", "curriculum", "until", "group", "alphabet", "variables", "copies", "depth", "window", "layers"]
    settings = [f"{chance.choice(keys)}={chance.choice(VALUES)}" for _ in range(chance.randrange(3))]
    words = [chance.choice((*TASKS, "pointer", *WORDS)), *settings]
    return [*words, "--show"] if chance.random() < 0.7 else [*words, "steps=1", "eval_tokens=64", "out=new"]


def _bench(chance: random.Random) -> list[str]:
    what = chance.choice(
        (["run"], ["exported/f32.gguf"], ["width=32", "layers=1", "heads=2", "vocab_size=64"], ["missing/"])
    )
    return [
        *what,
        *_settings(chance, 1),
        "--tokens",
        "1",
        "--rounds",
        "1",
        "--contexts",
        "4",
        "--engines",
        "eager",
        "--threads",
        "1",
    ]


def _prepare(chance: random.Random) -> list[str]:
    source = chance.choice(
        ["texts", "sources/lines.jsonl", "sources/lines.jsonl.zst", "sources/table.parquet", "tokens/nano.bin", *PATHS]
    )
    return [
        chance.choice(("out", "out", "data", "/dev/null/x")),
        source,
        "--vocab-size",
        chance.choice(("300", "300", *INTEGERS)),
    ]


def _local(chance: random.Random, choices: tuple[str, ...]) -> str:
    """A word that cannot be the name of a model on the Hub."""
    return chance.choice([word for word in choices if word not in ("", ".", "x" * 300)])
