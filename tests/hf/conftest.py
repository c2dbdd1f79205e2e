"""A small Llama on disk, and what `crt convert` makes of it."""

import pytest
from hf_helpers import KNOWN, crt, save, tiny_lm, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return train_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def base(tmp_path_factory, tokenizer):
    """A small Llama on disk: only read, never changed."""
    return save(tmp_path_factory.mktemp("base"), tiny_lm("llama", vocab_size=KNOWN).float(), tokenizer)


@pytest.fixture(scope="module")
def converted(tmp_path_factory, base):
    """What the command made of it, and what it said."""
    out = tmp_path_factory.mktemp("converted") / "converted"
    return out, crt("convert", base, out)
