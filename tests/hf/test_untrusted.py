"""Model folders from elsewhere: nothing in them runs, nothing outside them is read, and one sentence says why."""

import os
import pty
import shutil
import subprocess
import sys

import pytest
from hf_helpers import KNOWN, crt, refused, refused_conversion, tiny_lm
from hf_hostile_helpers import (
    CODE,
    FOREVER,
    adapter,
    change,
    class_that_is_no_tokenizer,
    hostile_copy,
    index,
    own_code_for_a_known_model,
    own_generate,
    own_generate_in_settings,
    own_generation_config,
    own_model,
    own_model_elsewhere,
    own_model_inside,
    own_model_of_a_known_kind,
    own_pipeline,
    own_tokenizer,
    own_tokenizer_in_a_list,
    pickled,
)
from train_helpers import make_data

from contextready.errors import ContextReadyError

NEEDS_CODE = {
    one.__name__: one
    for one in (
        own_model,
        own_model_elsewhere,
        own_model_of_a_known_kind,
        own_tokenizer,
        own_generate,
        own_generate_in_settings,
        own_generation_config,
        own_pipeline,
    )
}
OTHERS = {one.__name__: one for one in (own_model_inside, class_that_is_no_tokenizer)}


@pytest.fixture
def hostile(base, tmp_path):
    """A function that makes a hostile folder; its code would create the file `ran`."""
    ran = tmp_path / "ran"

    def make(attack, name="model"):
        folder = hostile_copy(base, tmp_path / name, ran)
        attack(folder)
        return folder

    yield make
    assert not ran.exists()


