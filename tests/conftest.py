"""One thread for torch: the tests' tensors are tiny, and two processes must not fight for cores.

Without a GPU, kernels run under Triton's interpreter, which must be asked for before the import.
"""

import os

import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
