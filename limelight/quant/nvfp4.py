"""Weights to NVFP4: w ~ code * scale * global scale, with the best scale of each block of 16.

The global scale takes the largest weight to 6 * 448, the largest code times the largest scale. A
block's scale would take its own largest weight to the code 6; but codes lie far apart near 6, and
scales are rounded, so those around it and up to where that weight becomes a 4 are tried as well,
and the one with the least squared error is kept.
"""

import math
from dataclasses import dataclass

import torch

from limelight.ops.fp4 import BLOCK

LARGEST_CODE, LARGEST_SCALE = 6.0, 448.0
# 4 instead of 6 for the largest weight of a block is a scale 4 or 5 steps of E4M3 higher.
STEPS = range(-2, 7)
# E4M3 without a sign: above it is NaN.
LARGEST_BITS = 0x7E
# Keeps quotients finite; weights of 0 come out as zero codes under it.
SMALLEST_GLOBAL_SCALE = 2.0**-100
# Weights at a time: what the cache of a core holds, for each core, or enough for a GPU.
PIECES = {"cpu": 2**18, "cuda": 2**24}
# A block in GGUF: values and bytes.
GGUF_BLOCK, GGUF_BYTES = 64, 36


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far weights are from what stands for them; of several tensors they add up."""

    squares: float = 0.0
    error_squares: float = 0.0
    largest: float = 0.0

    def __add__(self, other: "Deviation") -> "Deviation":
        return Deviation(
            self.squares + other.squares,
            self.error_squares + other.error_squares,
            max(self.largest, other.largest),
        )

    @property
    def relative(self) -> float:
        """RMS of the error over that of the weights."""
        return math.sqrt(self.error_squares / self.squares) if self.squares else 0.0


@dataclass(frozen=True, slots=True)
class Quantized:
    """`codes` uint8 [..., N, K / 2], `scales` float8_e4m3fn [..., N, K / 16], `scale` FP32 []."""

    codes: torch.Tensor
    scales: torch.Tensor
    scale: torch.Tensor
    deviation: Deviation


def global_scale(weight: torch.Tensor) -> torch.Tensor:
    """FP32 []; of tensors that share one it is the largest. `ValueError` if any is not finite."""
    low, high = (float(value) for value in weight.aminmax())
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError("holds values that are not finite")
    scale = max(max(-low, high) / (LARGEST_CODE * LARGEST_SCALE), SMALLEST_GLOBAL_SCALE)
    return torch.tensor(scale, dtype=torch.float32, device=weight.device)


def quantize_matrix(weight_NK: torch.Tensor, scale: torch.Tensor) -> Quantized:
    """[..., N, K] of any floating-point type, K a multiple of 16, piece by piece in FP32."""
    *rows, columns = weight_NK.shape
    assert columns % BLOCK == 0
    blocks_MB = weight_NK.reshape(-1, BLOCK)
    count = len(blocks_MB)
    codes_MX = torch.empty(count, BLOCK // 2, dtype=torch.uint8, device=weight_NK.device)
    bits_M = torch.empty(count, dtype=torch.uint8, device=weight_NK.device)
    deviation = Deviation()
    cores = torch.get_num_threads() if weight_NK.device.type == "cpu" else 1
    size = cores * PIECES[weight_NK.device.type] // BLOCK
    for start in range(0, count, size):
        piece = slice(start, start + size)
        block_MB = blocks_MB[piece].float()
        size_MB = block_MB.abs()
        bits_M[piece] = _best_scales(size_MB, scale)
        step_M1 = _step(bits_M[piece], scale)
        codes_MX[piece] = _pack(_codes(size_MB, step_M1), block_MB < 0)
        deviation += _deviation(size_MB, step_M1)
    return Quantized(
        codes_MX.view(*rows, columns // 2),
        bits_M.view(torch.float8_e4m3fn).view(*rows, columns // BLOCK),
        scale,
        deviation,
    )


def _best_scales(size_MB: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The bits of the scale of each block with the least squared error; `size_MB` is |w|."""
    wanted_M = (size_MB.amax(dim=1) / LARGEST_CODE / scale).clamp(max=LARGEST_SCALE)
    # Bits are in the order of what they stand for.
    nearest_M = wanted_M.to(torch.float8_e4m3fn).view(torch.uint8).int()
    best_M = nearest_M
    least_M = torch.full_like(wanted_M, math.inf)
    for step in sorted(STEPS, key=abs):
        bits_M = (nearest_M + step).clamp(0, LARGEST_BITS)
        step_M1 = _step(bits_M.to(torch.uint8), scale)
        error_M = _error(size_MB, step_M1).square_().sum(dim=1)
        best_M = torch.where(error_M < least_M, bits_M, best_M)
        least_M = torch.minimum(error_M, least_M)
    return best_M.to(torch.uint8)


