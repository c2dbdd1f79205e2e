"""transformers' own Trainer on context-ready models, and the K that it draws."""

import pytest
import torch
from hf_helpers import gap, random_tokens, tiny_lm, tiny_ready
from hf_trainer_helpers import T, changed, drawn, logged, rows, settings, trained, weights
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM
from transformers import Trainer as HFTrainer

from contextready.errors import ContextReadyError
from contextready.hf.modeling import ContextReadyForCausalLM
from contextready.hf.trainer import RandomPasses


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
    with pytest.raises(ContextReadyError, match="but got min_passes=3, passes=2"):
        RandomPasses(2, min_passes=3)
    with pytest.raises(ContextReadyError, match="needs a context-ready model, but got LlamaForCausalLM"):
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


def test_saved_model_does_not_tell_where_its_base_lay(base, tmp_path):
    model = ContextReadyForCausalLM.wrap(AutoModelForCausalLM.from_pretrained(base))
    model.save_pretrained(tmp_path)
    assert str(base) not in (tmp_path / "config.json").read_text()


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
    # Inside the block: since transformers 5.23, the block's own hooks are not called again in the backward.
    inner = next(model.model.backbone.structure.last_block(model.lm).children())
    inner.register_forward_pre_hook(lambda *_: runs.append(1))
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
