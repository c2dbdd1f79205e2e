"""Bad command lines of every verb: one sentence, exit code 2, no traceback, and nothing is written."""

import io
import os
import resource
import signal
import subprocess
import sys

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

# Words are separated by spaces. {names} are paths from the fixture `world`, and {empty} is an empty word.
LINES = """
sing
{empty}
{latin}
--no-such-option
info --dtype int3
info owt-d5-c1121
info {empty}
info {latin}
info {long}
info =5
info width=
info width=64
info width=64 width=64 layers=1 heads=1 vocab_size=9
info owt-d5-c1120 width={huge}
info owt-d5-c1120 width={endless}
info owt-d5-c1120 width=10000000000
info owt-d5-c1120 width=-1120
info owt-d5-c1120 layers=1000001
info owt-d5-c1120 vocab_size=99999999999
info owt-d5-c1120 heads=0
info owt-d5-c1120 window=4611686018427387904
info owt-d5-c1120 window=1.5
info owt-d5-c1120 dropout=nan
info owt-d5-c1120 rope_base=inf
info owt-d5-c1120 rope_base={huge}
info owt-d5-c1120 bias=maybe
info owt-d5-c1120 correction={empty}
info owt-d5-c1120 --context 0
info owt-d5-c1120 --context {huge}
info owt-d5-c1120 --context {endless}
info owt-d5-c1120 --context 10000000000000
exact --tokens 7
exact --tokens 2049
exact --tokens {huge}
exact --tokens {endless}
exact --tokens many
exact --layers 0
exact --layers 1000000
exact --width 10000000000
exact --width -8
exact --width 12
exact --seed -1
exact --seed {huge}
exact more
train
train {empty}
train {latin}
train {long}
train mini-d2
train main-85m
train mini-d1 steps
train mini-d1 =5
train mini-d1 steps=
train mini-d1 steps=0
train mini-d1 steps=1e3
train mini-d1 steps=100000000
train mini-d1 steps={huge}
train mini-d1 steps={endless}
train mini-d1 lr=nan
train mini-d1 lr=inf
train mini-d1 lr={huge}
train mini-d1 lr=-1
train mini-d1 width=1048576 layers=1000000 data={data} out={out}
train mini-d1 width=10000000000
train mini-d1 passes=1000000000
train mini-d1 min_passes=1000000000
train mini-d1 batch_size=1000000000
train mini-d1 batch_size=1048576 data={data} out={out} vocab_size=300
train mini-d1 block_size=1000000000000
train mini-d1 accumulate=1000000000000
train mini-d1 eval_tokens={huge}
train mini-d1 warmup={huge}
train mini-d1 keep=0
train mini-d1 keep={huge}
train mini-d1 seed={huge}
train mini-d1 seed=-1
train mini-d1 adjoint_steps={huge} gradient=implicit
train mini-d1 adjoint_tolerance=nan gradient=implicit
train mini-d1 truncated_passes=1000000000 gradient=truncated
train mini-d1 gradient=bptt passes=3
train mini-d1 gradient={empty}
train mini-d1 wandb= data={data} out={out} vocab_size=300
train mini-d1 out= data={data}
train mini-d1 data= out={out}
train mini-d1 init_from= data={data} out={out}
train mini-d1 data={file} out={out}
train mini-d1 data={run} out={out}
train mini-d1 data={folder} out={out}
train mini-d1 data={long} out={out}
train mini-d1 out={latin} data={data} vocab_size=300
train mini-d1 data={data} out={file} vocab_size=300
train mini-d1 data={data} out={long} vocab_size=300
train mini-d1 data={data} out={out} device=tpu vocab_size=300
train mini-d1 data={data} out={out} device= vocab_size=300
train mini-d1 data={data} out={out} device=cuda:99999999999999999999 vocab_size=300
train mini-d1 data={data} out={out} device=meta vocab_size=300
train mini-d1 data={data} out={out} init_from={folder} vocab_size=300
train mini-d1 data={data} out={out} init_from={file} vocab_size=300
train mini-d1 k_min=2 min_passes=3
train mini-d1 --dry-run k_min=x
train mini-d1 hops=3
train mini-d1 --json
train mini-d1 --dry-run --dry-rum
train convert pretrained= data={data}
train convert pretrained={folder} data={data} out={out} device=cpu
train convert pretrained={file} data={data} out={out} device=cpu
train convert pretrained=x lora_rank={huge} tune=lora
train nowhere.yaml
train {folder}.yaml
train {fifo} {tiny} data={data} out={out}
train {bad_yaml} {tiny} data={data} out={out}
train {latin_yaml} {tiny} data={data} out={out}
train {bomb_yaml} {tiny} data={data} out={out}
plan
plan nothing
plan mini-d1 --gpus 0
plan mini-d1 --gpus -4
plan mini-d1 --gpus {huge}
plan mini-d1 --gpus {endless}
plan mini-d1 --gpus 3
plan mini-d1 --tflops nan
plan mini-d1 --tflops inf
plan mini-d1 --tflops 0
plan mini-d1 --tflops 1e-300
plan mini-d1 --utilisation 2
plan mini-d1 --utilisation nan
plan mini-d1 --utilisation 1e-320
plan mini-d1 layers=1000000
plan mini-d1 passes=100000
plan mini-d1 batch_size=1048576 block_size=16777216
plan convert pretrained=x
demo --steps 0 --out {out}
demo --steps {huge} --out {out}
demo --steps {endless} --out {out}
demo --out {file}
demo {file}
data
data sing
data prepare
data prepare {out}
data prepare {out} nowhere.txt --vocab-size 300
data prepare {out} {empty} --vocab-size 300
data prepare {out} {folder} --vocab-size 300
data prepare {out} {file}
data prepare {out} {file} --vocab-size 0
data prepare {out} {file} --vocab-size -5
data prepare {out} {file} --vocab-size {huge}
data prepare {out} {file} --vocab-size {endless}
data prepare {out} {file} --vocab-size 300 --tokenizer {data}
data prepare {out} {file} --tokenizer {folder}
data prepare {out} {file} --tokenizer {file}
data prepare {out} {file} --vocab-size 300 --val-fraction nan
data prepare {out} {file} --vocab-size 300 --val-fraction 2
data prepare {out} {file} --vocab-size 300 --shard-tokens 0
data prepare {out} {file} --vocab-size 300 --shard-tokens {huge}
data prepare {out} {file} --vocab-size 300 --tokenizer-bytes {huge}
data prepare {out} {file} --vocab-size 300 --val nowhere.txt
data prepare {data} {file} --vocab-size 300
data prepare {file}/x {file} --vocab-size 300
data prepare {out} {latin_yaml} --vocab-size 300
data prepare {out} {bin} --vocab-size 300
data prepare {out} {bin} --vocab-size {huge} --end-id 0
data prepare {out} {bin} --vocab-size 300 --end-id {huge}
data prepare {out} {bin} {file} --vocab-size 300 --end-id 0
data show
data show {folder}
data show {file}
data show {data} --count 0
data show {data} --count {huge}
data show {data} --tokens {huge}
data show {data} --tokens {endless}
data show {data} --seed -1
data show {data} --seed {huge}
data show {data} --split test
eval
eval {folder}
eval {file}
eval {empty}
eval {latin}
eval {long}
eval {data}
eval {run} --device cpu --passes 0
eval {run} --device cpu --passes 1,x
eval {run} --device cpu --passes {empty}
eval {run} --device cpu --passes 1000000000
eval {run} --device cpu --passes {endless}
eval {run} --device cpu --tokens 0
eval {run} --device cpu --tokens -16
eval {run} --device cpu --tokens {huge}
eval {run} --device cpu --block-size 0
eval {run} --device cpu --block-size 10000000
eval {run} --device cpu --block-size {huge}
eval {run} --device tpu
eval {run} --device hpu
eval {run} --device cpu:999
eval {run} --device {long}
eval {run} --data {folder} --device cpu
eval {run} --data {file} --device cpu
eval {run} --json --csv
eval {hf} --device cpu
eval {run} --device cpu --tasks bits=nowhere.txt
eval {run} --device cpu --tasks bits={file} --limit 0
eval {run} --device cpu --tasks bits={file} --limit {huge}
eval {run} --device cpu --tasks bits={file} --batch-size {huge}
eval {run} --device cpu --tasks bits={file} --shots {huge}
plot
plot {folder}
plot {file}
plot {data}
plot {run} --out curves.doc
plot {run} --out {folder}
plot {run} --out {file}/curves.png
plot {run} --x metres
plot {run} --each --difference
plot {run} --difference
generate
generate {folder}
generate {file} text
generate {gguf} text
generate {hf} text
generate {run} text --max-tokens 0
generate {run} text --max-tokens {huge}
generate {run} text --max-tokens {endless}
generate {run} text --context 1000000000000
generate {run} text --samples 0
generate {run} text --samples 100000000
generate {run} text --temperature nan
generate {run} text --top-p 2
generate {run} text --threads 0
generate {run} text --threads 100000
generate {run} text --device tpu
generate {run} text --engine warp
generate {run} {latin}
generate {run} --file nowhere.txt
generate {run} --file {latin_yaml}
generate {run} --file {folder}
generate {run} text --state {file}
export
export {run}
export {folder} {out}.gguf
export {file} {out}.gguf
export {run} {out}.bin
export {run} {folder}
export {run} {out}.gguf --type q3
export {run} {out}.gguf --tokens -1
export {run} {out}.gguf --tokens {huge}
export {run} {out}.gguf --tokens {endless}
export {run} nowhere/x/{long}.gguf --tokens 0
export {run} {out}.gguf --data {folder}
convert
convert {run}
convert {folder} {out}
convert {file} {out}
convert {gguf} {out}
convert {hf} {out}
convert {run} {folder}
convert {run} {out} --passes 0
convert {run} {out} --passes 1000000000
convert {run} {out} --passes {endless}
convert {run} {out} --correction plus
convert {run} {out} --correction block_head
bench nothing --engines eager
bench {empty} --engines eager
bench {folder} --engines eager
bench {gguf} --engines ggml
bench width=64 --engines eager
bench {run} --engines warp
bench {run} --engines {empty}
bench {run} --precisions q3
bench {run} --contexts {empty}
bench {run} --contexts 0
bench {run} --contexts 1000000000000
bench {run} --contexts {endless}
bench {run} --tokens 0
bench {run} --tokens {huge}
bench {run} --rounds -1
bench {run} --rounds {huge}
bench {run} --threads 0
bench {run} --threads -1
bench {run} --threads 100000
bench {run} --threads {endless}
bench {run} --prefill 0
bench {run} --prefill 1000000000000
bench {run} --plot bench.doc
bench owt-d5-c1120 layers=1000000 --engines eager
bench owt-d5-c1120 width=1048576 --engines eager
bench owt-d5-c1120 window=2147483647 --engines eager
bench owt-d5-c1120 --contexts 16777216 --engines eager
unshard
unshard {folder} {out}
unshard {run} {out}
unshard {file} {out}
pointer mini-d1
pointer nothing
pointer task=text
pointer data={data}
pointer hops=0
pointer hops=1000000000
pointer hops=10000 keys=10000
pointer hops={huge}
pointer keys={endless}
pointer values={huge}
pointer keys=1 values=1
pointer answers=hidden
pointer --show hops=10000 queries=all
pointer batch_size=1000000000 out={out}
pointer layers=1000000 width=65536 out={out}
pointer eval_tokens=1000000000000 out={out} device=cpu
pointer wandb= out={out}
pointer out={file} device=cpu
reproduce
reproduce language
reproduce pointer --seeds x
reproduce pointer --seeds {empty}
reproduce pointer --seeds 1,1
reproduce pointer --seeds -1
reproduce pointer --seeds {huge}
reproduce pointer --seeds {endless}
reproduce pointer --jobs 0
reproduce pointer --jobs {huge}
reproduce pointer --report --out {folder}
reproduce pointer --report --jobs 2
reproduce pointer --out {file}
reproduce pointer hops=0 --out {out}
reproduce pointer steps={huge} --out {out}
reproduce pointer nothing --out {out}
""".strip().splitlines()


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
