"""One thread a worker: the tensors are tiny, and two workers with two threads each only get in each other's way.

And the tiny corpus that runs are trained on, prepared once.
"""

import pytest
import torch
import train_helpers


@pytest.fixture(autouse=True)
def _one_thread():
    # Before every test: other packages may change it, and with it the last bits of sums that tests compare.
    torch.set_num_threads(1)


torch.set_num_threads(1)


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
