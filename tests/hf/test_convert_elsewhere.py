"""Converted folders where this package is not: the code that comes with the weights."""

import ast
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from hf_helpers import code_of_card, crt, logits, randomise, some_tokens
from train_helpers import make_data, run
from transformers import AutoModelForCausalLM, AutoTokenizer

import contextready.hf.modeling  # noqa: F401  (registers its classes)
from contextready.hf.bundle import needed_modules

REMOTE = """
import contextlib, io, json, sys, traceback
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "contextready":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
import torch
torch.set_num_threads(1)
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging
logging.disable_progress_bar()
tokens = torch.tensor(json.loads(sys.argv[1]))

def work(task):
    if "code" in task:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(task["code"], {})
        return out.getvalue()
    config = AutoConfig.from_pretrained(task["folder"], trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(task["folder"], trust_remote_code=True)
    assert type(model.config) is type(config)
    with torch.no_grad():
        found = model(tokens).logits
        text = model.generate(tokens, max_new_tokens=6, do_sample=False, pad_token_id=0)
    torch.save((found, text), task["result"])
    if "again" in task:
        model.save_pretrained(task["again"])
    return type(model).__module__

results = {}
for name, task in json.loads(sys.argv[2]).items():
    try:
        results[name] = work(task)
    except Exception as error:
        results[name] = {"error": "".join(traceback.format_exception_only(error))[:300]}
assert not any(name.partition(".")[0] == "contextready" for name in sys.modules)
print(json.dumps(results))
"""


def without_package(cache, tasks):
    """Do tasks in a process that cannot import this package; nothing that an earlier one copied is there."""
    words = [json.dumps(some_tokens().tolist()), json.dumps(tasks, default=str)]
    variables = {"HF_HOME": str(cache), "HF_MODULES_CACHE": str(cache / "modules"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", REMOTE, *words],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run without correction, as a Hugging Face folder."""
    return converted_run(tmp_path_factory.mktemp("plain"), correction=None)


def converted_run(place, **changes):
    run(make_data(place / "corpus"), place / "run", **{"steps": 2, "eval_every": 1, "save_every": 1} | changes)
    crt("convert", place / "run", place / "hf")
    return place / "hf"


@pytest.fixture(scope="module")
def trained(tmp_path_factory, converted):
    """Models whose correction matters, saved by this package: around a Llama, and around its own transformer."""
    place = tmp_path_factory.mktemp("trained")
    model = AutoModelForCausalLM.from_pretrained(converted[0])
    randomise(model)
    model.save_pretrained(place / "llama")
    AutoTokenizer.from_pretrained(converted[0]).save_pretrained(place / "llama")
    shutil.copyfile(converted[0] / "README.md", place / "llama" / "README.md")
    converted_run(place / "window", window=5, layers=2).rename(place / "own")
    return place


@pytest.fixture(scope="module")
def elsewhere(trained, plain):
    """What a process without this package made of them, and another of what that one saved."""
    # Whoever comes first finds nothing registered: the own ones, which need that most.
    names = ("own", "llama")
    first = {"card of plain": {"code": code_of_card(plain)}}
    for name in names:
        first[name] = {"folder": trained / name, "result": trained / f"{name}.pt", "again": trained / f"{name} again"}
    found = without_package(trained / "cache", first)
    second = {}
    for name in names:
        second[f"{name} again"] = {"folder": trained / f"{name} again", "result": trained / f"{name} again.pt"}
    second |= {f"card of {name}": {"code": code_of_card(trained / name)} for name in names}
    return found | without_package(trained / "other cache", second)


def assert_same_elsewhere(trained, name, result):
    found, text = torch.load(trained / f"{name}.pt")
    model, tokens = AutoModelForCausalLM.from_pretrained(trained / result), some_tokens()
    assert torch.equal(found, logits(model, tokens))
    assert not torch.equal(found, logits(model, tokens, passes=1))
    assert torch.equal(text, model.generate(tokens, max_new_tokens=6, do_sample=False, pad_token_id=0))


@pytest.mark.parametrize("name", ["llama", "own"])
def test_the_code_comes_with_the_weights(elsewhere, trained, name):
    assert "error" not in elsewhere[name], elsewhere[name]
    assert elsewhere[name].startswith("transformers_modules.")
    assert_same_elsewhere(trained, name, name)


@pytest.mark.parametrize("name", ["llama", "own"])
def test_cards_run_where_the_package_is_not(elsewhere, name):
    assert "error" not in elsewhere[f"card of {name}"], elsewhere[f"card of {name}"]
    assert elsewhere[f"card of {name}"].startswith("Once upon a time")


def test_the_card_of_a_plain_run_runs(elsewhere, plain):
    """By itself, or it says that it needs this package."""
    says_so = "import contextready.hf" in code_of_card(plain)
    assert says_so or "error" not in elsewhere["card of plain"], elsewhere["card of plain"]


@pytest.mark.parametrize("name", ["llama", "own"])
def test_what_was_saved_elsewhere_opens_here(elsewhere, trained, name):
    assert "error" not in elsewhere[name]
    again, model = (AutoModelForCausalLM.from_pretrained(trained / folder) for folder in (f"{name} again", name))
    assert torch.equal(logits(again, some_tokens()), logits(model, some_tokens()))


@pytest.mark.parametrize("name", ["llama", "own"])
def test_what_was_saved_elsewhere_opens_elsewhere(elsewhere, trained, name):
    again = elsewhere[f"{name} again"]
    assert "error" not in again, again
    assert_same_elsewhere(trained, f"{name} again", name)


@pytest.mark.parametrize("name", ["llama", "own"])
def test_what_was_saved_elsewhere_is_whole(elsewhere, trained, name):
    assert "error" not in elsewhere[name]
    for reference in json.loads((trained / f"{name} again" / "config.json").read_text())["auto_map"].values():
        assert (trained / f"{name} again" / f"{reference.partition('.')[0]}.py").is_file()
    assert {file.name for file in trained.glob(f"{name} again/*.py")} == {
        file.name for file in trained.glob(f"{name}/*.py")
    }


def test_the_bundled_code_needs_torch_and_transformers_only():
    modules = needed_modules()
    assert "contextready.hf.modeling" in modules
    allowed = {"torch", "transformers", "numpy", "safetensors", *sys.stdlib_module_names}
    for name, source in modules.items():
        for node in ast.parse(source).body:
            if isinstance(node, ast.ImportFrom):
                imported = [node.module]
                assert node.level == 0
            else:
                imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for module in imported:
                if module.partition(".")[0] == "contextready":
                    assert module in modules, f"{name} imports {module}"
                else:
                    assert module.partition(".")[0] in allowed, f"{name} imports {module}"
