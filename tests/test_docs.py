"""The documentation is true: its code runs, its commands run, the functions and tests it names exist."""

import importlib
import importlib.util
import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hf_helpers import KNOWN, LLAMA_LIKE, save, train_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from contextready.cli.main import VERBS, build_parser, main
from contextready.runs.recipes import resolve
from contextready.runs.run_checks import check_for_team

ROOT = Path(__file__).parent.parent
GUIDES = (
    "README",
    "training",
    "generation",
    "huggingface",
    "pointer",
    "state",
    "scale",
    "benchmarks",
    "reproduction",
    "index",
)
"""In the order in which their commands are run, in one folder."""
TEXTS = {name: (ROOT / ("README.md" if name == "README" else f"docs/{name}.md")).read_text() for name in GUIDES}
README, SCALE = TEXTS["README"], TEXTS["scale"]
MATH = (ROOT / "docs" / "math.md").read_text()

COMMANDS = list(
    dict.fromkeys(
        command.strip()
        for text in TEXTS.values()
        for command in re.findall(r"^(crt [^#\n]*)", text, flags=re.MULTILINE)
    )
)
"""Every command once, in the order of the guides."""
QUICK = ("info", "exact", "plan")
TINY = ["width=16", "heads=2", "block_size=16", "batch_size=2", "steps=4", "eval_every=2", "eval_tokens=64"]
CHASE = ["width=16", "heads=2", "batch_size=2", "steps=2", "eval_tokens=200"]
STUDY = ["block_size=16", "batch_size=2", "steps=4", "eval_every=2", "eval_tokens=64"]
LESS = {
    "train": TINY,
    "pointer": CHASE,
    "task": [*CHASE, "length=8"],
    "reproduce": CHASE,
    "eval": ["--tokens", "256"],
    "demo": ["--steps", "6"],
    "generate": ["--max-tokens", "8"],
    "chat": ["--max-tokens", "8"],
    "export": ["--tokens", "32"],
    "bench": ["--rounds", "1", "--tokens", "2", "--threads", "1"],
}
"""What makes a command quick enough for a test."""
GGML = importlib.util.find_spec("ggml") is not None


def can_run(words):
    """Whether a command can run here. Some need the engine ggml, a peer, a download, or hours."""
    if "--tasks" in words and not any("=" in word for word in words):
        return False  # lm_eval downloads its own tasks
    if words[0] == "reproduce" and not {"headline", "--dry-run"} & set(words):
        return False  # many more runs; tests/reproduce trains a table and prints its ledger
    return "--peers" not in words and (GGML or not ({"export", "bench"} & set(words) or "mini.gguf" in words))


def smaller(words):
    """The same command with a tiny model and few steps."""
    verb, *rest = words
    if {"--dry-run", "--show", "--list", "--report", "--sample"} & set(rest):
        return words
    given = {word.partition("=")[0] for word in rest if "=" in word}
    quick = STUDY if words[:2] == ["reproduce", "training"] else LESS.get(verb, [])
    less = [word for word in quick if word.partition("=")[0] not in given]
    if "pretrained" in given:
        less = [word for word in less if not word.startswith(("width=", "heads="))]
    return [*words, *less]


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.split()[1] in QUICK])
def test_quick_commands_run(command, capsys):
    assert main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out


