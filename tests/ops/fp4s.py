"""Random weights of four bits."""

import torch
from ahead import meta

from limelight.ops.fp4 import BLOCK, FP4, unpack_reference


def random_fp4(
    *shape: int,
    generator: torch.Generator,
    device: str | torch.device = "cpu",
    spread: float = 8.0,
) -> FP4:
    """Weights [..., N, K] of about K^-1/2 times a factor of the row, from 2^-spread to 2^spread.

    Codes are any; block scales differ by up to 16 and some are zero.
    """
    *rows, columns = shape
    draw = {"generator": generator, "device": device}
    codes = torch.randint(256, (*rows, columns // 2), dtype=torch.uint8, **draw)
    scales = 2 ** (4 * torch.rand(*rows, columns // BLOCK, **draw) - 2)
    scales[torch.rand(scales.shape, **draw) < 0.02] = 0.0
    sizes = 2 ** (spread * (2 * torch.rand(rows, **draw) - 1)) * (0.25 * columns**-0.5)
    return FP4(codes, scales.to(torch.float8_e4m3fn), sizes)


def decoded(weight: FP4, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The weights themselves, [..., N, K]."""
    held = unpack_reference(weight.codes, weight.scales, dtype=torch.float32)
    return held.to(dtype) * weight.rows[..., None].to(dtype)


def meta_fp4(*shape: int) -> FP4:
    """Weights [..., N, K] without memory."""
    *rows, columns = shape
    return FP4(
        meta(*rows, columns // 2, dtype=torch.uint8),
        meta(*rows, columns // BLOCK, dtype=torch.float8_e4m3fn),
        meta(*rows, dtype=torch.float32),
    )
