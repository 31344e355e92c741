"""Weights of four bits, NVFP4: w = code * scale * row, in blocks of 16 neighbours of a row.

A code is E2M1 (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives), two in a byte, the low half first;
a scale is E4M3 without its sign, one for each block; what a checkpoint has as one FP32 scale of a
tensor is kept for each row, so that matrices with different ones can lie in one. code * scale has
six significant bits: it is exact in BF16 and in FP16. The row's scale is applied in FP32 to the
sum of a product, never to a weight.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from limelight.ops import op, pdl

BLOCK = 16
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# The interpreter has no assembly.
ASSEMBLY = tl.constexpr(not triton.knobs.runtime.interpret)


@dataclass(frozen=True, slots=True)
class FP4:
    """Matrices [..., N, K] of NVFP4 weights.

    `codes` uint8 [..., N, K / 2], `scales` float8_e4m3fn [..., N, K / 16], `rows` FP32 [..., N].
    """

    codes: torch.Tensor
    scales: torch.Tensor
    rows: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the weights."""
        return (*self.codes.shape[:-1], 2 * self.codes.shape[-1])

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.codes, self.scales, self.rows

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, index: int | slice) -> "FP4":
        return FP4(*(tensor[index] for tensor in self.tensors))

    def flat(self) -> "FP4":
        """All matrices as one, [M * N, K]."""
        return FP4(*(tensor.flatten(0, 1) for tensor in self.tensors))

    def check(self) -> None:
        """What kernels take for granted."""
        *rows, columns = self.shape
        assert columns % BLOCK == 0 and self.codes.dtype == torch.uint8
        assert self.scales.dtype == torch.float8_e4m3fn and self.rows.dtype == torch.float32
        assert self.scales.shape == (*rows, columns // BLOCK) and self.rows.shape == tuple(rows)
        assert all(tensor.is_contiguous() for tensor in self.tensors)


Weight = torch.Tensor | FP4


# What kernels leave out of a weight, exactly, for the row's scale to make good: powers of two that
# come of reading codes and scales as FP16 or BF16 of other exponents.
LEFT_OF_SUMS, LEFT_OF_WEIGHTS = 2.0**22, 2.0**8


def unpack_reference(
    codes_NX: torch.Tensor, scales_NB: torch.Tensor, *, dtype: torch.dtype
) -> torch.Tensor:
    """code * scale of every weight, [..., N, K]; exact in BF16, FP16 and FP32."""
    halves = torch.stack((codes_NX & 15, codes_NX >> 4), dim=-1).flatten(-2).int()
    table = torch.tensor([*VALUES, *(-value for value in VALUES)], device=codes_NX.device)
    blocks = table[halves].unflatten(-1, (-1, BLOCK)) * scales_NB.float()[..., None]
    return blocks.flatten(-2).to(dtype)


def multiply_reference(x_TF: torch.Tensor, weight_DF: Weight) -> torch.Tensor:
    """x W^T in the type of x; of NVFP4 the sum is scaled in FP32 before it is rounded."""
    if isinstance(weight_DF, torch.Tensor):
        return F.linear(x_TF, weight_DF)
    held = unpack_reference(weight_DF.codes, weight_DF.scales, dtype=torch.float32)
    return (F.linear(x_TF.float(), held) * weight_DF.rows).to(x_TF.dtype)


@triton.jit
def _code(word, j: tl.constexpr):
    """The j-th code of each word, FP16 times 2^-14."""
    left: tl.constexpr = 9 - 4 * j
    sign = (word >> (4 * j - 12) if j > 3 else word << (12 - 4 * j)) & 0x8000
    size = (word << left if j < 3 else word >> -left) & 0x0E00
    return (sign | size).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _eight(v0, v1, v2, v3, v4, v5, v6, v7):
    """[...] eight times -> [..., 8]; all in registers."""
    even = tl.join(tl.join(v0, v4), tl.join(v2, v6))
    odd = tl.join(tl.join(v1, v5), tl.join(v3, v7))
    joined = tl.join(even, odd)
    shape: tl.constexpr = even.shape[:-2] + [8]
    return tl.reshape(joined, shape)


@triton.jit
def codes_of(word):
    """The 8 codes of each int32 of a row: FP32 [..., 8], times 2^-14.

    With `block_scale` they give sums that are LEFT_OF_SUMS times too small.
    """
    if not ASSEMBLY:
        return _eight(
            _code(word, 0), _code(word, 1), _code(word, 2), _code(word, 3),
            _code(word, 4), _code(word, 5), _code(word, 6), _code(word, 7),
        ).to(tl.float32)  # fmt: skip
    # Codes j and j + 4 lie 16 bits apart: both at once are a pair of FP16.
    v0, v1, v2, v3, v4, v5, v6, v7 = tl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b;
        .reg .b16 l, h;
        shl.b32 a, $8, 12; and.b32 a, a, 0x80008000; shl.b32 b, $8, 9;
        and.b32 b, b, 0x0E000E00; or.b32 b, b, a; mov.b32 {l, h}, b;
        cvt.f32.f16 $0, l; cvt.f32.f16 $4, h;
        shl.b32 a, $8, 8; and.b32 a, a, 0x80008000; shl.b32 b, $8, 5;
        and.b32 b, b, 0x0E000E00; or.b32 b, b, a; mov.b32 {l, h}, b;
        cvt.f32.f16 $1, l; cvt.f32.f16 $5, h;
        shl.b32 a, $8, 4; and.b32 a, a, 0x80008000; shl.b32 b, $8, 1;
        and.b32 b, b, 0x0E000E00; or.b32 b, b, a; mov.b32 {l, h}, b;
        cvt.f32.f16 $2, l; cvt.f32.f16 $6, h;
        and.b32 a, $8, 0x80008000; shr.b32 b, $8, 3;
        and.b32 b, b, 0x0E000E00; or.b32 b, b, a; mov.b32 {l, h}, b;
        cvt.f32.f16 $3, l; cvt.f32.f16 $7, h;
        }
        """,
        "=f,=f,=f,=f,=f,=f,=f,=f,r",
        [word],
        (tl.float32,) * 8,
        is_pure=True,
        pack=1,
    )
    return _eight(v0, v1, v2, v3, v4, v5, v6, v7)


@triton.jit
def block_scale(scale):
    """The scales of E4M3 bits (uint8), FP32, times 2^-8."""
    return (scale.to(tl.int16) << 7).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def weights_of(word, scale, dtype: tl.constexpr):
    """The 8 weights of each int32 of a row, without the row's scale: [..., 8] in `dtype`.

    `scale` has the bits of each word's block (uint8). They are LEFT_OF_WEIGHTS times too small.
    """
    if dtype != tl.bfloat16 or not ASSEMBLY:
        scale = tl.expand_dims(block_scale(scale) * 16384.0, -1)
        return (codes_of(word) * scale).to(dtype)
    # Codes j and j + 4 are a pair of BF16, times 2^-126; the scale is one times 2^118.
    v0, v1, v2, v3, v4, v5, v6, v7 = tl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, s, z;
        .reg .b16 t;
        .reg .f32 f;
        mov.b32 z, 0x80008000;
        shl.b32 s, $9, 7; cvt.u16.u32 t, s; cvt.f32.f16 f, t;
        mul.f32 f, f, 0f7E800000; cvt.rn.bf16x2.f32 s, f, f;
        shl.b32 a, $8, 12; and.b32 a, a, 0x80008000; shl.b32 b, $8, 6;
        and.b32 b, b, 0x01C001C0; or.b32 b, b, a;
        fma.rn.bf16x2 b, b, s, z; mov.b32 {$0, $4}, b;
        shl.b32 a, $8, 8; and.b32 a, a, 0x80008000; shl.b32 b, $8, 2;
        and.b32 b, b, 0x01C001C0; or.b32 b, b, a;
        fma.rn.bf16x2 b, b, s, z; mov.b32 {$1, $5}, b;
        shl.b32 a, $8, 4; and.b32 a, a, 0x80008000; shr.b32 b, $8, 2;
        and.b32 b, b, 0x01C001C0; or.b32 b, b, a;
        fma.rn.bf16x2 b, b, s, z; mov.b32 {$2, $6}, b;
        and.b32 a, $8, 0x80008000; shr.b32 b, $8, 6;
        and.b32 b, b, 0x01C001C0; or.b32 b, b, a;
        fma.rn.bf16x2 b, b, s, z; mov.b32 {$3, $7}, b;
        }
        """,
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
        [word, scale.to(tl.int32)],
        (tl.bfloat16,) * 8,
        is_pure=True,
        pack=1,
    )
    return _eight(v0, v1, v2, v3, v4, v5, v6, v7)


