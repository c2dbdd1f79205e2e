"""Every kind of malicious folder, with every command and every kind of standard input: nothing in it runs.

One real process tries all of them, so that standard input is a terminal or a pipe indeed. An audit hook of Python
reports whatever would connect, start a program, unpickle or ask.
"""

import json
import os
import subprocess
import sys

import hf_hostile_helpers as hostile
import pytest
from hf_helpers import KNOWN, save, tiny_lm, train_tokenizer
from train_helpers import make_data

REFUSED = (
    hostile.own_model,
    hostile.own_model_elsewhere,
    hostile.own_model_of_a_known_kind,
    hostile.own_model_inside,
    hostile.own_tokenizer,
    hostile.own_tokenizer_in_a_list,
    hostile.class_that_is_no_tokenizer,
    hostile.own_generate,
    hostile.own_generate_in_settings,
    hostile.own_generation_config,
    hostile.own_pipeline,
    hostile.pickled_only,
    hostile.pickled_by_another_name,
    hostile.pickled_in_the_index,
    hostile.pickled_in_the_settings,
    hostile.adapter,
    hostile.kernel,
)
IGNORED = (hostile.own_code_for_a_known_model, hostile.hostile_templates, hostile.python_files, hostile.pickled)
"""What these plant is never needed, so the models are used without it."""
KINDS = {attack.__name__: attack for attack in (*REFUSED, *IGNORED)}
INPUTS = {"terminal": "y\ny\ny\n\x04", "pipe": "", "pipe that says y": "y\ny\ny\n"}
COMMANDS = ("generate", "eval", "convert", "info", "load")
TRIAL = """
import contextlib, io, json, os, pty, sys

NEVER = ("builtins.input", "os.exec", "os.posix_spawn", "os.system", "pickle.find_class", "socket.connect",
         "socket.getaddrinfo", "socket.gethostbyname", "subprocess.Popen")
seen = []

def hook(event, arguments):
    if event in NEVER:
        seen.append(f"{event} {arguments}"[:200])
        raise OSError("nothing may do that here")

def standard_input(kind, content):
    if kind == "terminal":
        ours, theirs = pty.openpty()
    else:
        theirs, ours = os.pipe()
    os.write(ours, content.encode())
    if kind != "terminal":
        os.close(ours)
    os.dup2(theirs, 0)
    os.close(theirs)
    sys.stdin = open(0, closefd=False)
    assert sys.stdin.isatty() == (kind == "terminal")
    return ours

def attempt(words):
    import contextready
    from contextready.cli.main import main

    if words[0] != "load":
        return main(words)
    try:
        contextready.load(words[1]).generate("river", max_tokens=2)
    except contextready.ContextReadyError as error:
        print(error, file=sys.stderr)
        return 2
    return 0

trials, inputs = json.loads(sys.argv[1])
import torch, transformers.models.llama, contextready.hf.convert, contextready.evaluate.evaluate
torch.set_num_threads(1)
sys.addaudithook(hook)
for number, (folder, words) in enumerate(trials):
    for kind, content in inputs.items():
        ours = standard_input(kind, content)
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = attempt([word.replace("NEW", f"{kind} {number}") for word in words])
        if kind == "terminal":
            os.close(ours)
        print(json.dumps([folder, words[0], kind, code, out.getvalue(), err.getvalue(), seen]), flush=True)
        seen.clear()
"""


def words_of(command, folder, data, out):
    evaluation = ["--data", str(data), "--passes", "1", "--no-sequential", "--tokens", "64", "--device", "cpu"]
    more = {"generate": ["--max-tokens", "2"], "eval": evaluation, "convert": [str(out / "NEW")]}
    return [command, str(folder), *more.get(command, [])]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder per kind, and what happened in each trial."""
    place = tmp_path_factory.mktemp("malicious")
    tokenizer = train_tokenizer(place / "tokenizer")
    base = save(place / "base", tiny_lm("llama", vocab_size=KNOWN).float(), tokenizer)
    data = make_data(place / "corpus", tokenizer=str(base))
    (place / "out").mkdir()
    trials = []
    for kind, attack in KINDS.items():
        attack(hostile.hostile_copy(base, place / kind, place / "ran"))
        trials += [(kind, words_of(command, place / kind, data, place / "out")) for command in COMMANDS]
    # The Hub is not switched off, and its cache is empty.
    variables = {name: value for name, value in os.environ.items() if not name.endswith("_OFFLINE")}
    variables |= {"HF_HOME": str(place / "home"), "HF_MODULES_CACHE": str(place / "modules"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", TRIAL, json.dumps([trials, INPUTS])],
        env=variables,
        cwd=place,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == len(trials) * len(INPUTS)
    return place, results


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_runs(place, kind):
    folder, results = place
    tried = [result[1:] for result in results if result[0] == kind]
    assert {(command, given) for command, given, *_ in tried} == {(c, i) for c in COMMANDS for i in INPUTS}
    for command, given, code, out, err, seen in tried:
        assert seen == [], (command, given)
        if KINDS[kind] in REFUSED or command == "info" or (command, given) == ("generate", "pipe"):
            assert (code, out) == (2, ""), (command, given, err)
            sentences = err.replace("Type the prompt, then press Ctrl-D on a new line.\n", "")
            assert sentences.count("\n") == 1, (command, given, err)
            assert "Traceback" not in err
        else:
            assert code == 0, (command, given, err)
    assert not (folder / "ran").exists()


def test_only_what_is_harmless_is_written(place):
    folder, _ = place
    assert len(list((folder / "out").iterdir())) == len(IGNORED) * len(INPUTS)
    assert not (folder / "modules").exists()
