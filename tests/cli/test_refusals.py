"""Bad command lines of every verb: one sentence, exit code 2, no traceback, and nothing is written."""

import io
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from train_helpers import run

from contextready.cli import main as command
from contextready.cli.main import main

HUGE = "9" * 400
ENDLESS = "9" * 5000
"""Python refuses to convert numbers with more than 4300 digits."""
LATIN = os.fsdecode(b"caf\xe9")
"""A word that is not UTF-8, as the command line gives it."""
LONG = "x" * 5000
"""Longer than any file name."""
MEMORY = 8 << 30
"""Address space of a process; importing torch alone takes several GB of it."""
TINY = "vocab_size=300 width=16 layers=1 heads=2 block_size=16 batch_size=4 steps=1 device=cpu"

LINES = (Path(__file__).parent / "bad_commands.txt").read_text().splitlines()[1:]


@pytest.fixture(scope="module")
def world(data, tmp_path_factory):
    """Files and folders of all kinds, most of them wrong."""
    home = tmp_path_factory.mktemp("world")
    run(data, home / "run", steps=8)
    (home / "folder").mkdir()
    (home / "folder.yaml").mkdir()
    (home / "hf").mkdir()
    (home / "hf" / "config.json").write_text('{"model_type": 7, "hidden_size": "many"}')
    (home / "file.txt").write_text("Some text.\n" * 20)
    (home / "tokens.bin").write_bytes(b"\x01\x00\xff\xff" * 9)
    (home / "model.gguf").write_bytes(b"GGUF\x03\x00\x00\x00" + b"\xff" * 64)
    os.mkfifo(home / "fifo.yaml")
    (home / "bad.yaml").write_text("a: b: c")
    (home / "latin.yaml").write_bytes(b"# caf\xe9\nseed: 0\n")
    levels = "".join(f"m{i}: &m{i} {{<<: [*m{i - 1}, *m{i - 1}]}}\n" for i in range(1, 40))
    (home / "bomb.yaml").write_text("m0: &m0 {a: 1, b: 2}\n" + levels)
    return {
        **{"empty": "", "latin": LATIN, "long": LONG, "huge": HUGE, "endless": ENDLESS, "tiny": TINY},
        **{"data": data, "run": home / "run", "folder": home / "folder", "hf": home / "hf", "file": home / "file.txt"},
        **{"bin": home / "tokens.bin", "gguf": home / "model.gguf", "fifo": home / "fifo.yaml"},
        **{name: home / f"{name.removesuffix('_yaml')}.yaml" for name in ("bad_yaml", "latin_yaml", "bomb_yaml")},
        "home": home,
    }


@pytest.fixture
def too_slow():
    """End a test that hangs."""

    def stop(*_):
        raise AssertionError("this command line hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def words_of(line, world, out):
    words = []
    for word in line.split(" "):
        filled = word.format(**world, out=out)
        words += filled.split(" ") if word == "{tiny}" else [filled]
    return words


@pytest.mark.parametrize("line", LINES)
@pytest.mark.usefixtures("too_slow")
def test_a_bad_command_line_is_refused(line, world, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    monkeypatch.setenv("COLUMNS", "100")
    words = words_of(line, world, tmp_path / "out")
    try:
        code = main(words)
    except SystemExit as stop:
        code = stop.code
    finally:
        torch.set_num_threads(1)
    err = capfd.readouterr().err
    assert code == 2, err
    check_refusal(err, words[0])
    assert not list((tmp_path / "out").glob("checkpoints/*"))


def check_refusal(err, verb):
    lines = err.splitlines()
    assert 1 <= len(lines) <= 2, err
    assert "Traceback" not in err
    assert len(err) < 3000
    if lines[0].startswith("usage: crt"):
        assert ": error: " in lines[-1]
    else:
        assert lines[-1].startswith(f"crt {verb}: ")
        assert len(lines) == 1 or lines[0].startswith("Note: ")


@pytest.mark.parametrize(
    "line",
    [
        "train mini-d1 steps={endless}",
        "train mini-d1 out={latin} data={data} vocab_size=300",
        "train {fifo} {tiny} data={data} out={out}",
        "train {bomb_yaml} {tiny} data={data} out={out}",
        "train mini-d1 width=1048576 layers=1000000 data={data} out={out}",
        "bench owt-d5-c1120 width=1048576 --engines eager",
        "bench {run} --threads 100000",
    ],
)
def test_in_a_process_of_its_own_too(line, world, tmp_path):
    words = words_of(line, world, tmp_path / "out")
    done = subprocess.run(
        [sys.executable, "-m", "contextready", *words],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=os.environ | {"COLUMNS": "100"},
        timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY)),
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout == b""
    check_refusal(done.stderr.decode(), words[0])


@pytest.mark.parametrize("name", ["build_parser", "_parse"])
def test_ctrl_c_before_the_verb_runs_is_quiet(name, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, name, interrupted)
    assert main(["info"]) == 130
    assert capsys.readouterr() == ("", "")


def test_ctrl_c_while_the_parser_is_built_in_a_process_of_its_own():
    """The real signal, sent from inside `build_parser`."""
    program = (
        "import os, signal, sys\n"
        # A process started in the background ignores the signal.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from contextready.cli import main as command\n"
        "command.demo.add = lambda verbs: (os.kill(os.getpid(), signal.SIGINT), __import__('time').sleep(5))\n"
        "sys.exit(command.main(['info']))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_ctrl_c_during_the_import_is_quiet():
    """`python -m contextready` guards the import of the command too."""
    program = (
        "import runpy, sys, types\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'contextready.cli.bench': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "sys.argv = ['crt', 'info']\n"
        "runpy.run_module('contextready', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, b"")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried to"),
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
)
def test_too_little_memory_is_one_sentence(error, monkeypatch, capsys):
    def failing(*_):
        raise error

    monkeypatch.setattr("contextready.cli.info.print_info", failing)
    assert main(["info"]) == 2
    assert capsys.readouterr().err.startswith("crt info: there is not enough memory; ")


def test_other_errors_keep_their_traceback(monkeypatch):
    def failing(*_):
        raise RuntimeError("a bug")

    monkeypatch.setattr("contextready.cli.info.print_info", failing)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["info"])


def test_a_message_has_one_line_and_no_control_characters(capsys):
    assert main(["info", "a\nb\x1b[31mc"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("crt info: There is no model 'a b [31mc' in the paper")
    assert err.count("\n") == 1


def test_a_million_layers_are_counted_at_once(capsys):
    line = "info vocab_size=32000 width=1024 layers=1000000 heads=16 correction=add --json"
    assert main(line.split()) == 0
    assert '"layers": 1000000' in capsys.readouterr().out


def test_paper_scale_stays_possible(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("contextready.formats.limits.total_memory", lambda: 1 << 20)
    for line in ("train owt-d6-c2048 --dry-run", "plan owt-d6-c2048 --json", "info owt-d6-c2048"):
        assert main(line.split()) == 0
    assert capsys.readouterr().err == ""
