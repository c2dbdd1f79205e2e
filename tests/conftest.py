"""One thread a worker: the tensors are tiny, and two workers with two threads each only get in each other's way."""

import torch

torch.set_num_threads(1)
