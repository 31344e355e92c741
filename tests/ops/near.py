"""How a kernel's result is compared with a reference in higher precision."""

import pytest
import torch

# Where kernels run: in the interpreter, which has no BF16 products, and on a GPU.
PLACES = [
    pytest.param(("cpu", torch.float32), id="fp32-cpu"),
    pytest.param(("cpu", torch.float16), id="fp16-cpu"),
    pytest.param(("cuda", torch.bfloat16), id="bf16-cuda", marks=pytest.mark.gpu),
]

# Of the norm of the error to that of the result; a third of that of the largest error to the
# largest result, where two rounding points may fall to the other side. Seen: 7e-7 (FP32 sums of a
# matrix unit: more), 2e-4, 2e-3.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}


def assert_near(out: torch.Tensor, expected: torch.Tensor, *, dtype: torch.dtype) -> None:
    """`expected` is exact but for the rounding points that it shares with `out`."""
    assert out.shape == expected.shape
    error, exact = out.double() - expected.double(), expected.double()
    assert error.norm() <= TOLERANCE[dtype] * exact.norm()
    assert error.abs().max() <= 3 * TOLERANCE[dtype] * exact.abs().max()
