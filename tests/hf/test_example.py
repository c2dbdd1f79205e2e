"""The example that trains with transformers' Trainer and PEFT runs for real."""

import importlib.util
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from hf_helpers import gap, random_tokens, tiny_ready
from hf_trainer_helpers import T, changed, drawn, trained, weights
from peft import PeftModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from contextready.hf.convert import convert
from contextready.hf.load import is_pretrained, load_model
from contextready.hf.modeling import ContextReadyForCausalLM

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "finetune_trainer.py"
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "dog", "run", "far"]


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("finetune_trainer", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a small plain model, the same one converted, and text."""
    folder = tmp_path_factory.mktemp("trainer")
    draw = random.Random(0)
    lines = [" ".join(draw.choices(WORDS, k=8)) + ".\n" for _ in range(300)]
    (folder / "text.txt").write_text("".join(lines))
    (folder / "text.jsonl").write_text("".join(f'{{"text": "{line.strip()}"}}\n' for line in lines))

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learner = trainers.BpeTrainer(
        vocab_size=280, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(lines, learner)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")
    torch.manual_seed(0)
    lm = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            bos_token_id=None,
            eos_token_id=0,
        )
    )
    lm.save_pretrained(folder / "plain")
    tokenizer.save_pretrained(folder / "plain")
    convert(str(folder / "plain"), folder / "ready")
    return folder


@pytest.fixture(autouse=True)
def _own_caches(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))


TUNES = [("all", False), ("correction", False), ("lora", False), ("all", True), ("lora", True)]


@pytest.mark.parametrize(("tune", "control"), TUNES, ids=[f"{t}-control" if c else t for t, c in TUNES])
def test_example_trains_evaluates_and_saves(example, place, tmp_path, capsys, tune, control):
    out = tmp_path / "out"
    # From the plain model in one case, and else from the converted one.
    source = place / ("plain" if (tune, control) == ("lora", False) else "ready")
    before, _ = load_model(str(place / "ready"))
    model = example.finetune(str(source), place / "text.txt", out, tune, steps=20, control=control)
    assert isinstance(model, LlamaForCausalLM if control else ContextReadyForCausalLM)

    # Only the right weights changed.
    base = before.lm if control else before
    moved = changed(weights(base), weights(model))
    corrections = {name for name in weights(base) if ".correction." in name}
    adapted = {name for name in weights(base) if re.search(r"layers\.\d+\.\w+\.\w+_proj\.weight", name)}
    assert len(adapted) == 14
    assert len(corrections) == (0 if control else 3)
    expected = {"all": set(weights(base)), "correction": corrections, "lora": adapted | corrections}[tune]
    assert moved == expected

    # What was saved is what was trained.
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert type(loaded) is type(model)
    assert not changed(weights(model), weights(loaded))
    tokenizer = load_model(str(out))[1]
    _, valid = example.read_blocks(place / "text.txt", tokenizer, 64)
    tokens = torch.tensor(valid["input_ids"])
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
        loss_before, loss = (float(m.eval()(tokens, labels=tokens).loss) for m in (base, loaded))
    if not control:
        assert loaded.config.passes == 5

    # The loss went down, and the card says by how much.
    assert loss < loss_before - 0.005
    card = (out / "README.md").read_text()
    said = [float(number) for number in re.findall(r"loss ([\d.]+)", card)]
    assert said == pytest.approx([loss_before, loss], abs=1e-3)
    perplexities = [float(number) for number in re.findall(r"perplexity ([\d.]+\d)", card)]
    assert perplexities == pytest.approx(np.exp(said), rel=1e-3)
    assert ("# Context-ready language model" in card) == (not control)
    assert f"After: loss {said[1]:.4f}" in capsys.readouterr().out


def test_example_by_its_command_line(example, place, tmp_path, capsys):
    arguments = [str(place / "plain"), str(place / "text.jsonl")]
    example.main([*arguments, str(tmp_path / "out"), "--tune", "correction", "--steps", "2"])
    assert is_pretrained(tmp_path / "out")
    assert "Training: tune=correction, 2 updates." in capsys.readouterr().out
    for wrong in ([str(tmp_path / "out")], [str(tmp_path / "new"), "--control", "--tune", "correction"]):
        with pytest.raises(SystemExit):
            example.main([*arguments, *wrong])


RANK = """
import functools, hashlib, importlib.util, json, os, pathlib, sys
from transformers import TrainerCallback, TrainingArguments

path, source, text, out, log = sys.argv[1:]
spec = importlib.util.spec_from_file_location("finetune_trainer", path)
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)
example.TrainingArguments = functools.partial(TrainingArguments, use_cpu=True, ddp_backend="gloo")


