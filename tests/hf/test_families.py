"""Every family: a fresh model is its base; streaming, passes, and a slow word-for-word oracle are one function."""

from functools import lru_cache

import pytest
import torch
from hf_helpers import FAMILIES, gap, oracle, random_tokens, randomise, tiny_lm, tiny_ready
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from contextready.hf.modeling import ContextReadyForCausalLM

TOLERANCE = 1e-10
T = 9
every_family = pytest.mark.parametrize("family", FAMILIES)


@lru_cache
def base(family):
    """The plain model: only read, never changed."""
    return tiny_lm(family)


@lru_cache
def ready(family):
    """The same model with a correction that matters: only read, never changed."""
    return tiny_ready(family)


@lru_cache
def rounding(family, length=T):
    """How far the plain model's own cached and uncached logits are apart.

    1e-15, except where its attention has a softmax in float32 whatever the model is in (Gemma 2, Bloom). With few
    tokens it is 1e-15 there too if one vector of the processor holds a whole row, as with AVX-512.
    """
    lm, tokens, cache, logits = base(family), random_tokens(length=length), None, []
    with torch.no_grad():
        for t in range(length):
            out = lm(tokens[:, t : t + 1], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            logits.append(out.logits)
        return gap(torch.cat(logits, dim=1), lm(tokens).logits)


def slack(family):
    """What streaming and passes may differ by; the recurrence makes the model's own rounding a little larger."""
    return TOLERANCE + 30 * rounding(family)


def test_only_families_with_a_softmax_in_float32_round_more():
    of_many = {family: rounding(family, length=33) for family in FAMILIES}
    assert {family for family in FAMILIES if of_many[family] > 1e-12} == {"gemma2", "bloom"}
    assert max(of_many.values()) < 1e-5


@every_family
def test_fresh_model_is_its_base_bit_for_bit(family):
    lm, tokens = tiny_lm(family), random_tokens()
    with torch.no_grad():
        expected = lm(tokens).logits
        model = ContextReadyForCausalLM.wrap(lm, tolerance=0.0)
        assert torch.equal(model(tokens).logits, expected)
        assert torch.equal(model(tokens, passes=3, use_cache=False).logits, expected)
        randomise(model)
        # With a correction it is another function, unless there is only one pass.
        assert gap(model(tokens).logits, expected) > 0.05
        assert torch.equal(model(tokens, passes=1).logits, expected)
        assert torch.equal(model(tokens, passes=1, use_cache=False).logits, expected)
        assert torch.equal(model(tokens[:, :1], passes=1).logits, lm(tokens[:, :1]).logits)


@every_family
@torch.no_grad()
def test_streaming_passes_and_forward_equal_the_oracle(family):
    model, tokens, near = ready(family), random_tokens(), slack(family)
    expected = oracle(base(family), model.model.correction, tokens)
    assert gap(expected, base(family)(tokens).logits) > max(0.05, 100 * near)
    assert gap(expected, model.model(tokens, passes=3)) > 10 * near

    assert gap(model.model(tokens, passes=T + 1), expected) < near
    one_by_one, state = model.model.stream(tokens[:, :5], model.model.init_state(2))
    rest, _ = model.model.stream(tokens[:, 5:], state)
    assert gap(torch.cat((one_by_one, rest), dim=1), expected) < near

    for use_cache in (True, False):
        assert gap(model(tokens, use_cache=use_cache).logits, expected) < near
        assert gap(model(tokens, passes=T + 1, use_cache=use_cache).logits, expected) < near
    # By Hugging Face's cache: a prompt, a chunk, then one by one.
    out = model(tokens[:, :3])
    logits, cache = [out.logits], out.past_key_values
    for start, end in ((3, 7), (7, 8), (8, 9)):
        logits.append(model(tokens[:, start:end], past_key_values=cache).logits)
    assert gap(torch.cat(logits, dim=1), expected) < near


@every_family
@torch.no_grad()
def test_K_passes_are_the_native_ones(family):
    model, tokens = ready(family), random_tokens()
    for K in (2, 4):
        assert gap(model(tokens, passes=K).logits, model.model(tokens, passes=K)) < slack(family)


@every_family
@torch.no_grad()
def test_z_is_what_the_final_norm_gets(family):
    lm = base(family)
    backbone = ContextReadyForCausalLM.wrap(lm).model.backbone
    e_BTC = backbone.embed(random_tokens())
    z_BTC, _ = backbone.blocks(e_BTC)
    normed_BTC = z_BTC
    for name in backbone.structure.head[:-1]:
        normed_BTC = lm.get_submodule(name)(normed_BTC)
    expected = lm.base_model(inputs_embeds=e_BTC, use_cache=False).last_hidden_state
    assert torch.equal(normed_BTC, expected)
    assert gap(z_BTC, expected) > 0.05


TIED = (
    "llama-tied",
    "qwen3-tied",
    "gemma",
    "gemma2",
    "gemma3",
    "gpt2",
    "opt",
    "bloom",
    "falcon",
    "falcon-alibi",
    "cohere",
)


@every_family
@torch.no_grad()
def test_saved_model_comes_back_the_same(family, tmp_path):
    tokens = random_tokens()
    # Buffers that are not saved are made anew in the type loaded: what that does to the plain model is allowed.
    base(family).save_pretrained(tmp_path / "base")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    near = TOLERANCE + 30 * gap(plain(tokens).logits, base(family)(tokens).logits)
    assert near < (1e-3 if "gemma" in family else 2 * TOLERANCE)

    model = tiny_ready(family, passes=3)
    expected, saved = model(tokens).logits, model.state_dict()
    model.save_pretrained(tmp_path / "ready")
    for cls in (ContextReadyForCausalLM, AutoModelForCausalLM):
        again = cls.from_pretrained(tmp_path / "ready")
        assert type(again) is ContextReadyForCausalLM
        assert not again.training
        assert (again.config.passes, again.config.tolerance, again.dtype) == (3, 0.0, torch.float64)
        assert again.config.structure == model.config.structure
        loaded = again.state_dict()
        assert saved.keys() == loaded.keys()
        assert all(torch.equal(saved[name], loaded[name]) for name in saved)
        assert gap(again(tokens).logits, expected) < near
        tied = [m.get_input_embeddings().weight is m.get_output_embeddings().weight for m in (model, again)]
        assert tied == [family in TIED] * 2


@every_family
def test_loss_and_gradients(family):
    model = ContextReadyForCausalLM.wrap(tiny_lm(family), tolerance=0.0)
    tokens = random_tokens()
    correction = model.model.correction
    # Fresh: only the zero output layer feels anything yet.
    model(tokens, labels=tokens, passes=3).loss.backward()
    assert correction.ffn.down.weight.grad.abs().max() > 1e-6
    assert correction.ffn.up.weight.grad.abs().max() == 0.0

    randomise(model)
    model.zero_grad()
    out = model(tokens, labels=tokens, passes=3)
    logits = model.model(tokens, passes=3)
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
    assert out.past_key_values is None
    assert gap(out.loss.detach(), expected.detach()) < 1e-5
    out.loss.backward()
    ours = {name: p.grad for name, p in model.named_parameters()}
    assert all(p.grad.abs().max() > 1e-6 for p in correction.parameters())
    assert model.get_input_embeddings().weight.grad.abs().max() > 1e-6
    model.zero_grad()
    expected.backward()
    for name, p in model.named_parameters():
        assert (p.grad is None) == (ours[name] is None)
        assert p.grad is None or gap(p.grad, ours[name]) < 1e-5 * (1 + float(p.grad.abs().max()))


def test_training_makes_the_configured_passes():
    model, tokens = tiny_ready("llama", passes=3), random_tokens()
    with torch.no_grad():
        expected = model.model(tokens, passes=3)
        assert gap(model.train()(tokens).logits, expected) < TOLERANCE
        assert gap(model.eval()(tokens).logits, expected) > 1e-3
