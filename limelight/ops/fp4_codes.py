"""How the codes of NVFP4 weights lie in memory, and how kernels read them.

A code is E2M1: a sign, two bits of exponent and one of mantissa. Checkpoints have eight in a word,
the first in its lowest bits. Here the bits of a word are mixed, so that codes j and j + 4 come out
as a pair of BF16, times 2^-126, by few instructions:

    pair 0 = w << 3        pair 1 = w << 6
    pair 2 = w ^ w << 4    pair 3 = w >> 7 ^ w << 5        of which PAIR are the bits

For the bits of E2M1 are those of a BF16 whose exponent is off by 126. No way of moving bits takes
fewer: four fields of PAIR do not tile a word, and each further shift is an instruction more.
"""

import torch
import triton
import triton.language as tl

# The bits of two codes in a word: sign, exponent and mantissa of BF16, twice.
PAIR = 0x81C081C0 - 2**32
EXPONENT = 126
# What kernels leave out of a weight, exactly, for the row's scale to make good: a power of two
# that comes of reading codes and scales as floats of other exponents.
LEFT = tl.constexpr(2.0**8)
# The interpreter has no assembly.
ASSEMBLY = tl.constexpr(not triton.knobs.runtime.interpret)


def mixed(codes_NX: torch.Tensor) -> torch.Tensor:
    """Codes as checkpoints have them, uint8 [..., K / 2], as kernels read them."""
    word = codes_NX.contiguous().view(torch.int32)
    pair0, pair1, pair2, pair3 = (
        (word >> 4 * j & 0x00070007) << 6 | (word >> 4 * j & 0x00080008) << 12 for j in range(4)
    )
    # A shift to the right repeats the highest bit, which no mask behind one lets through.
    mixed = pair0 >> 3 & 0x10381038 | pair1 >> 6 & 0x02070207
    mixed |= (pair2 ^ mixed << 4) & 0x01C001C0
    mixed |= ((pair3 ^ mixed << 5) & 0x01C001C0) << 7
    mixed |= (pair2 ^ mixed) >> 4 & 0x08000800
    mixed |= (pair3 ^ (mixed >> 7 & 0x01FFFFFF)) >> 5 & 0x04000400
    return mixed.view(torch.uint8)


def values_of(codes_NX: torch.Tensor) -> torch.Tensor:
    """The values of mixed codes, FP32 [..., K]."""
    word = codes_NX.view(torch.int32)
    pairs = (word << 3, word << 6, word ^ word << 4, (word >> 7 & 0x01FFFFFF) ^ word << 5)
    pair_NX4 = torch.stack(pairs, dim=-1).bitwise_and_(PAIR)
    half_NX42 = pair_NX4.view(torch.bfloat16).unflatten(-1, (4, 2))
    return half_NX42.mT.flatten(-3).float() * 2.0**EXPONENT


def words_of(codes_NX: torch.Tensor) -> torch.Tensor:
    """Codes as int32 [..., N, K / 8]: what kernels read."""
    return codes_NX.view(torch.int32)


def _pairs(result: str) -> str:
    """Assembly that makes the pairs of a word, $8, each times the scale times 2^118, BF16, twice in
    $9; `result` is what becomes of one, a, which goes to the {0}th and the {1}th result."""
    pairs = (
        "shl.b32 a, $8, 3; and.b32 a, a, m;",
        "shl.b32 a, $8, 6; and.b32 a, a, m;",
        "shl.b32 a, $8, 4; lop3.b32 a, a, $8, m, 0x28;",
        "shr.b32 a, $8, 7; shl.b32 b, $8, 5; lop3.b32 a, a, b, m, 0x28;",
    )
    scaled = "fma.rn.bf16x2 a, a, $9, z;"
    each = (f"{pair} {scaled} {result.format(j, j + 4)}" for j, pair in enumerate(pairs))
    declared = ".reg .b32 a, b, m, z; mov.b32 z, 0x80008000; mov.b32 m, 0x81C081C0;"
    return "\n".join(("{", declared, *each, "}"))


DECODED_PAIRS = tl.constexpr(_pairs("mov.b32 {{${0}, ${1}}}, a;"))
# Conversions of numbers one by one would take more instructions and registers.
WIDE_PAIRS = tl.constexpr(_pairs("shl.b32 ${0}, a, 16; and.b32 ${1}, a, 0xFFFF0000;"))


