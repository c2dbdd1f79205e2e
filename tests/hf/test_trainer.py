"""transformers' own Trainer, and PEFT, on context-ready models; the example that uses them runs for real."""

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
from hf_helpers import gap, random_tokens, tiny_lm, tiny_ready
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainingArguments
from transformers import Trainer as HFTrainer

from contextready.errors import ContextReadyError
from contextready.hf.convert import convert
from contextready.hf.load import is_pretrained, load_model
from contextready.hf.modeling import ContextReadyForCausalLM
from contextready.hf.trainer import RandomPasses

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "finetune_trainer.py"
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "dog", "run", "far"]
T = 8
IGNORE = -100


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


def settings(out, **more):
    usual = {
        "output_dir": str(out),
        "use_cpu": True,
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "learning_rate": 0.01,
        "lr_scheduler_type": "constant",
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(**usual | more)


def rows(count=8, masked=False):
    """Sequences to train on; masked: of unlike numbers of labels."""
    tokens = random_tokens(count, T)
    labels = tokens.clone()
    if masked:
        for i in range(count):
            labels[i, : i % (T - 1)] = IGNORE
    return [{"input_ids": t, "labels": y} for t, y in zip(tokens, labels, strict=True)]


def trained(model, out, data=None, passes=5, resume=None, **more):
    """Train a model; the trainer."""
    callbacks = [] if passes is None else [RandomPasses(passes)]
    trainer = HFTrainer(model=model, args=settings(out, **more), train_dataset=data or rows(), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def logged(trainer):
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def changed(before, after):
    assert before.keys() == after.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


class Counted:
    """How many passes every forward of a model in training makes."""

    def __init__(self, model):
        self.model, self.passes = model, []
        model.register_forward_pre_hook(self._start)
        model.model.backbone.structure.last_block(model.lm).register_forward_hook(self._count)

    def _start(self, *_):
        if self.model.training:
            self.passes.append(0)

    def _count(self, *_):
        if self.model.training:
            self.passes[-1] += 1


def drawn(steps, k_min=2, passes=5, seed=42):
    """The documented sequence: uniform, from the seed, the step and the letter K."""
    return [int(np.random.default_rng((seed, step, ord("K"))).integers(k_min, passes, endpoint=True)) for step in steps]


# The example.

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
    assert ("context-ready" in card) == (not control)
    assert f"After: loss {said[1]:.4f}" in capsys.readouterr().out


def test_example_by_its_command_line(example, place, tmp_path, capsys):
    arguments = [str(place / "plain"), str(place / "text.jsonl")]
    example.main([*arguments, str(tmp_path / "out"), "--tune", "correction", "--steps", "2"])
    assert is_pretrained(tmp_path / "out")
    assert "Trained: tune=correction, 2 updates." in capsys.readouterr().out
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


# K.


def test_passes_are_the_documented_sequence(tmp_path):
    """Every batch of an accumulated update makes the same K, and checkpoints keep the configuration's own."""
    model = tiny_ready("llama", passes=7)
    counted = Counted(model)
    steps = 6
    trained(
        model, tmp_path, max_steps=steps, gradient_accumulation_steps=2, save_strategy="steps", save_steps=1, seed=3
    )
    expected = drawn(range(steps), seed=3)
    assert len(set(expected)) > 2
    assert counted.passes == [k for k in expected for _ in range(2)]
    assert model.config.passes == 7
    for step in range(1, steps + 1):
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / f"checkpoint-{step}")
        assert saved.config.passes == 7


def test_without_the_callback_passes_are_the_configurations(tmp_path):
    model = tiny_ready("llama", passes=3)
    counted = Counted(model)
    trained(model, tmp_path, passes=None)
    assert counted.passes == [3, 3, 3]


def test_resumed_training_repeats_k_and_the_weights(tmp_path):
    whole, rest = tiny_ready("llama"), tiny_ready("llama")
    trained(whole, tmp_path, max_steps=5, save_strategy="steps", save_steps=2)
    counted = Counted(rest)
    trained(rest, tmp_path, max_steps=5, resume=str(tmp_path / "checkpoint-2"))
    assert counted.passes == drawn(range(2, 5))
    assert not changed(weights(whole), weights(rest))


def test_random_passes_reach_through_wrappers(tmp_path):
    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    model = tiny_ready("llama")
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=["correction"]))
    callback, state = RandomPasses(4), type("State", (), {"global_step": 9})
    callback.on_step_begin(settings(tmp_path), state, None, model=Wrapper(adapted))
    assert model.config.passes == drawn([9], passes=4)[0]
    callback.on_step_end(settings(tmp_path), state, None, model=Wrapper(adapted))
    assert model.config.passes == 5


