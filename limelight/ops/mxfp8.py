"""Products of eight bits, MXFP8 (OCP Microscaling Formats 1.0): x = code * 2^(scale - 127).

A code is E4M3 (up to 448), a scale is E8M0: one byte for each block of 32 neighbours of a row, of
which 255 is no number. The exponent of a block is ceil(log2(largest / 448)), at least -127, so that
nothing saturates; codes are rounded to the nearest, halves to even.

Both operands of a product are quantized (W8A8): weights are held so, activations are rounded to
what the format can hold right before the product. code * 2^n is exact in BF16 and in FP32, so on
any device a product is what the matrix units of Blackwell make of the same bytes, up to the order
of the sum. The kernels decode weights as they read them; rounded activations stay in their type.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from limelight.ops import by_size, cdiv, invariant, is_batch_invariant, op, pdl, stages
from limelight.ops.thin import swiglu_rows

BLOCK = 32
CODES = torch.float8_e4m3fn
# Bits of FP32: the exponent of a block is that of its largest number less 8, and one more where
# the mantissa is above that of 448.
EXPONENT, MANTISSA, LARGEST_MANTISSA = 23, 0x7FFFFF, 0x600000
NO_NUMBER = 255
# Numbers that are quantized at a time, with FP32 copies.
AT_ONCE = 2**22
Blocks = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class MXFP8:
    """Matrices [..., N, K]: `codes` float8_e4m3fn [..., N, K], `scales` uint8 [..., N, K / 32]."""

    codes: torch.Tensor
    scales: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.codes.shape)

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.codes, self.scales

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, index: int | slice) -> "MXFP8":
        return MXFP8(*(tensor[index] for tensor in self.tensors))

    def narrow(self, rows: slice) -> "MXFP8":
        """Some rows of every matrix."""
        return MXFP8(*(tensor[..., rows, :] for tensor in self.tensors))

    def check(self) -> None:
        """What kernels take for granted."""
        *rows, columns = self.shape
        assert columns % BLOCK == 0 and self.codes.dtype == CODES
        assert self.scales.shape == (*rows, columns // BLOCK)
        assert self.scales.dtype == torch.uint8
        assert all(tensor.is_contiguous() for tensor in self.tensors)


def quantize(x: torch.Tensor) -> MXFP8:
    """[..., K] of any floating-point type, K a multiple of 32; a block with a number that is not
    finite gets the scale NO_NUMBER."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    bits = blocks.abs().amax(-1).view(torch.int32)
    carry = (bits & MANTISSA) > LARGEST_MANTISSA
    scales = ((bits >> EXPONENT) - 8 + carry).clamp(min=0)
    scales = torch.where(bits >> EXPONENT == NO_NUMBER, NO_NUMBER, scales)
    # Its inverse is never subnormal: 2^128 is the largest number's bound.
    inverse = ((254 - scales) << EXPONENT).view(torch.float32)
    codes = (blocks * inverse[..., None]).to(CODES).flatten(-2)
    return MXFP8(codes, scales.to(torch.uint8))


def dequantize(x: MXFP8, *, dtype: torch.dtype) -> torch.Tensor:
    """The numbers that codes and scales stand for; a scale of NO_NUMBER makes them NaN."""
    powers = x.scales.view(torch.float8_e8m0fnu).float()
    blocks = x.codes.to(torch.float32).unflatten(-1, (-1, BLOCK))
    return (blocks * powers[..., None]).flatten(-2).to(dtype)