@triton.jit
def _code(word, j: tl.constexpr):
    """The j-th code of each word, FP32 times 2^-14."""
    word = word.to(tl.uint32, bitcast=True)
    if j % 4 == 0:
        pair = word << 3
    elif j % 4 == 1:
        pair = word << 6
    elif j % 4 == 2:
        pair = word ^ (word << 4)
    else:
        pair = (word >> 7) ^ (word << 5)
    half = pair >> (j // 4 * 16)
    bits = (half & 0x8000) | ((half & 0x01C0) << 3)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _eight(v0, v1, v2, v3, v4, v5, v6, v7):
    """[...] eight times -> [..., 8]; all in registers."""
    even = tl.join(tl.join(v0, v4), tl.join(v2, v6))
    odd = tl.join(tl.join(v1, v5), tl.join(v3, v7))
    joined = tl.join(even, odd)
    shape: tl.constexpr = even.shape[:-2] + [8]
    return tl.reshape(joined, shape)


@triton.jit
def _block_scale(scale):
    """The scales of E4M3 bits (uint8), FP32, times 2^-8."""
    return (scale.to(tl.int16) << 7).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _scaled(word, scale):
    """The 8 weights of each int32, FP32 [..., 8], without assembly."""
    codes = _eight(
        _code(word, 0), _code(word, 1), _code(word, 2), _code(word, 3),
        _code(word, 4), _code(word, 5), _code(word, 6), _code(word, 7),
    )  # fmt: skip
    return codes * tl.expand_dims(_block_scale(scale) * 16384.0, -1)


@triton.jit
def _scale_pair(scale):
    """Each scale (uint8) twice, as a pair of BF16 times 2^118."""
    # The bits of E4M3 are those of a BF16 times 2^-120.
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 s, c, z;
        mov.b32 z, 0x80008000; mov.b32 c, 0x7B007B00;
        mul.lo.u32 s, $1, 0x00100010;
        fma.rn.bf16x2 s, s, c, z; fma.rn.bf16x2 $0, s, c, z;
        }
        """,
        "=r,r",
        [scale.to(tl.int32)],
        tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def decoded_pairs(word, pair):
    """The 8 weights of each int32, BF16, by DECODED_PAIRS."""
    return tl.inline_asm_elementwise(
        DECODED_PAIRS,
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
        [word, pair],
        (tl.bfloat16,) * 8,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _scaled_pairs(word, pair):
    """The same in one, [..., 8]."""
    v0, v1, v2, v3, v4, v5, v6, v7 = decoded_pairs(word, pair)
    return _eight(v0, v1, v2, v3, v4, v5, v6, v7)


@triton.jit
def weights_of(word, scale, dtype: tl.constexpr):
    """The 8 weights of each int32 of a row, without the row's scale: [..., 8] in `dtype`.

    `scale` has the bits of each word's block (uint8). They are LEFT times too small.
    """
    if dtype != tl.bfloat16 or not ASSEMBLY:
        return _scaled(word, scale).to(dtype)
    return _scaled_pairs(word, _scale_pair(scale))


@triton.jit
def wide_weights_of(word, scale, dtype: tl.constexpr):
    """`weights_of` in FP32, for products with rows of `dtype`."""
    if dtype != tl.bfloat16 or not ASSEMBLY:
        return _scaled(word, scale)
    v0, v1, v2, v3, v4, v5, v6, v7 = tl.inline_asm_elementwise(
        WIDE_PAIRS,
        "=r,=r,=r,=r,=r,=r,=r,=r,r,r",
        [word, _scale_pair(scale)],
        (tl.float32,) * 8,
        is_pure=True,
        pack=1,
    )
    return _eight(v0, v1, v2, v3, v4, v5, v6, v7)


@triton.jit
def _four(v0, v1, v2, v3):
    """[...] four times -> [..., 4]; all in registers."""
    joined = tl.join(tl.join(v0, v2), tl.join(v1, v3))
    return tl.reshape(joined, v0.shape + [4])


@triton.jit
def weights_of_64(word, scale, dtype: tl.constexpr):
    """`weights_of` runs [..., 8] of words: [..., 8, 8]. `scale` has all four scales of a run."""
    words: tl.constexpr = word.shape
    twice: tl.constexpr = scale.shape + [4, 2]
    if dtype != tl.bfloat16 or not ASSEMBLY:
        bits = _four(scale & 255, (scale >> 8) & 255, (scale >> 16) & 255, (scale >> 24) & 255)
        bits = tl.reshape(tl.broadcast_to(tl.expand_dims(bits, -1), twice), words)
        return weights_of(word, bits, dtype)
    s0, s1, s2, s3 = tl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, c, z;
        mov.b32 z, 0x80008000; mov.b32 c, 0x7B007B00;
        shl.b32 a, $4, 4; and.b32 a, a, 0x0FF00FF0;
        shr.b32 b, $4, 4; and.b32 b, b, 0x0FF00FF0;
        fma.rn.bf16x2 a, a, c, z; fma.rn.bf16x2 a, a, c, z;
        fma.rn.bf16x2 b, b, c, z; fma.rn.bf16x2 b, b, c, z;
        prmt.b32 $0, a, a, 0x1010; prmt.b32 $2, a, a, 0x3232;
        prmt.b32 $1, b, b, 0x1010; prmt.b32 $3, b, b, 0x3232;
        }
        """,
        "=r,=r,=r,=r,r",
        [scale],
        (tl.int32,) * 4,
        is_pure=True,
        pack=1,
    )
    pair = tl.expand_dims(_four(s0, s1, s2, s3), -1)
    return _scaled_pairs(word, tl.reshape(tl.broadcast_to(pair, twice), words))
