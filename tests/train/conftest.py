"""The tiny corpus, prepared once."""

import pytest
import train_helpers


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return train_helpers.make_data(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def other_data(tmp_path_factory, data):
    """Other text in the same tokens."""
    return train_helpers.make_data(tmp_path_factory.mktemp("other"), seed=1, tokenizer=str(data))


@pytest.fixture(scope="session")
def other_tokens(tmp_path_factory):
    """Other text and a tokenizer of its own."""
    return train_helpers.make_data(tmp_path_factory.mktemp("tokens"), seed=2, vocab_size=290)
