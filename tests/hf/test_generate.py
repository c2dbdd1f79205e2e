"""All of `generate` with a cache gives the tokens that it gives without one, in every family."""

import copy

import pytest
import torch
from hf_generate_helpers import (
    FULL,
    OTHERS,
    TOLERANCE,
    T,
    all_in_the_slow_tests,
    base,
    cacheless,
    generate,
    ready,
    some_families,
)
from hf_helpers import FAMILIES, gap, oracle, random_tokens, tiny_ready
from transformers.generation import BaseStreamer, CompileConfig, LogitsProcessor

from contextready.hf.cache import Carrying

NO_STATIC = {"static": ("falcon-alibi",), "static, chunked prefill": ("falcon", "falcon-alibi")}
"""Caches that the plain model itself cannot use."""
FLOAT32_SOFTMAX = ("gemma2", "bloom")
"""These compute attention in float32, whose mask overflows when the model is in float64."""
every_family = pytest.mark.parametrize("family", FAMILIES)
others = pytest.mark.parametrize("family", OTHERS)


def repetitive(seed=0):
    """A prompt in which a lookup finds something."""
    return random_tokens(1, 4, seed).repeat(1, 3)


class Scrambled(LogitsProcessor):
    """Only the prompt's tokens, by a digit of their logits: guesses are right at times, and small errors show."""

    def __init__(self, tokens):
        self.tokens = tokens.unique()

    def __call__(self, input_ids, scores):
        kept = (30 * scores[:, self.tokens]).sin()
        return torch.full_like(scores, -torch.inf).index_copy(1, self.tokens, kept)


VARIED = {"no_repeat_ngram_size": 1}
"""Random models repeat themselves, and what always comes hides errors: no token twice."""
MODES = {
    "greedy": VARIED,
    "sampling": {"do_sample": True, "num_return_sequences": 3, "temperature": 0.7, "top_k": 20},
    "beam": {"num_beams": 3, "num_return_sequences": 2} | VARIED,
    "beam-sampling": {"num_beams": 3, "do_sample": True, "temperature": 1.3},
}

CACHES = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "chunked prefill": {"prefill_chunk_size": 3},
    "static, chunked prefill": {"cache_implementation": "static", "prefill_chunk_size": 3},
}


@pytest.mark.parametrize("mode", MODES)
@all_in_the_slow_tests(OTHERS)
def test_modes(family, mode):
    model, tokens, settings = ready(family), random_tokens(length=T), MODES[mode]
    expected = cacheless(model, tokens, **settings)
    assert expected.shape == (2 * settings.get("num_return_sequences", 1), T + 8)
    assert not torch.equal(expected, cacheless(base(family), tokens, **settings))
    for cache in CACHES:
        if family not in NO_STATIC.get(cache, ()):
            assert torch.equal(generate(model, tokens, **settings, **CACHES[cache]), expected), cache


@some_families
def test_greedy_is_the_oracles(family):
    tokens = random_tokens(length=T)
    found = generate(ready(family), tokens, new=6, **VARIED)
    for _ in range(6):
        logits = oracle(base(family), ready(family).model.correction, tokens)[:, -1]
        logits = logits.index_fill(1, torch.tensor([0]), -torch.inf).scatter(1, tokens, -torch.inf)
        tokens = torch.cat((tokens, logits.argmax(-1, keepdim=True)), dim=1)
    assert torch.equal(found, tokens)


@pytest.mark.parametrize("mode", ["greedy", "beam"])
@others
def test_modes_of_the_other_families(family, mode):
    model, tokens, settings = ready(family), random_tokens(length=T), MODES[mode]
    expected = cacheless(model, tokens, **settings)
    assert not torch.equal(expected, cacheless(base(family), tokens, **settings))
    assert torch.equal(generate(model, tokens, **settings), expected)