class Recording(example.RandomPasses):
    drawn = []

    def on_step_begin(self, args, state, control, **kwargs):
        super().on_step_begin(args, state, control, **kwargs)
        self.drawn.append([args.world_size, kwargs["model"].config.passes])


example.RandomPasses = Recording
model = example.finetune(source, pathlib.Path(text), pathlib.Path(out), steps=4)
found = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
pathlib.Path(log + os.environ["RANK"]).write_text(json.dumps([Recording.drawn, found]))
"""


def test_example_in_two_processes(place, tmp_path):
    """Both draw the same K, and their weights stay the same: the gradients are averaged."""
    (tmp_path / "rank.py").write_text(RANK)
    words = [tmp_path / "rank.py", EXAMPLE, place / "ready", place / "text.txt", tmp_path / "out", tmp_path / "log"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    own = {"HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, *map(str, words)], env=os.environ | own, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"log{rank}").read_text()) for rank in (0, 1))
    assert first == second
    assert first[0] == [[2, k] for k in drawn(range(4), seed=0)]


def test_example_blocks_are_the_text(example, place):
    """Nothing is lost, doubled or reordered; documents of a .jsonl end with the end token."""
    tokenizer = load_model(str(place / "plain"))[1]
    for name in ("text.txt", "text.jsonl"):
        train, valid = example.read_blocks(place / name, tokenizer, 64)
        blocks = train["input_ids"][:] + valid["input_ids"][:]
        assert all(len(block) == 64 for block in blocks)
        assert train["labels"][:] == train["input_ids"][:]
        assert len(valid) == np.ceil(len(blocks) / 10)
        text = tokenizer.decode([token for block in blocks for token in block])
        original = (place / "text.txt").read_text()
        whole = original if name == "text.txt" else original.replace("\n", "<end>")
        assert whole.startswith(text)
        assert len(whole) - len(text) < 64 * 8


# PEFT.


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")
@pytest.mark.parametrize("family", ["llama", "llama-tied", "gpt2", "gpt-neox", "opt", "own"])
def test_adapters_are_beside_the_linear_layers_of_the_blocks(example, family):
    model = tiny_ready(family)
    blocks = model.model.backbone.structure.blocks
    adapted = example.choose_weights(model, "lora")
    beside = {name.split(".lora_A")[0] for name, _ in adapted.named_parameters() if "lora_A" in name}
    assert beside
    assert all(f".lm.{blocks}." in name for name in beside)
    free = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert all("lora_" in name or "correction.modules_to_save" in name for name in free)
    assert sum("correction.modules_to_save" in name for name in free) == 3


def test_saved_adapter_keeps_the_trained_correction(example, place, tmp_path):
    tokens = random_tokens(2, T)
    model = example.choose_weights(load_model(str(place / "ready"))[0], "lora")
    trained(model, tmp_path / "run")
    model.eval().save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size < 2e5

    again = PeftModel.from_pretrained(load_model(str(place / "ready"))[0], tmp_path / "adapter").eval()
    with torch.no_grad():
        logits, plain = model(tokens).logits, load_model(str(place / "plain"))[0](tokens).logits
        assert gap(logits, plain) > 1e-3
        assert torch.equal(again(tokens).logits, logits)
        with again.disable_adapter():
            assert gap(again(tokens).logits, plain) < 1e-6
        correction = again.base_model.model.model.correction.modules_to_save["default"]
        assert correction.ffn.down.weight.abs().max() > 0
        written = again.generate(tokens, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
        merged = again.merge_and_unload()
        assert isinstance(merged, ContextReadyForCausalLM)
        assert gap(merged(tokens).logits, logits) < 1e-5
        assert torch.equal(
            merged.generate(tokens, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0), written
        )
