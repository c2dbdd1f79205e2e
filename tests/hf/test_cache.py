"""Caches of transformers that carry z: passed in, reordered, pickled, cropped, refused."""

import copy
import pickle

import pytest
import torch
from hf_generate_helpers import TOLERANCE, T, base, cacheless, generate, ready, some_families
from hf_helpers import gap, random_tokens
from transformers import DynamicCache, StaticCache

from contextready.errors import ContextReadyError
from contextready.hf.cache import HISTORY


@pytest.mark.parametrize("kind", ["empty", "configured", "static"])
@some_families
@torch.no_grad()
def test_a_cache_handed_in_goes_on(family, kind):
    model = ready(family)
    config = model.config.get_text_config()
    cache = {
        "empty": DynamicCache,
        "configured": lambda: DynamicCache(config=config),
        "static": lambda: StaticCache(config=config, max_cache_len=40),
    }[kind]()
    first = generate(model, random_tokens(length=T), new=4, past_key_values=cache)
    assert torch.equal(first, cacheless(model, random_tokens(length=T), new=4))
    longer = torch.cat((first, random_tokens(length=3, seed=1)), dim=1)
    second = generate(model, longer, new=4, past_key_values=cache)
    assert torch.equal(second, cacheless(model, longer, new=4))
    # Its last token has not been read: a chunk by forward, then a single token.
    more = torch.cat((second, random_tokens(length=4, seed=2)), dim=1)
    exact = model(more, use_cache=False).logits
    read = second.shape[1] - 1
    assert int(cache.get_seq_length()) == read
    assert gap(model(more[:, read:-1], past_key_values=cache).logits, exact[:, read:-1]) < TOLERANCE
    assert gap(model(more[:, -1:], past_key_values=cache).logits, exact[:, -1:]) < TOLERANCE
    # Emptied, it is as good as new.
    cache.reset()
    again = model(more[:, :6], past_key_values=cache).logits
    assert gap(again, exact[:, :6]) < TOLERANCE


@some_families
@torch.no_grad()
def test_rows_of_a_cache(family):
    model, tokens, after = ready(family), random_tokens(3, T), random_tokens(3, 4, seed=1)

    def filled():
        return model(tokens, use_cache=True).past_key_values

    def check(cache, rows):
        exact = model(torch.cat((tokens[rows], after[: len(rows)]), dim=1), use_cache=False).logits
        assert gap(model(after[: len(rows)], past_key_values=cache).logits, exact[:, T:]) < TOLERANCE

    cache = filled()
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    check(cache, [2, 0, 0])
    cache = filled()
    cache.batch_select_indices(torch.tensor([2, 1]))
    check(cache, [2, 1])
    cache = model(tokens[:1], use_cache=True).past_key_values
    cache.batch_repeat_interleave(3)
    check(cache, [0, 0, 0])
    prefix = filled()
    check(copy.deepcopy(prefix), [0, 1, 2])
    check(prefix, [0, 1, 2])


@torch.no_grad()
def test_pickled_cache_goes_on():
    model, tokens, after = ready("llama"), random_tokens(length=T), random_tokens(length=4, seed=1)
    plain = pickle.loads(pickle.dumps(base("llama")(tokens).past_key_values))
    assert plain.get_seq_length() == T
    cache = pickle.loads(pickle.dumps(model(tokens).past_key_values))
    exact = model(torch.cat((tokens, after), dim=1), use_cache=False).logits
    assert gap(model(after, past_key_values=cache).logits, exact[:, T:]) < TOLERANCE


@torch.no_grad()
def test_cropping_goes_back():
    model, tokens = ready("llama"), random_tokens(1, HISTORY + 8)
    exact = model(tokens, use_cache=False).logits
    for removed in (1, 5, HISTORY, HISTORY + 7):
        cache = model(tokens, use_cache=True).past_key_values
        cache.crop(-removed)
        assert gap(model(tokens[:, -removed:], past_key_values=cache).logits, exact[:, -removed:]) < TOLERANCE
    # One more token, and what is further back than the history is forgotten.
    for removed in (1, HISTORY):
        cache = model(tokens[:, :-1], use_cache=True).past_key_values
        model(tokens[:, -1:], past_key_values=cache)
        cache.crop(-removed)
        assert gap(model(tokens[:, -removed:], past_key_values=cache).logits, exact[:, -removed:]) < TOLERANCE
    # To nothing: that needs no z.
    cache = model(tokens[:, :-1], use_cache=True).past_key_values
    model(tokens[:, -1:], past_key_values=cache)
    cache.crop(-tokens.shape[1])
    assert gap(model(tokens, past_key_values=cache).logits, exact) < TOLERANCE


@torch.no_grad()
def test_cropping_more_than_is_remembered_is_refused():
    model, tokens = ready("llama"), random_tokens(1, HISTORY + 8)
    cache = model(tokens[:, :-1], use_cache=True).past_key_values
    model(tokens[:, -1:], past_key_values=cache)
    with pytest.raises(
        ContextReadyError, match="Cannot crop 33 tokens from a cache that keeps z of only the newest 33"
    ):
        cache.crop(-HISTORY - 1)


@torch.no_grad()
def test_refused_crop_changes_nothing():
    model, tokens = ready("llama"), random_tokens(1, HISTORY + 8)
    cache = model(tokens[:, :-2], use_cache=True).past_key_values
    model(tokens[:, -2:-1], past_key_values=cache)
    with pytest.raises(ContextReadyError):
        cache.crop(-HISTORY - 1)
    assert [layer.get_seq_length() for layer in cache.layers] == [HISTORY + 7] * 2
    exact = model(tokens, use_cache=False).logits
    assert gap(model(tokens[:, -1:], past_key_values=cache).logits, exact[:, -1:]) < TOLERANCE


@some_families
@torch.no_grad()
def test_cache_of_another_model_is_refused(family):
    model, tokens = ready(family), random_tokens(length=T)
    config = model.config.get_text_config()
    for cache in (DynamicCache(), DynamicCache(config=config), StaticCache(config=config, max_cache_len=20)):
        base(family)(tokens, past_key_values=cache)
        with pytest.raises(ContextReadyError, match="filled by another model and holds no z"):
            model(tokens[:, -1:], past_key_values=cache)
        with pytest.raises(ContextReadyError, match="filled by another model and holds no z"):
            generate(model, random_tokens(length=T + 1), past_key_values=cache)