@triton.jit
def _unpack_kernel(
    words, scales, out, count, BLOCK_X: tl.constexpr, ROUNDS: tl.constexpr, PDL: tl.constexpr
):
    """ROUNDS times BLOCK_X words, of 8 weights each, a program."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    x = tl.program_id(0).to(tl.int64) * (BLOCK_X * ROUNDS) + tl.arange(0, BLOCK_X)
    dtype: tl.constexpr = out.dtype.element_ty
    tiles = ()
    for i in tl.static_range(ROUNDS):
        at = x + i * BLOCK_X
        word_X = tl.load(words + at, mask=at < count, other=0)
        scale_X = tl.load(scales + at // 2, mask=at < count, other=0)
        value_X8 = weights_of(word_X, scale_X, dtype)
        tiles = tiles + ((value_X8.to(tl.float32) * 256.0).to(dtype),)  # type: ignore[assignment]
    if PDL:
        tl.extra.cuda.gdc_wait()
    for i in tl.static_range(ROUNDS):
        at = x + i * BLOCK_X
        at_X8 = at[:, None] * 8 + tl.arange(0, 8)[None, :]
        tl.store(out + at_X8, tiles[i], mask=(at < count)[:, None])


def _launch_unpack(
    codes_NX: torch.Tensor, scales_NB: torch.Tensor, *, dtype: torch.dtype
) -> torch.Tensor:
    assert codes_NX.is_contiguous() and scales_NB.is_contiguous()
    *rows, width = codes_NX.shape
    out_NK = torch.empty(*rows, 2 * width, dtype=dtype, device=codes_NX.device)
    words, scales = words_of(codes_NX), scales_NB.view(torch.uint8)
    count = words.numel()
    if count:
        # A word a thread: what it makes of it is 16 bytes of the result.
        _unpack_kernel[(triton.cdiv(count, 1024),)](
            words, scales, out_NK, count, BLOCK_X=256, ROUNDS=4, num_warps=8, **pdl(codes_NX)
        )
    return out_NK


def words_of(codes_NX: torch.Tensor) -> torch.Tensor:
    """Codes as int32 [..., N, K / 8]: what kernels read."""
    return codes_NX.view(torch.int32)


unpack = op(reference=unpack_reference, kernel=_launch_unpack)