def test_random_passes_refuse_what_they_are_not_for(tmp_path):
    with pytest.raises(ContextReadyError, match="k_min=3 must be from 1 to passes=2"):
        RandomPasses(2, k_min=3)
    with pytest.raises(ContextReadyError, match="LlamaForCausalLM is none"):
        trained(tiny_lm("llama"), tmp_path)


# Trainer.


@pytest.mark.parametrize("family", ["llama", "own"])
def test_trainer_evaluates(tmp_path, family):
    model = tiny_ready(family) if family == "llama" else tiny_lm(family)
    trainer = HFTrainer(model=model, args=settings(tmp_path), eval_dataset=rows(4))
    tokens = random_tokens(4, T)
    with torch.no_grad():
        expected = float(model.eval()(tokens, labels=tokens).loss)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)


def test_saved_model_does_not_tell_where_its_base_lay(place, tmp_path):
    model = ContextReadyForCausalLM.wrap(AutoModelForCausalLM.from_pretrained(place / "plain"))
    model.save_pretrained(tmp_path)
    assert str(place) not in (tmp_path / "config.json").read_text()


def gradients(model, tokens):
    model.train()
    model.zero_grad()
    model(tokens, labels=tokens, passes=4).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "gpt-neox"])
def test_gradient_checkpointing_gives_the_same_gradients(family, reentrant):
    model = tiny_ready(family)
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    tokens, runs = random_tokens(2, T), []
    model.model.backbone.structure.last_block(model.lm).register_forward_pre_hook(lambda *_: runs.append(1))
    for frozen in (False, True):
        model.lm.requires_grad_(not frozen)
        plain = gradients(model, tokens)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        recomputed = gradients(model, tokens)
        assert recomputed.keys() == plain.keys()
        assert max(gap(recomputed[name], plain[name]) for name in plain) < 1e-12
        model.gradient_checkpointing_disable()
    # Four passes without, and four with; those that lead to a gradient once more in the backward.
    assert len(runs) >= (4 + 8) + (4 + 7)


def test_hidden_z_is_refused(monkeypatch):
    """Were z to lose its gradient in a block, the correction would not be trained, silently."""
    model = tiny_ready("llama")
    last = model.model.backbone.structure.last_block(model.lm)
    monkeypatch.setattr(last, "forward", torch.no_grad()(last.forward))
    with pytest.raises(ContextReadyError, match="'use_reentrant': False"):
        gradients(model, random_tokens(2, T))


def test_checkpointed_training_is_the_same_training(tmp_path):
    one, two = tiny_ready("llama"), tiny_ready("llama")
    trained(one, tmp_path)
    trained(two, tmp_path, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False})
    assert max(gap(a, b) for a, b in zip(weights(one).values(), weights(two).values(), strict=True)) < 1e-10


@pytest.mark.parametrize("adapted", [False, True], ids=["all", "lora"])
def test_accumulated_batches_are_one_batch(tmp_path, adapted):
    """The loss is the mean over all labels of the update, though the batches have unlike numbers of them."""
    found = {}
    for parts in (1, 4):
        model = tiny_ready("llama")
        torch.manual_seed(0)
        if adapted:
            model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=["correction"]))
        trainer = trained(
            model,
            tmp_path,
            rows(4, masked=True),
            max_steps=1,
            optim="sgd",
            per_device_train_batch_size=4 // parts,
            gradient_accumulation_steps=parts,
        )
        found[parts] = logged(trainer), weights(model)
    assert found[1][0] == pytest.approx(found[4][0], rel=1e-6)
    assert max(gap(a, b) for a, b in zip(found[1][1].values(), found[4][1].values(), strict=True)) < 1e-9


def test_bf16_on_the_cpu_trains(tmp_path):
    found = {}
    for bf16 in (False, True):
        model = tiny_ready("llama").float()
        found[bf16] = logged(trained(model, tmp_path, max_steps=8, bf16=bf16))
        assert all(p.dtype == torch.float32 for p in model.parameters())
    assert found[True] == pytest.approx(found[False], rel=0.03)
    assert found[True] != found[False]
    assert found[True][-1] < found[True][0]


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


# torch.compile.


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_training_is_the_same_training(tmp_path, backend):
    """Each K is a graph of its own, found again when it is drawn again."""
    torch.compiler.reset()
    one, two = tiny_ready("llama").float(), tiny_ready("llama").float()
    eager = logged(trained(one, tmp_path, passes=3, max_steps=6))
    compiled = logged(trained(two, tmp_path, passes=3, max_steps=6, torch_compile=True, torch_compile_backend=backend))
    assert compiled == pytest.approx(eager, rel=1e-4)
