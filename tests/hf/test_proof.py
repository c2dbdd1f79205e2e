"""Odd models: what would be silently wrong is refused in a sentence, and mixtures of experts are not."""

import pytest
import torch
from hf_helpers import KNOWN, LLAMA_LIKE, SIZES, crt, gap, random_tokens, randomise, refused_conversion, save, tiny_lm
from transformers import AutoConfig, AutoModelForCausalLM

from contextready.errors import ContextReadyError
from contextready.hf.load import load_lm
from contextready.hf.modeling import ContextReadyForCausalLM
from contextready.hf.structure import proof_tokens


def new_lm(kind, settings, seed=0):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings)).eval()


BERT_LIKE = {key: value for key, value in LLAMA_LIKE.items() if key not in ("num_key_value_heads", "head_dim")}
GPT1 = SIZES | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
XLM = {"vocab_size": 61, "emb_dim": 32, "n_layers": 2, "n_heads": 4}
GEMMA = LLAMA_LIKE | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
BY_LAYER = GEMMA | {"vocab_size_per_layer_input": 61, "hidden_size_per_layer_input": 4, "num_kv_shared_layers": 0}
ODD = {
    "openai-gpt": (GPT1, "it keeps no keys and values in a cache, so it cannot continue a text"),
    "ctrl": (GPT1 | {"dff": 48}, "it changes its input embeddings in place"),
    "roberta": (BERT_LIKE | {"is_decoder": True}, "it may count positions from another number than 0, or skip padding"),
    "xlm-roberta": (BERT_LIKE | {"is_decoder": True}, "do not reproduce its logits"),
    "bert": (BERT_LIKE, "its tokens attend to later tokens, as in an encoder"),
    "xlm": (XLM, "do not reproduce its logits"),
    "xmod": (BERT_LIKE, "it does not run on plain text (ValueError: Input language unknown"),
    "gemma4_text": (BY_LAYER | {"global_head_dim": 8}, "does not accept embeddings other than those of its vocabulary"),
    "gemma3n_text": (
        BY_LAYER | {"activation_sparsity_pattern": [0.0, 0.0], "laurel_rank": 4},
        "do not return one vector per token (its embeddings and blocks have the shapes (1, 16, 32) and (4, 1, 16, 32))",
    ),
    "xlnet": ({"vocab_size": 61, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}, "one vector per token"),
    "prophetnet": (
        SIZES
        | {"is_encoder_decoder": False, "hidden_size": 32, "num_encoder_layers": 2, "num_decoder_layers": 2}
        | {"decoder_ffn_dim": 48, "num_decoder_attention_heads": 4},
        "one vector per token",
    ),
    "cpmant": (
        {"vocab_size": 61, "hidden_size": 32, "num_attention_heads": 4, "dim_head": 8, "dim_ff": 48}
        | {"num_hidden_layers": 2},
        "one vector per token",
    ),
}


@pytest.mark.parametrize("kind", ODD)
def test_wrap_refuses_what_would_be_wrong(kind):
    settings, why = ODD[kind]
    with pytest.raises(ContextReadyError) as caught:
        ContextReadyForCausalLM.wrap(new_lm(kind, settings))
    assert "cannot be converted: " in str(caught.value)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


def test_wrap_leaves_a_refused_model_as_it_was():
    lm = new_lm("openai-gpt", GPT1).train()
    with pytest.raises(ContextReadyError):
        ContextReadyForCausalLM.wrap(lm)
    assert lm.training
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in lm.modules())


@pytest.mark.parametrize("kind", ["openai-gpt", "xlm"])
def test_convert_refuses_what_would_be_wrong(tmp_path, tokenizer, capsys, kind):
    settings, why = ODD[kind]
    save(tmp_path / "model", new_lm(kind, settings | {"vocab_size": KNOWN}), tokenizer)
    assert why in refused_conversion(capsys, tmp_path, tmp_path / "model")


