"""`crt convert`: the same function in another format, alone in its folder, there and back; and what it refuses."""

import ast
import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict

import numpy as np
import pytest
import torch
from hf_helpers import KNOWN, LLAMA_LIKE, randomise, refused, save, tiny_lm, train_tokenizer
from train_helpers import make_data, run
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import contextready.hf.modeling  # noqa: F401  (registers its classes)
from contextready.cli import main
from contextready.data.tokenizer import Tokenizer
from contextready.errors import ContextReadyError
from contextready.hf.bundle import file_stem, needed_modules
from contextready.hf.modeling import ContextReadyForCausalLM
from contextready.hf.structure import find_structure
from contextready.train.checkpoint import open_checkpoint

READY = {
    **{kind: {"correction": kind} for kind in ("add", "concat", "blind", "block_head", "tied", "memoryless")},
    "window": {"window": 5, "layers": 2},
    "bias": {"bias": True, "dropout": 0.1},
    "zero": {"correction_init": "zero", "rope_base": 500.0},
    "streamed": {"gradient": "bptt"},
}
PLAIN = {
    "plain": {"correction": None},
    "plain, window, bias": {"correction": None, "window": 5, "bias": True},
    "plain, extra FFN": {"correction": None, "extra_ffn": True},
}
RUNS = READY | PLAIN
TEXTS = [
    "river stone light",
    "  two  spaces ",
    "it 's , isn't it ?",
    "naïve — 日本 \N{SNOWMAN}",
    "a\n\n\tb",
    "",
    "0" * 40,
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("convert")


@pytest.fixture(scope="module")
def tokenizer(place):
    return train_tokenizer(place / "tokenizer")


@pytest.fixture(scope="module")
def base(place, tokenizer):
    """A small Llama on disk: only read, never changed."""
    return save(place / "base", tiny_lm("llama", vocab_size=KNOWN).float(), tokenizer)


@pytest.fixture(scope="module")
def converted(place, base):
    """What the command made of it, and what it said."""
    return place / "converted", crt("convert", base, place / "converted")


@pytest.fixture(scope="module")
def runs(place):
    """Every kind of run, two steps long, converted and converted back."""
    data = make_data(place / "corpus")
    for name, changes in RUNS.items():
        folder = place / "runs" / name
        run(data, folder, **{"steps": 2, "eval_every": 1, "save_every": 1} | changes)
        crt("convert", folder, place / "hf" / name)
        crt("convert", place / "hf" / name, place / "back" / name)
    return place


def crt(*arguments):
    """A command that goes well; returns what it printed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main([str(word) for word in arguments]) == 0
    return out.getvalue()


def some_tokens(rows=2, length=9):
    return torch.randint(KNOWN, (rows, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits(model, tokens, **settings):
    return model(tokens, **settings).logits


def code_of_card(folder):
    (block,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.S)
    assert 'folder = "."' in block
    return block.replace('folder = "."', f"folder = {str(folder)!r}")


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
        "parameters of the model": f"{model:,}",
        "parameters of the correction": f"{correction + 32:,} (+{100 * (correction + 32) / model:.2f}%)",
        "FLOPs per token of the model (multiply-accumulates, attention scores left out)": f"{macs:,}",
        "FLOPs per token of the correction": f"{correction:,} (+{100 * correction / macs:.2f}%)",
        "KV cache per token, as before": f"{2 * 2 * 2 * 8 * 4} bytes",
        "carried besides by a stream (z)": f"{32 * 4} bytes",
    }
    *lines, last = said.splitlines()
    assert dict(line.split(": ") for line in lines) == expected
    assert str(out) in last
    card = (out / "README.md").read_text()
    for name, value in expected.items():
        assert f"| {name} | {value} |" in card
    assert sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(out).parameters()) == model + correction + 32


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
    assert f"KV cache per token, as before: {2 * 2 * 2 * 8 * 2} bytes\n" in said
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


# Without this package.


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
def trained(place, converted, runs):
    """Models whose correction matters, saved by this package: around a Llama, and around its own transformer."""
    model = AutoModelForCausalLM.from_pretrained(converted[0])
    randomise(model)
    model.save_pretrained(place / "trained" / "llama")
    AutoTokenizer.from_pretrained(converted[0]).save_pretrained(place / "trained" / "llama")
    shutil.copyfile(converted[0] / "README.md", place / "trained" / "llama" / "README.md")
    shutil.copytree(runs / "hf" / "window", place / "trained" / "own")
    return place / "trained"


@pytest.fixture(scope="module")
def elsewhere(trained):
    """What a process without this package made of them, and another of what that one saved."""
    # Whoever comes first finds nothing registered: the own ones, which need that most.
    names = ("own", "llama")
    first = {"card of plain": {"code": code_of_card(trained.parent / "hf" / "plain")}}
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


def test_the_card_of_a_plain_run_runs(elsewhere, runs):
    """By itself, or it says that it needs this package."""
    says_so = "import contextready.hf" in code_of_card(runs / "hf" / "plain")
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


@pytest.mark.parametrize("name", ["add", "plain"])
def test_a_run_has_the_same_tokens_in_hugging_face(runs, name):
    native = Tokenizer.load(open_checkpoint(runs / "runs" / name).folder)
    theirs = AutoTokenizer.from_pretrained(runs / "hf" / name)
    ids = native.encode_batch(TEXTS)
    assert theirs(TEXTS)["input_ids"] == ids
    assert [theirs.decode(each) for each in ids] == [native.decode(each) for each in ids] == TEXTS
    assert (theirs.eos_token_id, theirs.bos_token_id) == (native.end_id, native.end_id)


def generated(folder):
    return crt("generate", folder, "river stone", "--max-tokens", "8", "--seed", "3")


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
    assert checkpoint.config["train"]["passes"] == 4
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


def test_a_converted_pretrained_model_has_no_native_form(converted, tmp_path, capsys):
    said = refused(capsys, "convert", converted[0], tmp_path / "out")
    assert "LlamaForCausalLM, which has no native form" in said
    assert not list(tmp_path.iterdir())


# GGUF.


def write_gguf(path, lm, tokenizer):
    """A Llama in the format of llama.cpp, all in float32."""
    import gguf

    config, writer = lm.config, gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    inner = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(inner["vocab"], key=inner["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    kinds = [gguf.TokenType.CONTROL if i == tokenizer.eos_token_id else gguf.TokenType.NORMAL for i in range(KNOWN)]
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in inner["merges"]])
    writer.add_bos_token_id(tokenizer.eos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)

    def interleaved(w, heads):
        """llama.cpp turns neighbours where transformers turns halves."""
        return w.reshape(heads, 2, -1, w.shape[1]).swapaxes(1, 2).reshape(w.shape)

    state = {name: tensor.numpy() for name, tensor in lm.state_dict().items()}
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", state["model.norm.weight"])
    writer.add_tensor("output.weight", state["lm_head.weight"])
    names = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for i in range(config.num_hidden_layers):
        for theirs, ours in names.items():
            w = state[f"model.layers.{i}.{ours}.weight"]
            w = interleaved(w, heads[theirs]) if theirs in heads else w
            writer.add_tensor(f"blk.{i}.{theirs}.weight", np.ascontiguousarray(w))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_converted(tmp_path, tokenizer):
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    lm = tiny_lm("llama", vocab_size=KNOWN).float()
    write_gguf(tmp_path / "x.gguf", lm, tokenizer)
    crt("convert", tmp_path / "x.gguf", tmp_path / "out", "--correction", "blind")
    model, tokens = AutoModelForCausalLM.from_pretrained(tmp_path / "out"), some_tokens()
    assert type(model.lm) is type(lm)
    assert torch.equal(logits(model, tokens), logits(lm, tokens))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    texts = [text for text in TEXTS if text]
    assert theirs(texts, add_special_tokens=False)["input_ids"] == tokenizer(texts)["input_ids"]
    assert generated(tmp_path / "out").strip()


# What is refused.


def refused_conversion(capsys, tmp_path, source, *options):
    """One sentence, and nothing was written, not even for a while."""
    out = tmp_path / "out"
    before = sorted(path.name for path in tmp_path.iterdir())
    said = refused(capsys, "convert", source, out, *options)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    return said


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
    assert "exists already; choose another folder" in refused_conversion(capsys, tmp_path, base)
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
    assert f"This needs the package {names[0]}; install it with: pip install 'contextready[hf]'" in said


def test_pickled_weights_are_refused(base, tmp_path, capsys):
    shutil.copytree(base, tmp_path / "model")
    lm = AutoModelForCausalLM.from_pretrained(base)
    torch.save(lm.state_dict(), tmp_path / "model" / "pytorch_model.bin")
    (tmp_path / "model" / "model.safetensors").unlink()
    said = refused_conversion(capsys, tmp_path, tmp_path / "model")
    assert "pickled (pytorch_model.bin)" in said
    assert "safetensors" in said
    (tmp_path / "model" / "pytorch_model.bin").unlink()
    assert "holds no weights" in refused_conversion(capsys, tmp_path, tmp_path / "model")


@pytest.mark.parametrize("size", [0, 5, 1000, -1])
def test_truncated_weights_are_refused(base, tmp_path, capsys, size):
    shutil.copytree(base, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    assert "cannot be opened as a model" in refused_conversion(capsys, tmp_path, tmp_path / "model")


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
        ({"model_type": "no_such_model"}, "cannot be opened as a model"),
        ({"hidden_size": 64, "head_dim": 16}, "21 are missing or of another shape"),
        ({"vocab_size": 280}, "2 are missing or of another shape"),
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
    assert "no tokenizer" in refused_conversion(capsys, tmp_path, tmp_path / "model")


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
    "distilbert": "is no causal language model",
    "opt": "embeds tokens in 16 channels and its blocks have 32",
    "mamba": "which a correction's passes cannot rewind",
    "lfm2": "layers of the kind conv besides keys and values",
    "rwkv": "a state besides keys and values",
    "jamba": "which a correction's passes cannot rewind",
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
    with pytest.raises(ContextReadyError, match="The blocks of LlamaForCausalLM were not found: no list of 7 modules"):
        find_structure(lm)


def test_a_head_that_does_something_else_is_refused():
    lm = tiny_lm("llama")
    forward = lm.forward

    def shifted(**arguments):
        outputs = forward(**arguments)
        outputs.logits = outputs.logits + 1.0
        return outputs

    lm.forward = shifted
    with pytest.raises(ContextReadyError, match="is not embed, blocks, head"):
        find_structure(lm)


@pytest.mark.parametrize("content", [b"", b"nope" * 9, b"GGUF", b"GGUF\x09\0\0\0" + bytes(99), b"GGUF\x03\0\0\0"])
def test_what_is_no_gguf_file_is_refused(tmp_path, capsys, content):
    (tmp_path / "x.gguf").write_bytes(content)
    assert "x.gguf" in refused_conversion(capsys, tmp_path, tmp_path / "x.gguf")
    assert "There is no file" in refused_conversion(capsys, tmp_path, tmp_path / "y.gguf")
