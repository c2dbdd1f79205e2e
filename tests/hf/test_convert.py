"""`crt convert`: the same function in another format, there and back."""

import json
import re
import shutil
from dataclasses import asdict

import numpy as np
import pytest
import torch
from hf_helpers import (
    KNOWN,
    TEXTS,
    code_of_card,
    crt,
    generated,
    logits,
    randomise,
    refused,
    save,
    some_tokens,
    tiny_lm,
)
from train_helpers import make_data, run
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import contextready.hf.modeling  # noqa: F401  (registers its classes)
from contextready.data.tokenizer import Tokenizer
from contextready.hf.bundle import file_stem, needed_modules
from contextready.hf.modeling import ContextReadyForCausalLM
from contextready.model.correction import CORRECTIONS
from contextready.runs.checkpoint import open_checkpoint

READY = {
    **{kind: {"correction": kind} for kind in CORRECTIONS},
    "window": {"window": 5, "layers": 2},
    "bias": {"bias": True, "dropout": 0.1},
    "zero": {"correction_init": "zero", "rope_base": 500.0},
    "streamed": {"gradient": "bptt"},
    "as the author": {
        **{"bias": True, "head_bias": True, "rope": "integer", "init": "torch", "correction": "concat_z"},
        **{"dropout": 0.2, "attention_dropout": 0.2, "dropout_at": "embedding", "decay": "all"},
    },
    "like Qwen3": {
        **{"norm": "rms", "norm_eps": 1e-6, "ffn": "swiglu", "ffn_width": 40, "heads": 4, "kv_heads": 2},
        **{"head_width": 6, "qk_norm": True, "tied_embeddings": True},
    },
    "like SmolLM3": {
        **{"norm": "rms", "ffn": "swiglu", "layers": 2, "no_rope_every": 2, "qkv_bias": True, "window": 5},
        **{"rope": "llama3", "rope_factor": 4.0, "rope_length": 16},
    },
}
PLAIN = {
    "plain": {"correction": None},
    "plain, window, bias": {"correction": None, "window": 5, "bias": True},
    "plain, extra FFN": {"correction": None, "extra_ffn": True},
    "plain, tied": {"correction": None, "tied_embeddings": True, "norm": "rms", "rope": "linear", "rope_factor": 2.0},
    "plain, head bias": {"correction": None, "head_bias": True, "rope": "integer", "dropout_at": "embedding"},
}
RUNS = READY | PLAIN


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Every kind of run, two steps long, converted and converted back."""
    place = tmp_path_factory.mktemp("convert")
    data = make_data(place / "corpus")
    for name, changes in RUNS.items():
        run(data, place / "runs" / name, **{"steps": 2, "eval_every": 1, "save_every": 1} | changes)
        crt("convert", place / "runs" / name, place / "hf" / name)
        crt("convert", place / "hf" / name, place / "back" / name)
    return place


# A pretrained model.


def test_a_converted_model_is_the_same_function(base, converted):
    out, _ = converted
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in (base, out))
    assert type(after) is ContextReadyForCausalLM
    assert type(after.lm) is type(before)
    tokens = some_tokens()
    assert torch.equal(logits(after, tokens), logits(before, tokens))
    assert torch.equal(logits(after, tokens, passes=4), logits(before, tokens))
    assert not after.model.correction.ffn.down.weight.any()
    assert after.model.correction.ffn.up.weight.any(), "a correction that is all zero never learns"
    for key, tensor in before.state_dict().items():
        assert torch.equal(after.lm.state_dict()[key], tensor), key
    assert (
        AutoTokenizer.from_pretrained(out)(TEXTS)["input_ids"]
        == AutoTokenizer.from_pretrained(base)(TEXTS)["input_ids"]
    )


def test_its_cost_is_counted_by_hand(converted):
    """Llama: V=300, C=32, 2 layers, 4 heads of 8 channels, 2 of keys and values, a gated FFN of 48; untied."""
    out, said = converted
    block_matrices = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48
    model = 2 * 300 * 32 + 2 * (block_matrices + 2 * 32) + 32
    correction = 32 * 4 * 32 + 4 * 32 * 32
    macs = 2 * block_matrices + 300 * 32
    expected = {
        "model parameters": f"{model:,}",
        "correction parameters": f"{correction + 32:,} (+{100 * (correction + 32) / model:.2f}%)",
        "model FLOPs per token (multiply-accumulates, without attention scores)": f"{macs:,}",
        "correction FLOPs per token": f"{correction:,} (+{100 * correction / macs:.2f}%)",
        "KV cache per token (unchanged)": f"{2 * 2 * 2 * 8 * 4} bytes",
        "additional state per stream (z)": f"{32 * 4} bytes",
    }
    *lines, last = said.splitlines()
    assert dict(line.split(": ") for line in lines) == expected
    assert str(out) in last
    card = (out / "README.md").read_text()
    for name, value in expected.items():
        assert f"| {name} | {value} |" in card
    assert sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(out).parameters()) == model + correction + 32


def test_json_has_the_same_costs(base, tmp_path):
    block_matrices = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 3 * 32 * 48
    correction = 32 * 4 * 32 + 4 * 32 * 32
    assert json.loads(crt("convert", base, tmp_path / "out", "--json")) == {
        "out": str(tmp_path / "out"),
        "format": "hugging_face",
        "costs": {
            "model_parameters": 2 * 300 * 32 + 2 * (block_matrices + 2 * 32) + 32,
            "correction_parameters": correction + 32,
            "model_macs_per_token": 2 * block_matrices + 300 * 32,
            "correction_macs_per_token": correction,
            "kv_bytes_per_token": 2 * 2 * 2 * 8 * 4,
            "carried_bytes": 32 * 4,
        },
        "training": None,
        "not_native": None,
    }


def test_json_of_a_run_has_its_perplexity(runs, tmp_path):
    for name in ("add", "plain", "streamed"):
        progress = open_checkpoint(runs / "runs" / name).progress
        found = json.loads(crt("convert", runs / "runs" / name, tmp_path / name, "--json"))
        assert found["training"] == {
            "step": 2,
            "tokens": 128,
            "best_step": progress.best_step,
            "best_perplexity": pytest.approx(np.exp(progress.best_loss)),
            "passes": {"add": 3, "plain": 1, "streamed": None}[name],
        }
        assert (found["costs"] is None) == (name == "plain")
    back = json.loads(crt("convert", tmp_path / "add", tmp_path / "back", "--json"))
    assert back == {
        "out": str(tmp_path / "back"),
        "format": "checkpoint",
        "costs": None,
        "training": None,
        "not_native": None,
    }


def test_the_code_of_its_card_runs(converted, capsys):
    out, _ = converted
    space = {}
    exec(code_of_card(out), space)
    assert type(space["model"]) is ContextReadyForCausalLM
    assert capsys.readouterr().out.startswith("Once upon a time")


def test_nobody_learns_where_it_lay(base, converted):
    out, _ = converted
    for file in out.iterdir():
        assert str(base.parent).encode() not in file.read_bytes(), file.name


def test_everything_that_would_be_uploaded_is_in_the_folder(converted):
    """`push_to_hub` saves into a folder and uploads that."""
    out, _ = converted
    config = json.loads((out / "config.json").read_text())
    assert config["auto_map"] == {
        "AutoConfig": "contextready_hf_modeling.ContextReadyConfig",
        "AutoModelForCausalLM": "contextready_hf_modeling.ContextReadyForCausalLM",
    }
    for reference in config["auto_map"].values():
        file, _, name = reference.partition(".")
        assert re.search(rf"\b{name}\b", (out / f"{file}.py").read_text())
    assert {path.stem for path in out.glob("*.py")} == {file_stem(module) for module in needed_modules()}
    expected = {"config.json", "generation_config.json", "model.safetensors", "README.md"}
    expected |= {"tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in out.iterdir() if path.suffix != ".py"} == expected


def test_push_to_hub_is_inherited_and_saves_the_same(converted, tmp_path):
    out, _ = converted
    assert ContextReadyForCausalLM.push_to_hub is PreTrainedModel.push_to_hub
    AutoModelForCausalLM.from_pretrained(out).save_pretrained(tmp_path / "pushed")
    there = {path.name for path in out.iterdir() if not path.name.startswith("tokenizer")}
    assert {path.name for path in (tmp_path / "pushed").iterdir()} == there - {"README.md"}
    for name in there - {"README.md", "config.json"}:
        assert (tmp_path / "pushed" / name).read_bytes() == (out / name).read_bytes(), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_type_of_the_weights_is_kept(tmp_path, tokenizer, dtype):
    save(tmp_path / "base", tiny_lm("llama-tied", vocab_size=KNOWN).to(dtype), tokenizer)
    said = crt("convert", tmp_path / "base", tmp_path / "out")
    assert f"KV cache per token (unchanged): {2 * 2 * 2 * 8 * 2} bytes\n" in said
    from safetensors.torch import load_file

    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / "model.safetensors").values()} == {dtype}
    before, after = (AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto") for name in ("base", "out"))
    assert after.dtype == dtype
    assert after.get_output_embeddings().weight is after.get_input_embeddings().weight
    tokens = some_tokens()
    assert torch.equal(logits(after, tokens), logits(before, tokens))


def test_options(tmp_path, base):
    crt("convert", base, tmp_path / "out", "--correction", "concat", "--bias", "--passes", "3")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (model.config.correction, model.config.passes) == ("concat", 3)
    assert model.model.correction.norm.weight.shape == (64,)
    assert model.model.correction.ffn.up.bias is not None


# Runs of this package, there and back.


@pytest.mark.parametrize("name", RUNS)
def test_a_run_comes_back_bit_for_bit(runs, name):
    before, after = open_checkpoint(runs / "runs" / name), open_checkpoint(runs / "back" / name)
    ours, theirs = after.tensors("model"), before.tensors("model")
    assert ours.keys() == theirs.keys()
    for key in ours:
        assert ours[key].dtype == theirs[key].dtype
        assert torch.equal(ours[key], theirs[key]), key
    for file in ("config.json", "trainer.json"):
        read = [json.loads((checkpoint.folder / file).read_text()) for checkpoint in (before, after)]
        assert {k: v for k, v in read[0].items() if k != "rng"} == {k: v for k, v in read[1].items() if k != "rng"}
    assert asdict(after.progress) == asdict(before.progress)
    assert (after.folder / "tokenizer.json").read_bytes() == (before.folder / "tokenizer.json").read_bytes()
    assert (runs / "hf" / name / "tokenizer.json").read_bytes() == (before.folder / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("name", RUNS)
@torch.no_grad()
def test_a_run_is_the_same_function_in_hugging_face(runs, name):
    native, tokens = open_checkpoint(runs / "runs" / name).model(), some_tokens()
    model = AutoModelForCausalLM.from_pretrained(runs / "hf" / name)
    if name in PLAIN:
        assert torch.equal(logits(model, tokens), native(tokens))
        return
    exact = tokens.shape[1] + 1
    assert torch.equal(logits(model, tokens, passes=exact), native(tokens, passes=exact))
    assert torch.equal(logits(model, tokens, passes=2), native(tokens, passes=2))
    assert not torch.equal(native(tokens, passes=1), native(tokens, passes=2))
    assert model.config.passes == (5 if name == "streamed" else 3)


def test_a_run_keeps_its_places_of_dropout_in_hugging_face(runs):
    native = open_checkpoint(runs / "runs" / "as the author").model()
    model = AutoModelForCausalLM.from_pretrained(runs / "hf" / "as the author")
    backbone = model.lm.model.native
    assert (backbone.config.rope, backbone.config.init, backbone.config.head_bias) == ("integer", "torch", True)
    for theirs, ours in ((backbone, native.backbone), (model.model.correction, native.correction)):
        rates = [
            {name: part.p for name, part in whole.named_modules() if isinstance(part, torch.nn.Dropout)}
            for whole in (theirs, ours)
        ]
        assert rates[0] == rates[1]
        assert 0.2 in rates[0].values()
    tokens = some_tokens()
    model.train(), native.train()
    torch.manual_seed(0)
    found = model(tokens, passes=3).logits
    torch.manual_seed(0)
    assert torch.equal(found, native(tokens, passes=3))


@pytest.mark.parametrize("name", ["add", "plain"])
def test_a_run_has_the_same_tokens_in_hugging_face(runs, name):
    native = Tokenizer.load(open_checkpoint(runs / "runs" / name).folder)
    theirs = AutoTokenizer.from_pretrained(runs / "hf" / name)
    ids = native.encode_batch(TEXTS)
    assert theirs(TEXTS)["input_ids"] == ids
    assert [theirs.decode(each) for each in ids] == [native.decode(each) for each in ids] == TEXTS
    assert (theirs.eos_token_id, theirs.bos_token_id) == (native.end_id, native.end_id)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_writes_the_same_text_in_every_format(runs, name):
    text = generated(runs / "runs" / name)
    assert text.strip()
    assert generated(runs / "back" / name) == text
    assert generated(runs / "hf" / name) == text


def test_the_card_of_a_run_says_what_was_measured(runs):
    progress = open_checkpoint(runs / "runs" / "add").progress
    card = (runs / "hf" / "add" / "README.md").read_text()
    assert "2 steps, 128 tokens" in card
    assert f"perplexity {np.exp(progress.best_loss):.3f} at step {progress.best_step} (K=3)" in card


def test_the_best_checkpoint_of_a_run(runs, tmp_path):
    shutil.copytree(runs / "runs" / "add", tmp_path / "run")
    newest = open_checkpoint(tmp_path / "run").folder / "trainer.json"
    from train_helpers import describe_again

    described = json.loads(newest.read_text()) | {"best_step": 1}
    newest.write_text(json.dumps(described))
    describe_again(newest.parent, "trainer.json")
    crt("convert", tmp_path / "run", tmp_path / "best", "--best")
    crt("convert", tmp_path / "best", tmp_path / "back")
    best, back = open_checkpoint(tmp_path / "run", best=True), open_checkpoint(tmp_path / "back")
    assert back.progress.step == best.progress.step == 1
    for key, tensor in best.tensors("model").items():
        assert torch.equal(back.tensors("model")[key], tensor)


def test_a_model_made_in_transformers_becomes_a_checkpoint(tmp_path, tokenizer):
    """No run of this package: settings are those of the model."""
    lm = tiny_lm("own", vocab_size=KNOWN).float()
    model = ContextReadyForCausalLM.wrap(lm, correction="concat", passes=4)
    randomise(model)
    save(tmp_path / "hf", model, tokenizer)
    crt("convert", tmp_path / "hf", tmp_path / "native")
    checkpoint = open_checkpoint(tmp_path / "native")
    assert checkpoint.config["train"]["passes"] == "4"
    tokens = some_tokens()
    with torch.no_grad():
        assert torch.equal(checkpoint.model()(tokens, passes=10), logits(model, tokens, passes=10))
    crt("convert", tmp_path / "native", tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(logits(again, tokens, passes=10), logits(model, tokens, passes=10))


def test_a_context_ready_model_with_an_extra_ffn_is_refused(runs, tmp_path, capsys):
    run(runs / "corpus" / "data", tmp_path / "run", steps=1, extra_ffn=True)
    said = refused(capsys, "convert", tmp_path / "run", tmp_path / "out")
    assert "cannot be converted" in said
    assert not (tmp_path / "out").exists()