def _step(bits_M: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What a code of 1 stands for, [M, 1]."""
    return (bits_M.view(torch.float8_e4m3fn).float() * scale)[:, None]


def _error(size_MB: torch.Tensor, step_M1: torch.Tensor) -> torch.Tensor:
    """The nearest that codes come to |w|, minus |w|."""
    low, middle, high = _parts(size_MB, step_M1)
    value = low.mul_(0.5).add_(middle).add_(high, alpha=2.0)
    return value.mul_(step_M1).sub_(size_MB)


def _codes(size_MB: torch.Tensor, step_M1: torch.Tensor) -> torch.Tensor:
    low, middle, high = _parts(size_MB, step_M1)
    return low.add_(middle).add_(high).to(torch.uint8)


def _parts(
    size_MB: torch.Tensor, step_M1: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The steps of the nearest code from 0 to 2 by halves, from 2 to 4 by ones, and from 4 to 6.

    Rounding to even is on either side of a bound the rounding to an even code.
    """
    ratio = size_MB / torch.where(step_M1 > 0, step_M1, math.inf)
    low = ratio.clamp(max=2.0).mul_(2.0).round_()
    middle = ratio.clamp(2.0, 4.0).sub_(2.0).round_()
    high = ratio.clamp(4.0, 6.0).sub_(4.0).mul_(0.5).round_()
    return low, middle, high


def _pack(codes_MB: torch.Tensor, negative_MB: torch.Tensor) -> torch.Tensor:
    """Two codes a byte, the first in the low half; zeros have no sign."""
    codes_MB |= (negative_MB & (codes_MB > 0)).to(torch.uint8) << 3
    return codes_MB[:, 0::2] | codes_MB[:, 1::2] << 4


def _deviation(size_MB: torch.Tensor, step_M1: torch.Tensor) -> Deviation:
    error = _error(size_MB, step_M1).abs_()
    return Deviation(
        float(size_MB.double().square_().sum()),
        float(error.double().square_().sum()),
        float(error.max()),
    )


def gguf_blocks(codes_NX: torch.Tensor, scales_NB: torch.Tensor) -> torch.Tensor:
    """GGUF's bytes of codes and scales, uint8 [..., N, K / 64 * 36]: K is a multiple of 64.

    A block has its four scales, then for each the codes: value i and i + 8 in byte i.
    """
    bytes_NB8 = codes_NX.unflatten(-1, (-1, BLOCK // 2))
    values_NBK = torch.stack((bytes_NB8 & 15, bytes_NB8 >> 4), dim=-1).flatten(-2)
    low, high = values_NBK.chunk(2, dim=-1)
    scales = scales_NB.view(torch.uint8).unflatten(-1, (-1, GGUF_BLOCK // BLOCK))
    codes = (low | high << 4).flatten(-2).unflatten(-1, (-1, GGUF_BLOCK // 2))
    return torch.cat((scales, codes), dim=-1).flatten(-2)