def test_a_model_is_tried_on_padding_and_random_tokens():
    lm = new_lm("llama", LLAMA_LIKE | {"pad_token_id": 7})
    tokens = proof_tokens(lm)[0].tolist()
    assert {0, 1, 2, 7} <= set(tokens)
    assert len(set(tokens)) > 10
    assert 7 not in (tokens[0], tokens[-1])
    assert proof_tokens(new_lm("llama", LLAMA_LIKE | {"max_position_embeddings": 6})).shape == (1, 6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strength", [1.0, 1e-6])
def test_the_faintest_look_ahead_is_refused(dtype, strength):
    """Rounding is larger than what these tokens see of later ones, but it has no gradient."""
    lm = new_lm("llama", LLAMA_LIKE).to(dtype)
    first = lm.model.layers[0].register_forward_pre_hook(
        lambda module, args: (args[0] + strength * args[0].roll(-1, dims=1), *args[1:])
    )
    with pytest.raises(ContextReadyError, match="attend to later tokens"):
        ContextReadyForCausalLM.wrap(lm)
    first.remove()
    ContextReadyForCausalLM.wrap(lm)


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MLA = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
MIXTURES = {
    "mixtral": LLAMA_LIKE | {"num_local_experts": 4, "sliding_window": None},
    "qwen3_moe": LLAMA_LIKE | EXPERTS,
    "olmoe": LLAMA_LIKE | EXPERTS,
    "deepseek_v3": BERT_LIKE
    | MLA
    | {"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
}


@pytest.mark.parametrize("kind", MIXTURES)
def test_mixtures_of_experts_are_wrapped_with_any_seed(kind):
    for seed in range(12):
        lm, tokens = new_lm(kind, MIXTURES[kind], seed), random_tokens(seed=seed)
        with torch.no_grad():
            expected = lm(tokens).logits
            model = ContextReadyForCausalLM.wrap(lm, tolerance=0.0)
            assert torch.equal(model(tokens).logits, expected)


def test_a_mixture_whose_tokens_compete_for_experts_is_refused(monkeypatch):
    """Later tokens decide which earlier ones an expert serves, but the choice has no gradient."""
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

    route = MixtralTopKRouter.forward

    def with_capacity(self, hidden_states):
        logits, scores, chosen = route(self, hidden_states)
        for expert in range(4):
            places = (chosen == expert).nonzero()
            served_less = scores[places[:, 0], places[:, 1]].argsort(descending=True)[len(scores) // 4 :]
            scores = scores.index_put(tuple(places[served_less].T), torch.zeros(()))
        return logits, scores, chosen

    monkeypatch.setattr(MixtralTopKRouter, "forward", with_capacity)
    for seed in range(12):
        lm = new_lm("mixtral", MIXTURES["mixtral"], seed)
        with pytest.raises(ContextReadyError, match="attend to later tokens"):
            ContextReadyForCausalLM.wrap(lm)


@pytest.mark.parametrize("kind", MIXTURES)
@torch.no_grad()
def test_mixtures_of_experts_stream_what_they_read_in_parallel(kind):
    model, tokens = ContextReadyForCausalLM.wrap(new_lm(kind, MIXTURES[kind]), tolerance=0.0), random_tokens()
    randomise(model)
    expected = model(tokens, passes=10, use_cache=False).logits
    assert gap(expected, model(tokens, passes=1).logits) > 0.01
    streamed, _ = model.model.stream(tokens, model.model.init_state(2))
    near = 1e-4 * float(expected.abs().max())
    assert gap(streamed, expected) < near
    text = model.generate(tokens, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)
    plain = model.generate(
        tokens, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0, use_cache=False
    )
    assert torch.equal(text, plain)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "olmoe"])
def test_the_router_loss_is_kept(kind):
    tokens = random_tokens()
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    lm = new_lm(kind, MIXTURES[kind] | {"router_aux_loss_coef": 0.5})
    for settings in ({}, {"attention_mask": mask}):
        arguments = settings | {"labels": tokens, "output_router_logits": True, "use_cache": False}
        expected = lm(tokens, **arguments)
        without = lm(tokens, labels=tokens, **settings).loss
        assert expected.loss - without > 0.1
        model = ContextReadyForCausalLM.wrap(lm)
        found = model(tokens, passes=1, **arguments)
        assert torch.equal(found.loss, expected.loss)
        assert torch.equal(found.aux_loss, expected.aux_loss)
        assert len(found.router_logits) == 2
        assert torch.equal(model(tokens, passes=1, labels=tokens, **settings).loss, without)
    # As a setting, and with a correction: what the router of the last pass does counts.
    model.config.base_config.output_router_logits = True
    randomise(model)
    outputs = model(tokens, labels=tokens, passes=3)
    plain = model(tokens, labels=tokens, passes=3, output_router_logits=False)
    assert plain.get("aux_loss") is None
    assert gap(outputs.loss.detach(), (plain.loss + 0.5 * outputs.aux_loss).detach()) < 1e-6
    assert gap(outputs.aux_loss.detach(), found.aux_loss.detach()) > 1e-4
    outputs.aux_loss.backward()
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in model.model.correction.parameters())


