"""What `crt convert` refuses: one sentence, and nothing written."""

import json
import shutil
import sys

import pytest
import torch
from hf_helpers import KNOWN, LLAMA_LIKE, refused_conversion, save, tiny_lm
from transformers import AutoConfig, AutoModelForCausalLM

from contextready.errors import ContextReadyError
from contextready.hf.structure import find_structure


def changed_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_what_is_no_model_is_refused(tmp_path, capsys):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("nothing")
    (tmp_path / "file.txt").write_text("nothing")
    assert "is not a run or checkpoint" in refused_conversion(capsys, tmp_path, tmp_path / "folder")
    assert "There is no model at" in refused_conversion(capsys, tmp_path, tmp_path / "missing")
    assert "There is no model at" in refused_conversion(capsys, tmp_path, tmp_path / "file.txt")
    assert "There is no model at" in refused_conversion(capsys, tmp_path, "no/such/name")


def test_a_folder_that_exists_is_left_alone(base, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    assert "already exists; delete it or choose another name" in refused_conversion(capsys, tmp_path, base)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]


def test_unknown_corrections_are_refused(base, tmp_path, capsys):
    assert "Unknown correction 'ad'; did you mean 'add'?" in refused_conversion(
        capsys, tmp_path, base, "--correction", "ad"
    )
    for kind in ("tied", "block_head"):
        assert f"correction={kind} has no output layer" in refused_conversion(
            capsys, tmp_path, base, "--correction", kind
        )


def test_no_passes_at_all_are_refused(base, tmp_path, capsys):
    assert "passes" in refused_conversion(capsys, tmp_path, base, "--passes", "0")


@pytest.mark.parametrize("names", [["transformers"], ["gguf"], ["accelerate"]])
def test_a_missing_package_is_named(base, tmp_path, capsys, monkeypatch, names):
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "x.gguf").write_bytes(b"GGUF\x03\0\0\0" + bytes(16))
    source = base if names == ["transformers"] else tmp_path / "x.gguf"
    said = refused_conversion(capsys, tmp_path, source)
    assert f"The package {names[0]} is not installed; install it with: pip install" in said


def test_pickled_weights_are_refused(base, tmp_path, capsys):
    shutil.copytree(base, tmp_path / "model")
    lm = AutoModelForCausalLM.from_pretrained(base)
    torch.save(lm.state_dict(), tmp_path / "model" / "pytorch_model.bin")
    (tmp_path / "model" / "model.safetensors").unlink()
    said = refused_conversion(capsys, tmp_path, tmp_path / "model")
    assert "pickled (pytorch_model.bin)" in said
    assert "safetensors" in said
    (tmp_path / "model" / "pytorch_model.bin").unlink()
    assert "contains no weights" in refused_conversion(capsys, tmp_path, tmp_path / "model")


@pytest.mark.parametrize("size", [0, 5, 1000, -1])
def test_truncated_weights_are_refused(base, tmp_path, capsys, size):
    shutil.copytree(base, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    assert "is not a complete safetensors file" in refused_conversion(capsys, tmp_path, tmp_path / "model")


@pytest.mark.parametrize("text", ["", "{nope", "[1]", '{"hidden_size": 3}'])
def test_a_config_that_says_nothing_is_refused(base, tmp_path, capsys, text):
    shutil.copytree(base, tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(text)
    assert str(tmp_path / "model") in refused_conversion(capsys, tmp_path, tmp_path / "model")


def test_a_broken_config_is_named(base, tmp_path, capsys):
    shutil.copytree(base, tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text("{nope")
    assert "config.json" in refused_conversion(capsys, tmp_path, tmp_path / "model")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "no_such_model"}, "cannot be loaded as a model"),
        ({"hidden_size": 64, "head_dim": 16}, "21 are missing or have another shape"),
        ({"vocab_size": 280}, "2 are missing or have another shape"),
    ],
)
def test_a_config_of_another_model_is_refused(base, tmp_path, capsys, changes, sentence):
    shutil.copytree(base, tmp_path / "model")
    changed_config(tmp_path / "model", **changes)
    assert sentence in refused_conversion(capsys, tmp_path, tmp_path / "model")


def test_missing_weights_are_refused(base, tmp_path, capsys):
    shutil.copytree(base, tmp_path / "model")
    changed_config(tmp_path / "model", num_hidden_layers=3)
    refused_conversion(capsys, tmp_path, tmp_path / "model")


def test_a_model_without_tokenizer_is_refused(base, tmp_path, capsys):
    shutil.copytree(base, tmp_path / "model")
    for file in (tmp_path / "model").glob("tokenizer*"):
        file.unlink()
    assert "The tokenizer of" in refused_conversion(capsys, tmp_path, tmp_path / "model")


SMALL = LLAMA_LIKE | {"vocab_size": KNOWN}
OTHER_MODELS = {
    "t5": ("T5ForConditionalGeneration", {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}),
    "distilbert": ("DistilBertForMaskedLM", {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}),
    "opt": ("OPTForCausalLM", SMALL | {"ffn_dim": 48, "word_embed_proj_dim": 16}),
    "mamba": ("MambaForCausalLM", SMALL | {"state_size": 4}),
    "lfm2": ("Lfm2ForCausalLM", SMALL | {"layer_types": ["conv", "full_attention"], "block_ff_dim": 48}),
    "rwkv": ("RwkvForCausalLM", SMALL | {"attention_hidden_size": 32}),
    "jamba": (
        "JambaForCausalLM",
        SMALL | {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "num_experts": 2},
    ),
}
WHY = {
    "t5": "is an encoder-decoder model (t5)",
    "distilbert": "is not a causal language model",
    "opt": "its embeddings have width 16 and its blocks 32",
    "mamba": "repeated passes can rewind only keys and values",
    "lfm2": "it has layers of type conv",
    "rwkv": "it has a recurrent state",
    "jamba": "repeated passes can rewind only keys and values",
}


def save_other(folder, kind, name, settings, tokenizer):
    import transformers

    settings = {"vocab_size": KNOWN} | {key: value for key, value in settings.items() if not key.startswith("pad_")}
    return save(folder, getattr(transformers, name)(AutoConfig.for_model(kind, **settings)), tokenizer)


@pytest.mark.parametrize("kind", OTHER_MODELS)
def test_other_kinds_of_models_are_refused(tmp_path, tokenizer, capsys, kind):
    save_other(tmp_path / "model", kind, *OTHER_MODELS[kind], tokenizer)
    assert WHY[kind] in refused_conversion(capsys, tmp_path, tmp_path / "model")


@pytest.mark.parametrize("name", ["BertForMaskedLM", "BertLMHeadModel"])
def test_a_model_that_sees_the_future_is_refused(tmp_path, tokenizer, capsys, name):
    settings = {key: value for key, value in SMALL.items() if key not in ("head_dim", "num_key_value_heads")}
    save_other(tmp_path / "model", "bert", name, settings, tokenizer)
    refused_conversion(capsys, tmp_path, tmp_path / "model")


def test_blocks_that_are_not_found_are_refused():
    lm = tiny_lm("llama")
    lm.config.num_hidden_layers = 7
    with pytest.raises(ContextReadyError, match=r"its blocks were not found \(it has no list of 7 modules"):
        find_structure(lm)


def test_a_head_that_does_something_else_is_refused():
    lm = tiny_lm("llama")
    forward = lm.forward

    def shifted(**arguments):
        outputs = forward(**arguments)
        outputs.logits = outputs.logits + 1.0
        return outputs

    lm.forward = shifted
    with pytest.raises(ContextReadyError, match="do not reproduce its logits"):
        find_structure(lm)
