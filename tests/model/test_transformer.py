"""The backbone: its three functions, its window, its configuration."""

from dataclasses import replace

import pytest
import torch
from helpers import gap, random_tokens, small_config, small_model

from contextready import CORRECTIONS, ContextReadyError, Transformer, TransformerConfig
from contextready.measure.bounds import receptive_field


def test_three_functions_make_the_model():
    model = small_model(correction=None)
    backbone, tokens = model.backbone, random_tokens()
    z, cache = backbone.blocks(backbone.embed(tokens))
    assert cache is None
    assert torch.equal(backbone.head(z), model(tokens))


@pytest.mark.parametrize("window", [1, 2, 5])
@pytest.mark.parametrize("layers", [1, 3])
def test_window_counts_the_token_itself(layers, window):
    """Position t is a function of positions t - N (W - 1) … t, of every one of them and of no other."""
    model = small_model(correction=None, layers=layers, window=window).backbone
    x = model.embed(random_tokens(batch=1, length=16)).detach().requires_grad_()
    model.blocks(x)[0][0, -1].sum().backward()
    seen = (x.grad[0].abs().sum(dim=-1) > 0).tolist()
    reach = min(15, receptive_field(layers, window))
    assert seen == [False] * (15 - reach) + [True] * (reach + 1)


def test_a_window_as_long_as_the_sequence_is_full_attention():
    full, windowed = small_model(correction=None), small_model(correction=None, window=9)
    assert gap(full(random_tokens()), windowed(random_tokens())) < 1e-12


def test_long_positions_keep_their_angles():
    """Rotary attention depends on distances only, so a late start must give what an early one gives."""
    model = small_model(correction=None, window=4, dtype=torch.float32)
    tokens = random_tokens(length=8)
    early = model.init_state(2)
    late = replace(early, cache=replace(early.cache, position=1_000_000))
    assert gap(model.stream(tokens, early)[0], model.stream(tokens, late)[0]) < 2e-5


def test_untied_head_and_no_hidden_parameters():
    model = Transformer(TransformerConfig(vocab_size=7, width=8, layers=1, heads=2))
    assert model.embedding.weight is not model.unembedding.weight
    # embedding and head, 12 C² and the two norms of a block, the final norm
    assert sum(p.numel() for p in model.parameters()) == 2 * 7 * 8 + 12 * 64 + 3 * 8


def test_bfloat16_autocast_runs_and_stays_close():
    model = small_model(dtype=torch.float32, width=48)
    tokens = random_tokens()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(tokens, 3)
    assert torch.nn.functional.cosine_similarity(logits.float().flatten(), model(tokens, 3).flatten(), dim=0) > 0.98


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 4}, "an odd head size of 3"),
        ({"heads": 5}, "width=12 is not divisible by heads=5"),
        ({"window": 0}, "window must be at least 1 (it includes the token itself) or none, but got 0"),
        ({"layers": 0}, "layers must be at least 1, but got 0"),
        ({"vocab_size": 0}, "vocab_size must be at least 1, but got 0"),
        ({"width": -2}, "width must be at least 1, but got -2"),
        ({"dropout": 1.0}, "dropout must be at least 0 and less than 1, but got 1.0"),
        ({"rope_base": 0.0}, "rope_base"),
        ({"rope_base": float("nan")}, "rope_base"),
        ({"dropout": float("nan")}, "dropout"),
        ({"correction": None, "correction_init": "nought"}, "Unknown correction_init 'nought'"),
        (
            {"correction": "plus"},
            f"Unknown correction 'plus'; choose one of: {', '.join(CORRECTIONS)}",
        ),
        ({"correction": ""}, "Unknown correction ''"),
        ({"correction": "consat"}, "did you mean 'concat'?"),
        ({"correction_init": "zeros"}, "did you mean 'zero'?"),
        ({"correction": "tied", "correction_init": "zero"}, "no output layer that could start at zero"),
        ({"correction": "block_head", "correction_init": "zero"}, "no output layer that could start at zero"),
    ],
)
def test_bad_configurations_say_what_is_wrong(changes, message):
    with pytest.raises(ContextReadyError) as error:
        small_config(**changes)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