def test_a_router_loss_that_does_not_exist_is_refused():
    model, tokens = ContextReadyForCausalLM.wrap(new_lm("deepseek_v3", MIXTURES["deepseek_v3"])), random_tokens()
    with pytest.raises(ContextReadyError, match="has no router loss; set output_router_logits=False"):
        model(tokens, labels=tokens, output_router_logits=True)


def test_training_without_the_router_loss_that_was_asked_for_is_refused(tmp_path, tokenizer):
    from contextready.hf.finetune import start
    from contextready.runs.config import PretrainedModelConfig

    settings = MIXTURES["mixtral"] | {"vocab_size": KNOWN, "output_router_logits": True}
    save(tmp_path / "model", new_lm("mixtral", settings), tokenizer)
    with pytest.raises(ContextReadyError, match=r"asks for a router loss .* which crt train does not add"):
        start(PretrainedModelConfig(str(tmp_path / "model")))


@pytest.mark.parametrize("family", ["llama", "own"])
def test_continuous_batching_is_refused(family):
    lm = tiny_lm(family).float()
    model = ContextReadyForCausalLM.wrap(lm)
    for one in (model, lm) if family == "own" else (model,):
        for method in ("generate_batch", "init_continuous_batching", "continuous_batching_context_manager"):
            with pytest.raises(ContextReadyError, match="does not support continuous batching"):
                getattr(one, method)([[3, 4, 5]])
        with pytest.raises(ContextReadyError, match="does not support continuous batching"):
            one.generate(random_tokens(), cache_implementation="paged", max_new_tokens=2)
        # A manager that was created directly passes its cache under this name.
        with pytest.raises(ContextReadyError, match="does not support continuous batching"):
            one(random_tokens(), cache=object(), use_cache=False)


def test_a_decoder_that_was_part_of_another_model_is_converted(tmp_path, tokenizer):
    """Its configuration declares settings of generation, which transformers takes for a mistake in ours."""
    from transformers import BartConfig, BartForCausalLM

    torch.manual_seed(0)
    sizes = {f"{side}_{key}": n for side in ("encoder", "decoder") for key, n in (("layers", 2), ("ffn_dim", 48))}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = BartConfig(vocab_size=KNOWN, d_model=32, max_position_embeddings=64, **sizes, **heads)
    save(tmp_path / "bart", BartForCausalLM(config).eval(), tokenizer)
    crt("convert", tmp_path / "bart", tmp_path / "out")
    before, after = load_lm(str(tmp_path / "bart")), load_lm(str(tmp_path / "out"))
    tokens = random_tokens()
    assert torch.equal(after(tokens).logits, before(tokens).logits)
    text = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(after.generate(tokens, **text), before.generate(tokens, **text))


def test_heads_of_several_sizes_are_converted(tmp_path, tokenizer):
    """transformers has an error of its own for settings that vary from layer to layer."""
    settings = GEMMA | {"vocab_size": KNOWN, "hidden_size_per_layer_input": 0, "global_head_dim": 16}
    lm = new_lm("gemma4_text", settings | {"num_kv_shared_layers": 0})
    save(tmp_path / "model", lm, tokenizer)
    crt("convert", tmp_path / "model", tmp_path / "out")
    tokens = random_tokens()
    assert torch.equal(load_lm(str(tmp_path / "out"))(tokens).logits, lm(tokens).logits)


def test_heads_of_an_odd_size_are_converted(tmp_path, tokenizer):
    lm = new_lm("gpt2", SIZES | {"vocab_size": KNOWN, "n_embd": 36, "n_layer": 2, "n_head": 4, "n_positions": 64})
    save(tmp_path / "model", lm, tokenizer)
    crt("convert", tmp_path / "model", tmp_path / "out")
