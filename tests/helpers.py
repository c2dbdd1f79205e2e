"""Small models in which every weight is random, and their conversion for the oracle."""

import pytest
import reference
import torch

from contextready import CORRECTIONS, ModelConfig, build_model

KINDS = tuple(name for name in CORRECTIONS if name != "memoryless")  # memoryless does not depend on the past
# Without biases, z_{-1} = 0 gives these two no correction at position 0, so one more position is exact.
SILENT_AT_START = ("blind", "block_head")
LLAMA = {"norm": "rms", "norm_eps": 1e-2, "ffn": "swiglu", "ffn_width": 10, "heads": 6, "kv_heads": 2, "head_width": 4}
OPTIONS = {
    "norm": {"norm": "rms", "norm_eps": 1e-2},
    "epsilon": {"norm_eps": 1e-2, "bias": True},
    "ffn": {"ffn": "swiglu", "ffn_width": 10, "bias": True},
    "hidden width": {"ffn_width": 10},
    "shared keys": {"heads": 6, "kv_heads": 2},
    "one shared key": {"heads": 6, "kv_heads": 1, "bias": True},
    "head size": {"heads": 3, "head_width": 6},
    "head norms": {"qk_norm": True, "norm_eps": 1e-2},
    "biases": {"qkv_bias": True},
    "tied": {"tied_embeddings": True},
    "linear": {"rope": "linear", "rope_factor": 3.0, "rope_base": 50.0},
    "llama3": {
        **{"heads": 1, "rope": "llama3", "rope_factor": 3.0, "rope_low": 0.5, "rope_high": 2.0, "rope_length": 40},
        "rope_base": 50.0,
    },
    "some layers without": {"layers": 3, "no_rope_every": 2},
    "like Llama": {**LLAMA, "tied_embeddings": True, "rope_base": 500.0},
    "like Qwen2": {**LLAMA, "qkv_bias": True},
    "like Qwen3": {**LLAMA, "qk_norm": True, "tied_embeddings": True},
    "like SmolLM3": {**LLAMA, "no_rope_every": 2, "tied_embeddings": True},
    "like Mistral": {**LLAMA, "window": 3},
    "everything": {**LLAMA, "window": 4, "qk_norm": True, "qkv_bias": True, "extra_ffn": True, "no_rope_every": 2},
}
"""The settings that other families need, each alone and together as the families have them."""
every_option = pytest.mark.parametrize("changes", OPTIONS.values(), ids=OPTIONS)


