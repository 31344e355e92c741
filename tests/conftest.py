"""One thread for torch: the tests' tensors are tiny, and two processes must not fight for cores."""

import torch

torch.set_num_threads(1)
