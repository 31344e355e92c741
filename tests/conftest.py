"""One thread for torch: the tests' tensors are tiny, and two processes must not fight for cores.

Without a GPU, kernels run under Triton's interpreter, which must be asked for before the import.
"""

import os


def pytest_configure(config):
    # A process that only hands tests to others, which it starts after this, needs no torch.
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return
    import torch

    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