def randomise(model, seed=0, gain=1.0):
    """Make every weight random, including norms and biases, so that no test passes because something is 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.dim() == 2:
                parameter.copy_(gain * noise / parameter.shape[1] ** 0.5)
            else:
                parameter.copy_(1.0 + 0.3 * noise)
    return model


def small_config(**changes):
    settings = {"vocab_size": 23, "width": 12, "layers": 2, "heads": 3, "correction": "add"} | changes
    return ModelConfig(**settings)


def small_model(seed=0, gain=1.0, dtype=torch.float64, **changes):
    return randomise(build_model(small_config(**changes)).to(dtype), seed, gain).eval()


def contractive_model(scale=0.3, **changes):
    """A model whose unroll converges quickly: large embeddings, small corrections."""
    model = small_model(**changes)
    with torch.no_grad():
        model.backbone.embedding.weight.mul_(3.0)
        model.correction.ffn.down.weight.mul_(scale)
    return model


def random_tokens(batch=2, length=9, vocab_size=23, seed=1):
    return torch.randint(vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def stream_in_chunks(model, tokens, lengths, state=None):
    """Logits of a stream fed in chunks of these lengths, and the last state."""
    state = model.init_state(tokens.shape[0]) if state is None else state
    pieces, start = [], 0
    for length in lengths:
        logits, state = model.stream(tokens[:, start : start + length], state)
        pieces.append(logits)
        start += length
    assert start == tokens.shape[1]
    return torch.cat(pieces, dim=1), state


def oracle(model):
    """The same weights as plain arrays in the oracle's own structures."""
    backbone, prefix = model.backbone, "backbone."
    w = {name: tensor.detach().double().numpy() for name, tensor in model.state_dict().items()}

    def linear(name, rows=slice(None)):
        bias = w.get(f"{name}.bias")
        return reference.Linear(w[f"{name}.weight"][rows], None if bias is None else bias[rows])

    c = backbone.config

    def norm(name):
        return reference.LN(w[f"{name}.weight"], w.get(f"{name}.bias"))

    def block_norm(name):
        if c.norm == "rms":
            return reference.RMS(w[f"{name}.weight"], c.norm_eps)
        return reference.LN(w[f"{name}.weight"], w.get(f"{name}.bias"), c.norm_eps)

    def ffn(name):
        return reference.FFN(linear(f"{name}.up"), linear(f"{name}.down"))

    def block_ffn(name):
        if c.ffn == "swiglu":
            return reference.GatedFFN(linear(f"{name}.gate"), linear(f"{name}.up"), linear(f"{name}.down"))
        return ffn(name)

    def head_norm(name):
        return reference.RMS(w[f"{name}.weight"], c.norm_eps) if c.qk_norm else None

    E = c.head_width or c.width // c.heads
    queries, keys = E * c.heads, E * (c.kv_heads or c.heads)
    layers = [
        reference.Layer(
            norm_a=block_norm(f"{prefix}layers.{i}.attn_norm"),
            q=linear(f"{prefix}layers.{i}.attn.qkv", slice(0, queries)),
            k=linear(f"{prefix}layers.{i}.attn.qkv", slice(queries, queries + keys)),
            v=linear(f"{prefix}layers.{i}.attn.qkv", slice(queries + keys, queries + 2 * keys)),
            out=linear(f"{prefix}layers.{i}.attn.out"),
            norm_f=block_norm(f"{prefix}layers.{i}.ffn_norm"),
            ffn=block_ffn(f"{prefix}layers.{i}.ffn"),
            norm_q=head_norm(f"{prefix}layers.{i}.attn.q_norm"),
            norm_k=head_norm(f"{prefix}layers.{i}.attn.k_norm"),
            rotates=c.no_rope_every is None or (i + 1) % c.no_rope_every != 0,
        )
        for i in range(c.layers)
    ]
    llama3 = reference.Llama3(c.rope_factor, c.rope_low, c.rope_high, c.rope_length)
    return reference.Model(
        embedding=w[f"{prefix}embedding.weight"],
        layers=layers,
        norm_out=block_norm(f"{prefix}final_norm"),
        head=linear(f"{prefix}unembedding"),
        heads=c.heads,
        window=c.window,
        rope_base=None if c.rope == "integer" else c.rope_base,
        scaling=llama3 if c.rope == "llama3" else c.rope_factor,
        size=c.head_width,
        kv_heads=c.kv_heads,
        extra=(block_norm(f"{prefix}extra_norm"), block_ffn(f"{prefix}extra_ffn")) if c.extra_ffn else None,
        variant=backbone.config.correction,
        corr_norms={
            name.split(".")[1]: norm(name.removesuffix(".weight"))
            for name in w
            if name.startswith("correction.norm") and name.endswith(".weight")
        },
        corr_ffn=ffn("correction.ffn") if "correction.ffn.up.weight" in w else None,
        corr_scale=w.get("correction.gain", backbone.config.correction_scale),
    )


def per_row(function, model, tokens, *args, **kwargs):
    """An oracle function over a batch, as a tensor."""
    translated = oracle(model)
    rows = [torch.from_numpy(function(translated, row.tolist(), *args, **kwargs)) for row in tokens]
    return torch.stack(rows)


def gap(a, b):
    return (a - b).abs().max().item()