@torch.no_grad()
def quantize_into(into: MXFP8, x: torch.Tensor) -> None:
    """Quantize [..., N, K] on the device of `into`; `ValueError` if a number is not finite."""
    rows = max(1, AT_ONCE // x[:1].numel())
    for at in range(0, len(x), rows):
        piece = quantize(x[at : at + rows].to(into.codes.device))
        if bool((piece.scales == NO_NUMBER).any()):
            raise ValueError("holds numbers that are not finite")
        into.codes[at : at + rows].copy_(piece.codes)
        into.scales[at : at + rows].copy_(piece.scales)


class _StraightThrough(torch.autograd.Function):
    """Rounding, whose gradient is that of no rounding."""

    @staticmethod
    def forward(context, x):
        return dequantize(quantize(x), dtype=x.dtype)

    @staticmethod
    def backward(context, gradient):
        return gradient


def fake_quantize_reference(x: torch.Tensor) -> torch.Tensor:
    """What MXFP8 holds of [..., K], in the type of x; gradients pass as if nothing were rounded."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _StraightThrough.apply(x)
    return dequantize(quantize(x), dtype=x.dtype)


@triton.jit
def _power(scale):
    """2^(scale - 127) of bytes, FP32."""
    scale = scale.to(tl.int32)
    # The least one is subnormal, and 255 is NaN.
    bits = tl.where(scale == 0, 0x400000, scale << 23)
    return tl.where(scale == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _decoded(code):
    """E4M3 bits (uint8), FP32; NaN, which no code here is, would be 480."""
    # As FP16 they are 2^8 times too small.
    bits = ((code & 0x80).to(tl.int16) << 8) | ((code & 0x7F).to(tl.int16) << 7)
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def _rounded(x):
    """FP32 of at most 448 to the nearest E4M3, halves to even."""
    size = tl.abs(x)
    # Below 2^-6 the steps are 2^-9: a sum with 2^14 is rounded to them.
    small = (size + 16384.0) - 16384.0
    bits = size.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    value = tl.where(size < 0.015625, small, bits.to(tl.float32, bitcast=True))
    return tl.where(x < 0, -value, value)


@triton.jit
def _fake_quantize_kernel(x, out, blocks, BLOCK_B: tl.constexpr, PDL: tl.constexpr):
    """BLOCK_B blocks of 32 numbers."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b_B = tl.program_id(0).to(tl.int64) * BLOCK_B + tl.arange(0, BLOCK_B)
    at_BX = b_B[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside_BX = (b_B < blocks)[:, None]
    x_BX = tl.load(x + at_BX, mask=inside_BX, other=0.0).to(tl.float32)
    # Bits of sizes are in the order of what they stand for, with infinity and NaN above all.
    bits_B = tl.max(tl.abs(x_BX).to(tl.int32, bitcast=True), axis=1)
    carry_B = ((bits_B & 0x7FFFFF) > 0x600000).to(tl.int32)
    scale_B = tl.maximum((bits_B >> 23) - 8 + carry_B, 0)
    scale_B = tl.where(bits_B >> 23 == 255, 255, scale_B)
    inverse_B = ((254 - scale_B) << 23).to(tl.float32, bitcast=True)
    value_BX = _rounded(x_BX * inverse_B[:, None]) * _power(scale_B)[:, None]
    tl.store(out + at_BX, value_BX.to(out.dtype.element_ty), mask=inside_BX)


def _launch_fake_quantize(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    assert x.shape[-1] % BLOCK == 0
    out = torch.empty_like(x)
    if blocks := x.numel() // BLOCK:
        _fake_quantize_kernel[(cdiv(blocks, 64),)](
            x, out, blocks, BLOCK_B=64, num_warps=4, **pdl(x)
        )
    return out


fake_quantize = op(reference=fake_quantize_reference, kernel=_launch_fake_quantize)


def multiply_reference(x_TK: torch.Tensor, weight_NK: MXFP8) -> torch.Tensor:
    """x W^T of what MXFP8 holds of both, summed in FP32 and rounded to the type of x."""
    linear = invariant.linear if is_batch_invariant() else F.linear
    rounded_TK = dequantize(quantize(x_TK), dtype=torch.float32)
    return linear(rounded_TK, dequantize(weight_NK, dtype=torch.float32)).to(x_TK.dtype)


@triton.jit
def _product_kernel(
    x, codes, scales, block_rows, blocks, out, rows, stride_x,
    N: tl.constexpr, K: tl.constexpr, COUNT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_N rows of a weight by BLOCK_M of x: in order, or those of a block of pairs, of which
    COUNT share a row of x. x is rounded already.

    The weight is the left operand, which comes from registers on Hopper.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    dtype: tl.constexpr = x.dtype.element_ty
    i, m = tl.program_id(0) // TILES, tl.arange(0, BLOCK_M)
    if blocks is None:
        e = tl.cast(0, tl.int64)
        pair_M = (i * BLOCK_M + m).to(tl.int64)
        valid_M = pair_M < rows
    else:
        block = tl.load(blocks + i)
        e, valid_M = (block // 256).to(tl.int64), m < block % 256
        pair_M = tl.load(block_rows + i * BLOCK_M + m, mask=valid_M, other=0).to(tl.int64)
    if tl.max(valid_M.to(tl.int32), axis=0) > 0:
        n = tl.program_id(0) % TILES * BLOCK_N + tl.arange(0, BLOCK_N)
        k, q = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_K // 32)
        row_N = e * N + n
        codes_NK = codes + row_N[:, None] * K + k[None, :]
        scales_NQ = scales + row_N[:, None] * (K // 32) + q[None, :]
        x_MK = x + (pair_M // COUNT)[:, None] * stride_x + k[None, :]
        inside_N1, valid_M1 = (n < N)[:, None], valid_M[:, None]
        sum_NM = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for start in range(0, K, BLOCK_K):
            inside_1K, inside_1Q = (start + k < K)[None, :], (start // 32 + q < K // 32)[None, :]
            code_NK = tl.load(codes_NK + start, mask=inside_N1 & inside_1K, other=0)
            scale_NQ = tl.load(scales_NQ + start // 32, mask=inside_N1 & inside_1Q, other=0)
            tile_MK = tl.load(x_MK + start, mask=valid_M1 & inside_1K, other=0.0)
            value_NQX = tl.reshape(_decoded(code_NK), [BLOCK_N, BLOCK_K // 32, 32])
            value_NQX = value_NQX * _power(scale_NQ)[:, :, None]
            tile_NK = tl.reshape(value_NQX, [BLOCK_N, BLOCK_K]).to(dtype)
            sum_NM = tl.dot(tile_NK, tl.trans(tile_MK), sum_NM, input_precision="ieee")
        into_NM = out + pair_M[None, :] * N + n[:, None]
        tl.store(into_NM, sum_NM.to(out.dtype.element_ty), mask=inside_N1 & valid_M[None, :])


# Rows of x in a block; rows and columns of the weight, warps and stages of a program; by the most
# rows, of an expert on average.
TILES = {16: (16, 64, 128, 4, 4), 64: (64, 64, 128, 4, 3), 2**31: (128, 128, 64, 8, 3)}
# Where rows must not depend on their number, as if there were so many.
ROWS_WHERE_INVARIANT = 64


def rows_of_block(rows: int) -> int:
    """Rows of x that a block has, where there are so many, of an expert on average."""
    return by_size(TILES, ROWS_WHERE_INVARIANT if is_batch_invariant() else rows)[0]


def _launch(
    x: torch.Tensor, weight: MXFP8, out: torch.Tensor, blocks: Blocks | None, block_m: int
) -> None:
    weight.check()
    size, width = weight.shape[-2:]
    assert x.shape[1] == width and x.stride(1) == 1 and out.shape[1] == size
    _, block_n, block_k, warps, ahead = by_size(TILES, block_m)
    count = cdiv(len(out), block_m) if blocks is None else len(blocks[1])
    table = (None, None) if blocks is None else blocks
    _product_kernel[(count * cdiv(size, block_n),)](
        x, weight.codes.view(torch.uint8), weight.scales, *table, out, len(out), x.stride(0),
        N=size, K=width, COUNT=len(out) // len(x), BLOCK_M=block_m, BLOCK_N=block_n,
        BLOCK_K=block_k, num_warps=warps, num_stages=stages(x, ahead), **pdl(x),
    )  # fmt: skip


def product(x_TK: torch.Tensor, weight_NK: MXFP8, *, fp32: bool | None = None) -> torch.Tensor:
    """x W^T in the type of x, both of MXFP8; `fp32` not None means SwiGLU follows."""
    y_TN = x_TK.new_empty(len(x_TK), len(weight_NK))
    if len(x_TK):
        rounded_TK = fake_quantize.kernel(x_TK)
        _launch(rounded_TK, weight_NK, y_TN, None, rows_of_block(len(x_TK)))
    return y_TN if fp32 is None else swiglu_rows(y_TN, fp32=fp32)


def pair_products(x_XK: torch.Tensor, weight_ENK: MXFP8, blocks: Blocks, each: int) -> torch.Tensor:
    """A row [N] of each pair of `sort_pairs`, by its expert's weight; one row of x for every `each`
    pairs."""
    out_PN = x_XK.new_empty(len(x_XK) * each, weight_ENK.shape[1])
    _launch(fake_quantize.kernel(x_XK), weight_ENK, out_PN, blocks, blocks[0].shape[1])
    return out_PN