def test_commands_and_examples_run_in_order(tmp_path, monkeypatch, capsys):
    """For real, on the default corpus, with tiny models and few steps."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("contextready.cli.demo.VALIDATION", 0.01)
    # Stands in for the model that the Hub has under this name.
    folder = Path("HuggingFaceTB/SmolLM2-135M")
    config = AutoConfig.for_model("llama", **LLAMA_LIKE | {"vocab_size": KNOWN})
    save(folder, AutoModelForCausalLM.from_config(config), train_tokenizer(folder))
    for command in COMMANDS:
        words = shlex.split(command)[1:]
        if words[0] not in QUICK and can_run(words):
            monkeypatch.setattr("sys.stdin", io.StringIO("The river\n"))
            assert main(smaller(words)) == 0, (command, capsys.readouterr().err)
            assert capsys.readouterr().out, command
    examples = 0
    for name in ("README", "training", "generation", "huggingface"):
        for example in re.findall(r"```python\n(.*?)```", TEXTS[name], flags=re.DOTALL):
            if "import" in example:
                exec(compile(example, name, "exec"), {})
                examples += 1
    assert examples == 5
    assert (tmp_path / "curves.svg").is_file()
    assert (tmp_path / "runs" / "demo" / "curves.png").is_file()


def test_the_readme_is_short_and_the_guides_show_every_verb_and_example():
    assert len(README.splitlines()) <= 150
    verbs = {module.__name__.rpartition(".")[2] for module in VERBS}
    assert {command.split()[1] for command in COMMANDS} == verbs
    for path in (ROOT / "examples").iterdir():
        assert path.name in README, path


def test_the_map_of_the_packages_is_what_the_sources_say():
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "architecture.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    page = (ROOT / "docs" / "architecture.md").read_text()
    for path in (ROOT / "src").rglob("*.py"):
        assert path.name in page, path


@pytest.mark.parametrize("tool", ["results.py", "demo.py", "reproduction.py", "state.py"])
def test_tables_are_what_the_result_files_say(tool):
    done = subprocess.run([sys.executable, ROOT / "tools" / tool, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


LAUNCHES = re.findall(r"^((?:srun|torchrun) [^#\n]*)", README + SCALE, flags=re.MULTILINE)


@pytest.mark.parametrize("command", LAUNCHES)
def test_commands_for_many_processes_are_understood(command):
    """By torchrun's own parser, then by ours, down to the settings of the run."""
    from torch.distributed.run import get_args_parser

    words = shlex.split(command)
    options = get_args_parser().parse_args(words[words.index("torchrun") + 1 :])
    assert (options.module, options.training_script) == (True, "contextready")
    ours = build_parser().parse_args(options.training_script_args)
    assert ours.verb == "train"
    settings = ours.settings + (["vocab_size=4096"] if ours.recipe.startswith("mini") else [])
    config = resolve(ours.recipe, settings)
    nodes = int(options.nnodes.split(":")[0])
    if words[0] == "srun":
        assert words[words.index("--nodes") + 1] == options.nnodes
    check_for_team(config, nodes * int(options.nproc_per_node))


def test_launches_for_eight_gpus_and_for_several_nodes_are_there():
    assert len(LAUNCHES) >= 6
    assert any("--nproc-per-node 8" in command and "--nnodes" not in command for command in LAUNCHES)
    assert any("--nnodes 4 --nproc-per-node 8" in command for command in LAUNCHES)


def test_the_table_in_the_guide_is_what_crt_exact_measures():
    from contextready.measure.exactness import run_exact

    result = run_exact(tokens=48, layers=1, width=64, seed=0)
    rows = re.findall(
        r"^\| (\d+) \| ([\d.e-]*) ?\| ([\d.e-]+) \| (\d+) of 48 \|$", TEXTS["training"], flags=re.MULTILINE
    )
    assert len(rows) == 7
    for passes, change, error, exact in rows:
        k = int(passes)
        assert int(exact) == result.exact[k - 1]
        if k < 49:  # the last error is rounding, which may differ from machine to machine
            assert float(error) == pytest.approx(result.errors[k - 1], rel=0.06)
        assert change == "" or float(change) == pytest.approx(result.changes[k - 2], rel=0.06)


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(contextready\.[\w.]+)`", MATH))))
def test_functions_named_in_the_mathematics_exist(name):
    module, attributes = name, []
    while True:
        try:
            found = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, last = module.rpartition(".")
            attributes.insert(0, last)
    assert attributes
    for attribute in attributes:
        found = getattr(found, attribute)


@pytest.mark.parametrize("test", sorted(set(re.findall(r"`(tests/[\w/]+\.py::\w+)`", MATH))))
def test_tests_named_in_the_mathematics_exist(test):
    path, _, name = test.partition("::")
    assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), flags=re.MULTILINE)


def test_the_license_and_contributing_are_there():
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert (ROOT / "CONTRIBUTING.md").exists()
