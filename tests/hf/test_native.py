"""Families with a native form: the native model compared with transformers, in every way to read, there and back."""

import re
from pathlib import Path

import pytest
import torch
from hf_helpers import KNOWN, LLAMA_LIKE, SIZES, crt, gap, randomise, refused_conversion, save, some_tokens
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import contextready
from contextready import Transformer
from contextready.hf.families import NotNativeError, fill, native_backbone, native_config
from contextready.hf.modeling import ContextReadyForCausalLM
from contextready.infer.torch_engine import BufferEngine, torch_engine
from contextready.model.context_ready import ContextReady
from contextready.runs.checkpoint import open_checkpoint
from contextready.solve.prefill import prefill

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
NO_HEAD_DIM = {key: value for key, value in LLAMA_LIKE.items() if key != "head_dim"}
CASES = {
    "llama": ("llama", LLAMA_LIKE),
    "llama, tied": ("llama", LLAMA_LIKE | {"tie_word_embeddings": True, "rms_norm_eps": 1e-2}),
    "llama, wide heads": ("llama", LLAMA_LIKE | {"head_dim": 12}),
    "llama, own keys": ("llama", NO_HEAD_DIM | {"num_key_value_heads": 4}),
    "llama 3": ("llama", LLAMA_LIKE | {"rope_parameters": LLAMA3}),
    "llama, linear": ("llama", LLAMA_LIKE | {"rope_parameters": LINEAR}),
    "llama, biases": ("llama", LLAMA_LIKE | {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", LLAMA_LIKE | {"sliding_window": None}),
    "mistral, window": ("mistral", LLAMA_LIKE | {"sliding_window": 5}),
    "qwen2": ("qwen2", NO_HEAD_DIM),
    "qwen2, tied": ("qwen2", NO_HEAD_DIM | {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "qwen2, window": (
        "qwen2",
        NO_HEAD_DIM | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
    ),
    "qwen3": ("qwen3", LLAMA_LIKE | {"head_dim": 12}),
    "qwen3, tied": ("qwen3", LLAMA_LIKE | {"tie_word_embeddings": True}),
    "smollm3": ("smollm3", NO_HEAD_DIM | {"num_hidden_layers": 4, "no_rope_layer_interval": 2}),
    "smollm3, untied": ("smollm3", NO_HEAD_DIM | {"num_hidden_layers": 4, "tie_word_embeddings": False}),
}
every_case = pytest.mark.parametrize("name", CASES)
STAY = {
    "yarn": (
        ("llama", LLAMA_LIKE | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}),
        "its rope type yarn has no native form",
    ),
    "dynamic": (
        ("llama", LLAMA_LIKE | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
        "its rope type dynamic has no native form",
    ),
    "activation": (("llama", LLAMA_LIKE | {"hidden_act": "gelu"}), "its activation gelu has no native form"),
    "some biases": (
        ("llama", LLAMA_LIKE | {"attention_bias": True}),
        "or in its feed-forward networks, but not in both",
    ),
    "some windows": (
        ("qwen2", NO_HEAD_DIM | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
        "its layers attend in different ways",
    ),
    "irregular layers": (
        ("smollm3", NO_HEAD_DIM | {"num_hidden_layers": 4, "no_rope_layers": [0, 1, 1, 0]}),
        "do not repeat at one distance",
    ),
    "gemma": (("gemma", LLAMA_LIKE), "only Llama, Mistral, Qwen2, Qwen3 and SmolLM models have a native form"),
    "gpt2": (
        ("gpt2", SIZES | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
        "only Llama, Mistral, Qwen2, Qwen3 and SmolLM models have a native form",
    ),
}


def make(kind, settings, dtype=torch.float32, **changes):
    """A small model of a family; norms and biases are random too."""
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings | changes)).to(dtype).eval()
    with torch.no_grad():
        for p in lm.parameters():
            p.copy_(0.2 * torch.randn_like(p) + (1.0 if p.dim() == 1 else 0.0))
    lm.generation_config.eos_token_id = None
    return lm


def ready(name, dtype=torch.float32, correction="balanced"):
    """A converted model with a random correction, in transformers and natively."""
    hf = ContextReadyForCausalLM.wrap(make(*CASES[name], dtype), tolerance=0.0, correction=correction)
    randomise(hf, std=0.2)
    return hf, ContextReady(native_backbone(hf.lm), hf.model.correction).eval()


def tokens_of(rows=2, length=24):
    return torch.randint(3, 61, (rows, length), generator=torch.Generator().manual_seed(0))


def in_float64(monkeypatch, lm):
    """Let transformers compute norms and angles in float64 too; it always rounds them to float32."""

    def norm(self, x):
        return self.weight * x * (x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()

    def angles(self, x, position_ids):
        at = position_ids[..., None].double() * self.inv_freq.double()
        return torch.cat((at.cos(), at.cos()), -1), torch.cat((at.sin(), at.sin()), -1)

    for part in lm.modules():
        if type(part).__name__.endswith("RMSNorm"):
            monkeypatch.setattr(type(part), "forward", norm)
        if type(part).__name__.endswith("RotaryEmbedding"):
            monkeypatch.setattr(type(part), "forward", angles)
            config, E = native_config(lm.config), part.inv_freq.numel() * 2
            exact = config.rope_base ** (-torch.arange(0, E, 2).double() / E)
            if config.rope == "linear":
                exact /= config.rope_factor
            if config.rope == "llama3":
                turns = config.rope_length * exact / (2 * torch.pi)
                low, high = exact / config.rope_factor, exact
                smooth = (turns - config.rope_low) / (config.rope_high - config.rope_low)
                between = (1 - smooth) * low + smooth * high
                exact = torch.where(turns > config.rope_high, high, torch.where(turns < config.rope_low, low, between))
            assert gap(part.inv_freq.double(), exact) < 1e-6
            part.inv_freq = exact


@every_case
@torch.no_grad()
def test_the_plain_model_is_the_same_function(name):
    lm = make(*CASES[name])
    backbone, tokens = native_backbone(lm), tokens_of()
    assert type(backbone) is Transformer
    found, expected = ContextReady(backbone)(tokens), lm(tokens).logits
    assert gap(found, expected) < 1e-5 * max(1.0, float(expected.abs().max()))


@every_case
@torch.no_grad()
def test_in_float64_they_agree_to_ten_digits(name, monkeypatch):
    hf, native = ready(name, torch.float64)
    in_float64(monkeypatch, hf.lm)
    tokens = tokens_of()
    for K in (1, 2, 4):
        assert gap(native(tokens, K), hf(tokens, passes=K).logits) < 1e-10
    streamed, _ = native.stream(tokens, native.init_state(2))
    assert gap(streamed, hf(tokens).logits) < 1e-10
    assert gap(streamed, native(tokens, 1)) > 1e-2


@every_case
@torch.no_grad()
def test_context_ready_outputs_are_those_of_the_wrapper(name):
    hf, native = ready(name)
    tokens = tokens_of()
    expected = hf.model(tokens, 3)
    scale = max(1.0, float(expected.abs().max()))
    assert gap(native(tokens, 3), expected) < 1e-5 * scale
    wrapped, state = hf.model.stream(tokens, hf.model.init_state(2))
    found, native_state = native.stream(tokens, native.init_state(2))
    assert gap(found, wrapped) < 1e-5 * scale
    read = prefill(native, tokens, solver="sweep", tolerance=0.0, segment=4)
    assert gap(native.backbone.head(read.z_B1C), wrapped[:, -1:]) < 1e-4 * scale
    assert (state.position, native_state.position) == (24, 24)


@every_case
@torch.no_grad()
def test_greedy_tokens_are_those_of_transformers(name):
    hf, native = ready(name)
    prompt = tokens_of(1, 7)
    expected = hf.generate(prompt, max_new_tokens=30, do_sample=False, pad_token_id=0)[0, 7:].tolist()
    engine = torch_engine(native, capacity=64, solver="sequential")
    assert isinstance(engine, BufferEngine)
    found = [int(engine.read(0, prompt[0].tolist())[0].argmax())]
    while len(found) < 30:
        found.append(int(engine.step(found[-1:])[0].argmax()))
    assert found == expected


@every_case
def test_weights_go_there_and_back_bit_for_bit(name):
    lm = make(*CASES[name])
    backbone = native_backbone(lm)
    other = make(*CASES[name])
    with torch.no_grad():
        for p in other.parameters():
            nn.init.zeros_(p)
    fill(other, backbone)
    for key, tensor in lm.state_dict().items():
        assert torch.equal(other.state_dict()[key], tensor), key


@pytest.mark.parametrize("name", ["llama, tied", "qwen2", "qwen3", "smollm3", "mistral, window"])
def test_a_folder_a_checkpoint_and_a_folder_again(tmp_path, tokenizer, name):
    kind, settings = CASES[name]
    base = save(tmp_path / "base", make(kind, settings, vocab_size=KNOWN), tokenizer)
    assert "crt runs it as a native model." in crt("convert", base, tmp_path / "hf")
    crt("convert", tmp_path / "hf", tmp_path / "checkpoint")
    crt("convert", tmp_path / "checkpoint", tmp_path / "again")
    before, after = (load_file(tmp_path / place / "model.safetensors") for place in ("hf", "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    original = load_file(base / "model.safetensors")
    inner = {key.removeprefix("model.backbone.lm."): tensor for key, tensor in after.items() if "correction" not in key}
    assert {key for key in original if not torch.equal(inner[key], original[key])} == set()
    model = open_checkpoint(tmp_path / "checkpoint").model()
    assert type(model.backbone) is Transformer
    loaded, tokens = contextready.load(tmp_path / "hf"), some_tokens()
    assert type(loaded.model.backbone) is Transformer
    assert torch.equal(model(tokens, 2), loaded.model(tokens, 2))
    settings = [AutoConfig.from_pretrained(tmp_path / place).base_config.to_dict() for place in ("hf", "again")]
    for each in settings:
        each.pop("dtype", None)
    assert settings[0] == settings[1]


@pytest.mark.parametrize("engine", ["eager", "compiled"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_converted_folder_runs_on_both_engines(tmp_path, tokenizer, engine):
    base = save(tmp_path / "base", make(*CASES["qwen3, tied"], vocab_size=KNOWN), tokenizer)
    crt("convert", base, tmp_path / "hf")
    opened = contextready.load(tmp_path / "hf", engine=engine)
    assert type(opened.model.backbone) is Transformer
    text = opened.generate("river stone", max_tokens=6, temperature=0.0)
    assert text == contextready.load(base).generate("river stone", max_tokens=6, temperature=0.0)


@pytest.mark.parametrize("name", STAY)
def test_other_models_keep_their_wrapper_and_say_why(tmp_path, tokenizer, name):
    (kind, settings), reason = STAY[name]
    lm = make(kind, settings, vocab_size=KNOWN)
    with pytest.raises(NotNativeError, match=reason):
        native_backbone(lm)
    said = crt("convert", save(tmp_path / "base", lm, tokenizer), tmp_path / "hf")
    assert re.search(f"crt runs it as it is, inside a wrapper, because [^.]*{reason}", said)
    model = contextready.load(tmp_path / "hf").model
    assert type(model.backbone).__name__ == "HFBackbone"


def test_a_wrapped_model_has_no_native_checkpoint(tmp_path, tokenizer, capsys):
    save(tmp_path / "base", make("gemma", LLAMA_LIKE, vocab_size=KNOWN), tokenizer)
    crt("convert", tmp_path / "base", tmp_path / "hf")
    said = refused_conversion(capsys, tmp_path, tmp_path / "hf")
    assert "is a GemmaForCausalLM and cannot be written as a native checkpoint, because only Llama" in said


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda lm: lm.model.register_parameter("more", nn.Parameter(torch.zeros(3))), "it has other weights"),
        (lambda lm: setattr(lm.model.norm, "variance_epsilon", 0.5), "computes other logits"),
        (lambda lm: setattr(lm.config, "quantization_config", {"bits": 4}), "its weights are quantized"),
        (lambda lm: setattr(lm.config, "intermediate_size", 47), "its weights have other sizes"),
    ],
)
def test_a_model_that_is_not_what_it_says_is_not_native(change, reason):
    lm = make(*CASES["llama"])
    change(lm)
    with pytest.raises(NotNativeError, match=reason):
        native_backbone(lm)


def test_a_class_of_its_own_is_not_native():
    from transformers import LlamaForCausalLM

    class Mine(LlamaForCausalLM):
        pass

    lm = make(*CASES["llama"])
    lm.__class__ = Mine
    with pytest.raises(NotNativeError, match="Mine is not a class of transformers"):
        native_backbone(lm)


# Real models.

MODELS = Path(__file__).parents[2] / ".." / "shared" / "models"


@pytest.mark.parametrize("name", ["stories260K-hf", "stories15M-hf"])
@torch.no_grad()
def test_real_models(name, tmp_path):
    folder = MODELS / name
    if not folder.is_dir():
        pytest.skip(f"the pretrained model is not part of this repository (expected at ../shared/models/{name})")
    crt("convert", folder, tmp_path / "hf")
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    native = contextready.load(tmp_path / "hf").model
    assert type(native.backbone) is Transformer
    for model in (hf, native):
        randomise(model, seed=1, std=0.05)
    V = hf.config.vocab_size
    tokens = torch.randint(3, V, (1, 32), generator=torch.Generator().manual_seed(0))
    tokens[0, 0] = 1
    for K in (1, 3):
        assert gap(native(tokens, K), hf(tokens, passes=K).logits) < 1e-5 * float(
            hf(tokens, passes=K).logits.abs().max()
        )
    streamed, _ = native.stream(tokens, native.init_state(1))
    expected = hf(tokens, passes=33).logits
    assert gap(streamed, expected) < 1e-5 * float(expected.abs().max())
    prompt = tokens[:, :1]
    greedy = hf.generate(prompt, max_new_tokens=100, do_sample=False, eos_token_id=None, pad_token_id=0)[0, 1:].tolist()
    engine = torch_engine(native, capacity=128, solver="sequential")
    found = [int(engine.read(0, [1])[0].argmax())]
    while len(found) < 100:
        found.append(int(engine.step(found[-1:])[0].argmax()))
    assert found == greedy
    crt("convert", tmp_path / "hf", tmp_path / "checkpoint")
    crt("convert", tmp_path / "checkpoint", tmp_path / "again")
    original, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "again" / "model.safetensors")
    for key, tensor in original.items():
        if f"model.backbone.lm.{key}" in after or not key.startswith("lm_head"):
            assert torch.equal(after[f"model.backbone.lm.{key}"], tensor), key