@pytest.fixture(autouse=True)
def no_answer(monkeypatch):
    """Nobody may ask."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")


@pytest.mark.parametrize("kind", NEEDS_CODE)
def test_code_in_a_folder_is_not_run(hostile, tmp_path, capsys, kind):
    folder = hostile(NEEDS_CODE[kind])
    said = refused_conversion(capsys, tmp_path, folder)
    assert "comes with Python code of its own" in said
    assert "which was not run; if you trust its authors, give --trust-remote-code" in said
    for words in (("generate", folder, "river"), ("eval", folder, "--data", tmp_path), ("train", "convert")):
        more = (f"pretrained={folder}", f"data={tmp_path}", f"out={tmp_path / 'run'}") if words[0] == "train" else ()
        refused(capsys, *words, *more)


@pytest.mark.parametrize("kind", OTHERS)
def test_code_is_not_run_by_detours(hostile, tmp_path, capsys, kind):
    folder = hostile(OTHERS[kind])
    refused_conversion(capsys, tmp_path, folder)
    refused(capsys, "generate", folder, "river")


def test_code_beside_a_model_that_transformers_knows_is_ignored(hostile, tmp_path):
    def attack(folder):
        own_code_for_a_known_model(folder)
        change(folder, "tokenizer_config.json", chat_template=FOREVER)
        (folder / "chat_template.jinja").write_text(FOREVER)

    folder = hostile(attack)
    crt("convert", folder, tmp_path / "out")
    assert crt("generate", folder, "river", "--max-tokens", "3")
    # Not even once converted, and its template was kept but never rendered.
    assert crt("generate", tmp_path / "out", "river", "--max-tokens", "3")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == FOREVER


def test_converted_folders_do_not_run_their_copied_code(converted, tmp_path):
    out, ran = tmp_path / "out", tmp_path / "ran"
    shutil.copytree(converted[0], out)
    copied = list(out.glob("contextready_*.py"))
    assert copied
    for file in copied:
        file.write_text(f"open({str(ran)!r}, 'w')")
    assert crt("generate", out, "river", "--max-tokens", "3")
    assert not ran.exists()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("weights.bin", "The weights of {folder} are pickled (model.safetensors.index.json names weights.bin)"),
        ("../weights.safetensors", "must be .safetensors files in the same folder"),
        ("sub/weights.safetensors", "must be .safetensors files in the same folder"),
        ("/etc/passwd", "must be .safetensors files in the same folder"),
        ("weights", "must be .safetensors files in the same folder"),
        ("model.safetensors.index.json", "is not a file of weights"),
        ("absent.safetensors", "names absent.safetensors, which is missing"),
    ],
)
def test_an_index_may_only_name_safetensors_of_the_folder(hostile, tmp_path, capsys, name, sentence):
    def attack(folder):
        pickled(folder)
        index(folder, name)

    folder = hostile(attack)
    assert sentence.format(folder=folder) in refused_conversion(capsys, tmp_path, folder)


@pytest.mark.parametrize("weight_map", [None, [], {}, "x", {"a": 3}, {"a": None}])
def test_an_index_that_makes_no_sense_is_refused(hostile, tmp_path, capsys, weight_map):
    def attack(folder):
        index(folder, "other.safetensors")
        change(folder, "model.safetensors.index.json", weight_map=weight_map)

    assert "model.safetensors.index.json" in refused_conversion(capsys, tmp_path, hostile(attack))


@pytest.mark.parametrize("name", ["adapter_model.bin", "../model.safetensors", "weights.bin", 3])
def test_a_config_may_only_name_safetensors_of_the_folder(hostile, tmp_path, capsys, name):
    def attack(folder):
        pickled(folder)
        change(folder, "config.json", transformers_weights=name)

    assert "safetensors" in refused_conversion(capsys, tmp_path, hostile(attack))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"_attn_implementation": "someone/attention"}, "asks for a kernel from the Hub (config.json, _attn_impl"),
        ({"attn_implementation": {"": "someone/attention:f"}}, "asks for a kernel from the Hub"),
        ({"quantization_config": {"quant_method": "torchao"}}, "are quantised (config.json, quantization_config)"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 10,000"),
        ({"num_labels": 10**9}, "num_labels must be at most 1,000,000"),
        ({"hidden_size": 2**41}, "hidden_size must be at most"),
        ({"hidden_size": 2**20, "head_dim": 2**18}, "the weights have only"),
        ({"vocab_size": 10**9}, "the weights have only"),
    ],
)
def test_settings_that_download_or_fill_the_memory_are_refused(hostile, tmp_path, capsys, changes, sentence):
    folder = hostile(lambda folder: change(folder, "config.json", **changes))
    assert sentence in refused_conversion(capsys, tmp_path, folder)


def test_adapters_are_refused(hostile, tmp_path, capsys):
    assert "contains a PEFT adapter" in refused_conversion(capsys, tmp_path, hostile(adapter))


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json", "chat_template.jinja"])
def test_a_pipe_in_a_folder_does_not_block(hostile, tmp_path, capsys, name):
    def attack(folder):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    assert f"{name} is not a regular file" in refused_conversion(capsys, tmp_path, hostile(attack))


@pytest.mark.parametrize("text", ["[]", "3", '{"a": NaN}', "[" * 10_000, "\xff", ""])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json"])
def test_json_that_makes_no_sense_is_refused(hostile, tmp_path, capsys, name, text):
    folder = hostile(lambda folder: (folder / name).write_text(text, encoding="latin-1"))
    assert name in refused_conversion(capsys, tmp_path, folder)


def test_names_on_the_hub_are_checked_like_folders(hostile, tmp_path, monkeypatch, capsys):
    """Their small files are fetched first; here a folder plays the Hub."""
    from transformers import utils

    folder = hostile(lambda folder: index(folder, "weights.bin"))

    def fetched(source, name, **_):
        assert source == "someone/model"
        return str(folder / name) if (folder / name).exists() else None

    monkeypatch.setattr(utils, "cached_file", fetched)
    assert "weights of someone/model are pickled" in refused_conversion(capsys, tmp_path, "someone/model")
    own_model(folder)
    assert "someone/model comes with Python code of its own" in refused_conversion(capsys, tmp_path, "someone/model")


def command(*words, marker, **settings):
    """The real command in a process of its own."""
    variables = os.environ | {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(marker.parent / "modules")}
    return subprocess.Popen(
        [sys.executable, "-m", "contextready", *map(str, words)],
        env=variables | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **settings,
    )


def finish(process, answer=None):
    out, err = process.communicate(answer, timeout=100)
    return process.returncode, out, err


def test_no_stdin_can_allow_code(hostile, tmp_path):
    """A terminal on which someone types y, a pipe that says y, and a closed one."""
    folders = [hostile(own_model, "a"), hostile(own_tokenizer, "b")]
    (tmp_path / "c").mkdir()
    ours, theirs = pty.openpty()
    os.write(ours, b"y\ny\ny\n\x04")
    marker = tmp_path / "ran"
    running = [
        (command("generate", folders[0], marker=marker, stdin=theirs), None),
        (command("generate", folders[1], marker=marker, stdin=subprocess.PIPE), "y\ny\n"),
        (command("convert", folders[1], tmp_path / "out", marker=marker, stdin=subprocess.DEVNULL), None),
    ]
    for process, answer in running:
        code, out, err = finish(process, answer)
        assert (code, out) == (2, "")
        assert "comes with Python code of its own" in err
        assert err.count("\n") == 1
    os.close(ours)
    os.close(theirs)
    assert not (tmp_path / "out").exists()


def test_the_option_allows_code(base, tmp_path):
    """Code that someone asked for: a model that only it defines runs, and cannot be converted; a tokenizer can."""
    ran, data = tmp_path / "ran", make_data(tmp_path / "corpus", tokenizer=str(base))
    for name, attack in (("a", own_model), ("b", own_tokenizer), ("c", own_tokenizer_in_a_list)):
        attack(hostile_copy(base, tmp_path / name, ran))
    commands = [
        ["generate", "a", "river", "--max-tokens", "3", "--trust-remote-code"],
        ["convert", "a", "a-out", "--trust-remote-code"],
        ["convert", "b", "b-out", "--trust-remote-code"],
        ["convert", "c", "c-out", "--trust-remote-code"],
        ["eval", "a", "--data", str(data), "--passes", "1", "--tokens", "64", "--trust-remote-code"],
        ["generate", "a", "river"],
    ]
    # In another process, because the code registers its classes.
    source = f"from contextready.cli.main import main\nprint([main(words) for words in {commands}])"
    done = subprocess.run(
        [sys.executable, "-c", source],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules"), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.stdout.endswith("[0, 2, 0, 2, 0, 2]\n"), done.stderr
    assert ran.exists()
    assert "a cannot be converted: only its own code defines Model" in done.stderr
    assert "a comes with Python code of its own" in done.stderr
    # transformers loads this, but cannot save it.
    assert "crt convert: The tokenizer cannot be saved: " in done.stderr
    assert done.stderr.count("\n") == 3
    assert (tmp_path / "b-out" / "model.safetensors").exists()


def test_a_converted_folder_is_known_from_the_start(converted):
    """Its auto_map names code that is part of this package, also before that part was imported."""
    source = f"from contextready.hf.load import load_tokenizer\nprint(len(load_tokenizer({str(converted[0])!r})))"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=100)
    assert done.stdout == f"{KNOWN}\n", done.stderr


@pytest.mark.parametrize("name", ["load_lm", "load_tokenizer"])
def test_the_hub_is_not_contacted_for_a_model_on_disk(base, monkeypatch, name):
    """Whatever the folder says, and whatever transformers makes of it."""
    import huggingface_hub
    from transformers import AutoConfig, AutoTokenizer

    from contextready.hf import load

    asked = []

    def recording(**arguments):
        asked.append(huggingface_hub.is_offline_mode())
        raise OSError("enough")

    for one in (AutoConfig, AutoTokenizer):
        monkeypatch.setattr(one, "from_pretrained", recording)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(ContextReadyError, match="enough"):
        getattr(load, name)(str(base))
    assert asked == [True]
    assert not huggingface_hub.is_offline_mode()


def test_a_gguf_beside_another_of_its_name(tmp_path, monkeypatch):
    """The file that was named is read, not one of the same name in the current folder."""
    from contextready.hf.load import load_lm

    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "x.gguf").write_bytes(b"GGUF\x03\0\0\0" + bytes(16))
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ContextReadyError, match="does not exist"):
        load_lm(str(tmp_path / "x.gguf"))


def test_models_of_a_saved_run_do_not_run_code(tmp_path):
    from contextready.hf.finetune import rebuild
    from contextready.runs.config import PretrainedModelConfig

    (tmp_path / "code.py").write_text(CODE.format(marker=str(tmp_path / "ran")))
    for base_config in (
        {"model_type": "vit", "auto_map": {"AutoModelForCausalLM": f"{tmp_path}--code.Model"}},
        {"model_type": "unheard_of"},
        tiny_lm("llama", vocab_size=KNOWN).config.to_dict() | {"_attn_implementation": "someone/attention"},
    ):
        described = {"base_config": base_config, "structure": {}, "vocab_size": KNOWN, "generation_config": {}}
        with pytest.raises(ContextReadyError, match="The checkpoint's pretrained model"):
            rebuild(PretrainedModelConfig("x"), described)
    assert not (tmp_path / "ran").exists()
