"""One thread a worker: the tensors are tiny, and two workers with two threads each only get in each other's way."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    # Before every test: other packages may change it, and with it the last bits of sums that tests compare.
    torch.set_num_threads(1)


torch.set_num_threads(1)
