"""Small models in which every weight is random, and their conversion for the oracle."""

import reference
import torch

from contextready import CORRECTIONS, ModelConfig, build_model

KINDS = tuple(name for name in CORRECTIONS if name != "memoryless")  # memoryless does not depend on the past
# Without biases, z_{-1} = 0 gives these two no correction at position 0, so one more position is exact.
SILENT_AT_START = ("blind", "block_head")


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

    def norm(name):
        return reference.LN(w[f"{name}.weight"], w.get(f"{name}.bias"))

    def ffn(name):
        return reference.FFN(linear(f"{name}.up"), linear(f"{name}.down"))

    C = backbone.width
    layers = [
        reference.Layer(
            norm_a=norm(f"{prefix}layers.{i}.attn_norm"),
            q=linear(f"{prefix}layers.{i}.attn.qkv", slice(0, C)),
            k=linear(f"{prefix}layers.{i}.attn.qkv", slice(C, 2 * C)),
            v=linear(f"{prefix}layers.{i}.attn.qkv", slice(2 * C, 3 * C)),
            out=linear(f"{prefix}layers.{i}.attn.out"),
            norm_f=norm(f"{prefix}layers.{i}.ffn_norm"),
            ffn=ffn(f"{prefix}layers.{i}.ffn"),
        )
        for i in range(backbone.config.layers)
    ]
    return reference.Model(
        embedding=w[f"{prefix}embedding.weight"],
        layers=layers,
        norm_out=norm(f"{prefix}final_norm"),
        head=linear(f"{prefix}unembedding"),
        heads=backbone.config.heads,
        window=backbone.config.window,
        rope_base=None if backbone.config.rope == "integer" else backbone.config.rope_base,
        extra=(norm(f"{prefix}extra_norm"), ffn(f"{prefix}extra_ffn")) if backbone.config.extra_ffn else None,
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