@pytest.mark.parametrize("family", [family for family in OTHERS if family not in NO_STATIC["static"]])
def test_static_cache_of_the_other_families(family):
    model, tokens = ready(family), random_tokens(3, T)
    for settings in (MODES["greedy"], MODES["beam"]):
        found = generate(model, tokens, cache_implementation="static", **settings)
        assert torch.equal(found, cacheless(model, tokens, **settings))
    if family in FLOAT32_SOFTMAX:
        model = copy.deepcopy(model).float()
    mask = torch.ones_like(tokens)
    mask[0, :3], mask[2, :1] = 0, 0
    settings = {"attention_mask": mask} | VARIED
    found = generate(model, tokens * mask, cache_implementation="static", **settings)
    assert torch.equal(found, cacheless(model, tokens * mask, **settings))


@pytest.mark.parametrize(("cache", "family"), [(cache, family) for cache in NO_STATIC for family in NO_STATIC[cache]])
def test_static_cache_fails_where_the_plain_model_does(cache, family):
    for model in (base(family), ready(family)):
        with pytest.raises((ValueError, RuntimeError), match=r"too many values to unpack|must match|same slice shapes"):
            generate(model, random_tokens(length=T), **CACHES[cache])


@every_family
def test_left_padding_changes_nothing(family):
    model, plain = ready(family), base(family)
    if family in FLOAT32_SOFTMAX:
        model, plain = copy.deepcopy(model).float(), copy.deepcopy(plain).float()
    tokens = random_tokens(3, T)
    mask = torch.ones_like(tokens)
    mask[0, :3], mask[2, :1] = 0, 0
    padded, settings = tokens * mask, {"attention_mask": mask} | VARIED
    expected = cacheless(model, padded, **settings)
    assert torch.equal(generate(model, padded, **settings), expected)
    assert torch.equal(generate(model, padded, prefill_chunk_size=2, **settings), expected)
    if family in FULL:
        assert torch.equal(generate(model, padded, cache_implementation="static", **settings), expected)
    beams = generate(model, padded, num_beams=3, **settings)
    for row, start in enumerate((3, 0, 1)):
        alone = tokens[row : row + 1, start:]
        assert torch.equal(generate(model, alone, **VARIED)[0], expected[row, start:])
        assert torch.equal(generate(model, alone, num_beams=3, **VARIED)[0], beams[row, start:])
    # And logits. Told no positions, the plain model counts padding as some: GPT-2 is then far off, others round.
    with torch.no_grad():
        ours = gap(model(padded, attention_mask=mask).logits[:1, 3:], model(tokens[:1, 3:]).logits)
        positions = {} if family == "bloom" else {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
        theirs = gap(plain(padded, attention_mask=mask, **positions).logits[:1, 3:], plain(tokens[:1, 3:]).logits)
    assert ours < TOLERANCE + 100 * theirs
    assert theirs < (1e-5 if family in FLOAT32_SOFTMAX else 1e-12)


@pytest.mark.parametrize("family", FLOAT32_SOFTMAX)
@torch.no_grad()
def test_padding_in_float64_fails_where_the_plain_model_does(family):
    tokens = random_tokens(length=T)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    for model in (base(family), ready(family)):
        assert model(tokens * mask, attention_mask=mask).logits[0].isnan().any()
        assert not model(tokens * mask, attention_mask=mask).logits[1].isnan().any()


@some_families
@torch.no_grad()
def test_right_padding_in_forward(family):
    model, tokens = ready(family), random_tokens(length=T)
    mask = torch.ones_like(tokens)
    mask[0, 4:] = 0
    for use_cache in (True, False):
        logits = model(tokens * mask, attention_mask=mask, use_cache=use_cache).logits
        assert gap(logits[:1, :4], model(tokens[:1, :4]).logits) < TOLERANCE
        assert gap(logits[1:], model(tokens[1:]).logits) < TOLERANCE


@some_families
@torch.no_grad()
def test_packed_documents_are_read_apart(family):
    tokens = random_tokens(length=12)
    position_ids = torch.tensor([[*range(5), *range(4), *range(3)]]).expand(2, -1)
    for model in (base(family), ready(family)):
        packed = model(tokens, position_ids=position_ids, use_cache=False).logits
        for start, end in ((0, 5), (5, 9), (9, 12)):
            assert gap(packed[:, start:end], model(tokens[:, start:end]).logits) < TOLERANCE
    # Without use_cache it is decided by what was given; K passes keep documents apart too.
    assert gap(ready(family)(tokens, position_ids=position_ids).logits, packed) < TOLERANCE
    three = ready(family)(tokens, position_ids=position_ids, passes=3).logits
    assert gap(three[:, 5:9], ready(family)(tokens[:, 5:9], passes=3).logits) < TOLERANCE


@some_families
def test_prompt_lookup(family, monkeypatch):
    model, removed, crop = ready(family), [], Carrying.crop

    def spy(self, tokens_to_remove):
        removed.append(abs(int(tokens_to_remove)))
        crop(self, tokens_to_remove)

    monkeypatch.setattr(Carrying, "crop", spy)
    for seed in range(3):
        prompt = repetitive(seed)
        for processors in ([], [Scrambled(prompt)]):
            found = generate(model, prompt, prompt_lookup_num_tokens=3, logits_processor=processors)
            assert torch.equal(found, cacheless(model, prompt, logits_processor=processors))
    # All candidates, some and none were right; for the rest z was taken back.
    assert set(removed) > {0, 1, 3}


@some_families
def test_assisted_decoding(family):
    model, tokens = ready(family), random_tokens(1, T)
    for processors in ([], [Scrambled(tokens)]):
        settings = {"logits_processor": processors}
        expected = cacheless(model, tokens, **settings)
        for assistant in (base(family), base(family, 5), base("llama"), model):
            assert torch.equal(generate(model, tokens, assistant_model=assistant, **settings), expected)
        # The other way round: the context-ready model proposes.
        plain = cacheless(base(family), tokens, **settings)
        assert not torch.equal(plain, expected)
        assert torch.equal(generate(base(family), tokens, assistant_model=model, **settings), plain)


@some_families
def test_embeddings_instead_of_tokens(family):
    model, tokens = ready(family), random_tokens(length=T)
    with torch.no_grad():
        e_BTC = model.get_input_embeddings()(tokens)
        assert gap(model(inputs_embeds=e_BTC).logits, model(tokens).logits) < TOLERANCE
    expected = cacheless(model, tokens)
    for settings in CACHES.values():
        found = generate(model, None, inputs_embeds=e_BTC, **{**settings, "prefill_chunk_size": None})
        assert torch.equal(found, expected[:, T:])


class Collector(BaseStreamer):
    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True


@some_families
def test_streamer_gets_every_token(family):
    streamer, tokens = Collector(), random_tokens(1, T)
    generate(ready(family), tokens, streamer=streamer)
    assert streamer.tokens == cacheless(ready(family), tokens)[0].tolist()
    assert streamer.ended


def test_beams_whose_z_stays_behind_are_noticed(monkeypatch):
    """Negative control: without z's part in reordering, these comparisons fail."""
    model, tokens = ready("llama"), random_tokens(length=T)
    settings = {"num_beams": 3} | VARIED
    expected = cacheless(model, tokens, **settings)
    assert torch.equal(generate(model, tokens, **settings), expected)
    monkeypatch.setattr(Carrying, "reorder_cache", lambda self, rows: super(Carrying, self).reorder_cache(rows))
    assert not torch.equal(generate(model, tokens, **settings), expected)


def test_lookup_whose_z_is_not_taken_back_is_noticed(monkeypatch):
    """Negative control: without z's part in cropping, these comparisons fail."""
    model, prompt = ready("llama"), repetitive()
    settings = {"logits_processor": [Scrambled(prompt)]}
    expected = cacheless(model, prompt, **settings)
    assert torch.equal(generate(model, prompt, prompt_lookup_num_tokens=3, **settings), expected)
    monkeypatch.setattr(Carrying, "crop", lambda self, *args: super(Carrying, self).crop(*args))
    assert not torch.equal(generate(model, prompt, prompt_lookup_num_tokens=3, **settings), expected)


def test_compiled_steps():
    model, tokens = tiny_ready("llama"), random_tokens(length=T)
    compiling = CompileConfig(backend="eager", mode=None, fullgraph=True)
    compiling._compile_all_devices = True
    settings = {"cache_implementation": "static", "compile_config": compiling}
    for prompt in (tokens, random_tokens(length=T, seed=3)):
        assert torch.equal(generate(model, prompt, **settings), cacheless(model, prompt))
    assert model._compiled_call is not None
