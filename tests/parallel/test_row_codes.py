"""Rows as they travel."""

import pytest
import torch

from limelight.parallel.row_codes import decode_rows, encode_rows


@pytest.mark.parametrize("size", [48, 128, 260, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_rows_take_half_the_bytes_of_bf16_and_come_back_near(size, dtype):
    x = torch.randn(5, size).to(dtype) * torch.tensor([1e-3, 1.0, 1e3, 0.0, 7.0])[:, None].to(dtype)
    sent = encode_rows(x, fp8=True)
    assert sent.dtype == torch.uint8 and sent.shape[1] <= size + 4 * max(1, size // 128)
    back = decode_rows(sent, size, dtype)
    assert back.dtype == dtype
    assert ((back - x).float().norm(dim=1) <= 0.04 * x.float().norm(dim=1)).all()
    assert decode_rows(encode_rows(x, fp8=False), size, dtype) is x
    assert decode_rows(encode_rows(x[:0], fp8=True), size, dtype).shape == (0, size)
