"""A small Llama on disk, and the same model after `crt convert`."""

import pytest
from hf_helpers import KNOWN, crt, save, tiny_lm, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return train_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def base(tmp_path_factory, tokenizer):
    """A small Llama on disk, which tests must not change."""
    return save(tmp_path_factory.mktemp("base"), tiny_lm("llama", vocab_size=KNOWN).float(), tokenizer)


@pytest.fixture(scope="module")
def converted(tmp_path_factory, base):
    """The converted folder, and what the command printed."""
    out = tmp_path_factory.mktemp("converted") / "converted"
    return out, crt("convert", base, out)
