"""Weights of four bits, NVFP4: w = code * scale * row, in blocks of 16 neighbours of a row.

A code is E2M1 (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives), eight in a word whose bits are
mixed (`fp4_codes.py`); a scale is E4M3 without its sign, one for each block; what a checkpoint has
as one FP32 scale of a tensor is kept for each row, so that matrices with different ones can lie in
one. code * scale has six significant bits: it is exact in BF16 and in FP16. The row's scale is
applied in FP32 to the sum of a product, never to a weight.

`product` multiplies few rows with weights that it decodes in registers; for more, torch multiplies
unpacked ones.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from limelight.ops import (
    by_size,
    cdiv,
    invariant,
    is_batch_invariant,
    is_for_graph,
    op,
    pdl,
    stages,
)
from limelight.ops.activation import rounded_swiglu
from limelight.ops.fp4_codes import (
    LEFT,
    values_of,
    weights_of,
    weights_of_64,
    words_of,
)

BLOCK = 16
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class FP4:
    """Matrices [..., N, K] of NVFP4 weights.

    `codes` uint8 [..., N, K / 2], mixed, `scales` float8_e4m3fn [..., N, K / 16], `rows` FP32
    [..., N]. `values`, where there is memory for them: code * scale [N, K] in the type of
    activations; `runs` then are the rows' scales as the host knows them, if it does: where rows of
    one scale end, and that scale.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    rows: torch.Tensor
    values: torch.Tensor | None = None
    runs: tuple[tuple[int, float], ...] = field(default=(), kw_only=True)

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

    def narrow(self, rows: slice) -> "FP4":
        """Some rows of every matrix."""
        return FP4(self.codes[..., rows, :], self.scales[..., rows, :], self.rows[..., rows])

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


PlainOrFP4 = torch.Tensor | FP4


@dataclass(frozen=True, slots=True)
class Unpacked:
    """Matrices [..., N, K] in the type of activations, whose rows are still to be scaled."""

    values: torch.Tensor
    rows: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def __len__(self) -> int:
        return len(self.values)


Matrices = PlainOrFP4 | Unpacked

# Weights that the reference has in FP32 at a time.
UNPACKED_AT_ONCE = 2**22


def unpack_reference(
    codes_NX: torch.Tensor, scales_NB: torch.Tensor, *, dtype: torch.dtype
) -> torch.Tensor:
    """code * scale of every weight, [..., N, K]; exact in BF16, FP16 and FP32."""
    blocks = values_of(codes_NX).unflatten(-1, (-1, BLOCK)) * scales_NB.float()[..., None]
    return blocks.flatten(-2).to(dtype)


def multiply_reference(x_TF: torch.Tensor, weight_DF: FP4) -> torch.Tensor:
    """x W^T in the type of x; the sum is scaled in FP32 before it is rounded."""
    linear = invariant.linear if is_batch_invariant() else F.linear
    (rows, columns), x_TF32 = weight_DF.shape, x_TF.float()
    step = max(1, UNPACKED_AT_ONCE // columns)
    pieces = [weight_DF[at : at + step] for at in range(0, rows, step)]
    sums = [
        linear(x_TF32, unpack_reference(piece.codes, piece.scales, dtype=torch.float32))
        for piece in pieces
    ]
    return (torch.cat(sums, dim=-1) * weight_DF.rows).to(x_TF.dtype)


@triton.jit
def stacked(tiles):
    """2^n tensors [...] as one [..., 2^n]; all in registers."""
    shape: tl.constexpr = tiles[0].shape
    COUNT: tl.constexpr = len(tiles)
    joined = tiles
    for _ in tl.static_range(COUNT // 2):
        if len(joined) > 1:
            halved = ()
            for i in tl.static_range(len(joined) // 2):
                pair = tl.join(joined[i], joined[i + len(joined) // 2])
                halved = halved + (pair,)  # type: ignore[assignment]
            joined = halved
    return tl.reshape(joined[0], shape + [COUNT])


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
        tiles = tiles + ((value_X8.to(tl.float32) * LEFT).to(dtype),)  # type: ignore[assignment]
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
        _unpack_kernel[(cdiv(count, 1024),)](
            words, scales, out_NK, count, BLOCK_X=256, ROUNDS=4, num_warps=8, **pdl(codes_NX)
        )
    return out_NK


unpack = op(reference=unpack_reference, kernel=_launch_unpack)


@triton.jit
def _in_order(tile):
    """[N, 256] as [N, 4, 8, 8]: columns in the order in which the matrix units get them.

    Of 256 columns each of the four threads that share a row there has 64 that lie together, and
    of each 8 of them pairs 4 apart, as they are decoded. So no weight changes its thread.
    """
    ROWS: tl.constexpr = tile.shape[0]
    tile = tl.reshape(tile, [ROWS, 4, 8, 2, 2, 2])
    return tl.reshape(tl.permute(tile, [0, 2, 4, 5, 1, 3]), [ROWS, 256])


@triton.jit
def _scales_at(scales, row_N, inside_N, start, K: tl.constexpr, EVEN: tl.constexpr):
    """The block scales of 256 columns from `start` on, int32 [N, 4]."""
    q = start // 64 + tl.arange(0, 4)
    if EVEN:
        return tl.load(scales + row_N[:, None] * (K // 64) + q[None, :])
    if K % 64 == 0:
        inside_NQ = inside_N[:, None] & (q < K // 64)[None, :]
        return tl.load(scales + row_N[:, None] * (K // 64) + q[None, :], mask=inside_NQ, other=0)
    # Those of a row do not fill words: byte by byte.
    found_NQ = tl.zeros([row_N.shape[0], 4], tl.int32)
    for j in tl.static_range(4):
        b = q * 4 + j
        inside_NQ = inside_N[:, None] & (b < K // 16)[None, :]
        byte_NQ = tl.load(scales + row_N[:, None] * (K // 16) + b[None, :], inside_NQ, other=0)
        found_NQ |= byte_NQ.to(tl.int32) << (8 * j)
    return found_NQ


@triton.jit
def sums_of(
    words, scales, row_N, inside_N, x_M, valid_M, first, end, K: tl.constexpr, EVEN: tl.constexpr
):
    """Products of rows `row_N` of a weight with those at `x_M`, FP32 [N, M], LEFT times too
    small. Columns `first` to `end`, 256 at a time; EVEN: there are no others, and all rows are
    inside.

    The weight is the left operand, which comes from registers on Hopper.
    """
    dtype: tl.constexpr = x_M.dtype.element_ty
    N: tl.constexpr = row_N.shape[0]
    M: tl.constexpr = x_M.shape[0]
    words_NX = words + row_N[:, None] * (K // 8) + tl.arange(0, 32)[None, :]
    x_MK = x_M[:, None] + tl.arange(0, 256)[None, :]
    sum_NM = tl.zeros([N, M], tl.float32)
    for start in range(first, end, 256):
        inside_MK = valid_M[:, None]
        if EVEN:
            word_NX = tl.load(words_NX + start // 8)
        else:
            inside_X = start // 8 + tl.arange(0, 32) < K // 8
            inside_NX = inside_N[:, None] & inside_X[None, :]
            word_NX = tl.load(words_NX + start // 8, mask=inside_NX, other=0)
            inside_MK = inside_MK & (start + tl.arange(0, 256) < K)[None, :]
        scale_NQ = _scales_at(scales, row_N, inside_N, start, K, EVEN)
        tile_MK = tl.load(x_MK + start, mask=inside_MK, other=0.0)
        value_NK = weights_of_64(tl.reshape(word_NX, [N, 4, 8]), scale_NQ, dtype)
        value_NK, tile_MK = _in_order(tl.reshape(value_NK, [N, 256])), _in_order(tile_MK)
        sum_NM = tl.dot(value_NK, tl.trans(tile_MK), sum_NM, input_precision="ieee")
    return sum_NM


@triton.jit
def row_of(i, N: tl.constexpr, GATED: tl.constexpr):
    """The i-th row of a weight; of a gated one [gate, up] 8 of the gate's, then 8 of up's."""
    if GATED:
        i = i // 16 * 8 + i % 8 + i // 8 % 2 * N
    return i.to(tl.int64)


@triton.jit
def outputs_of(y_NM, GATED: tl.constexpr, FP32: tl.constexpr, dtype: tl.constexpr):
    """Scaled products of rows `row_of`, rounded; of a gated weight half as many, their SwiGLU."""
    if GATED:
        OUTPUTS: tl.constexpr = y_NM.shape[0] // 2
        M: tl.constexpr = y_NM.shape[1]
        y_NMX = tl.permute(tl.reshape(y_NM, [OUTPUTS // 8, 2, 8, M]), [0, 2, 3, 1])
        gate_NM, up_NM = tl.split(tl.reshape(y_NMX, [OUTPUTS, M, 2]))
        y_NM = rounded_swiglu(gate_NM, up_NM, FP32, dtype)
    return y_NM.to(dtype)


@triton.jit
def product_tile(
    x_M, valid_M, words, scales, factors, out_M, first, N: tl.constexpr, K: tl.constexpr,
    GATED: tl.constexpr, FP32: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Rows at `x_M` times BLOCK_N rows of the weight, from the `first` on, into rows at `out_M`."""
    ROWS: tl.constexpr = N * (2 if GATED else 1)
    OUTPUTS: tl.constexpr = BLOCK_N // (2 if GATED else 1)
    i = first + tl.arange(0, BLOCK_N)
    row_N = row_of(i, N, GATED)
    n = first // BLOCK_N * OUTPUTS + tl.arange(0, OUTPUTS)
    # Of a gated weight whose N is no multiple of 8, rows past the gate's are not its.
    inside_N = i // 16 * 8 + i % 8 < N if GATED else i < N
    EVEN: tl.constexpr = K % 256 == 0 and ROWS % BLOCK_N == 0 and (N % 8 == 0 or not GATED)
    factor_N = tl.load(factors + row_N, mask=inside_N, other=0.0) * LEFT
    sum_NM = sums_of(words, scales, row_N, inside_N, x_M, valid_M, 0, K, K, EVEN)
    y_NM = outputs_of(sum_NM * factor_N[:, None], GATED, FP32, out_M.dtype.element_ty)
    tl.store(out_M[None, :] + n[:, None], y_NM, mask=(n < N)[:, None] & valid_M[None, :])


@triton.jit
def _product_kernel(
    x, words, scales, factors, out, rows, stride_x,
    N: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr, FP32: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_N rows of the weight by BLOCK_M of x. With SPLITS its part of the columns only: the
    unscaled sums [SPLITS, T, N]."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    blocks = (rows + BLOCK_M - 1) // BLOCK_M
    m = tl.program_id(0) % blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tl.program_id(0) // blocks * BLOCK_N
    x_M = x + m.to(tl.int64) * stride_x
    if SPLITS == 1:
        out_M = out + m.to(tl.int64) * N
        product_tile(
            x_M, m < rows, words, scales, factors, out_M, first, N, K, GATED, FP32, BLOCK_N
        )
    else:
        PART: tl.constexpr = (K + SPLITS * 256 - 1) // (SPLITS * 256) * 256
        EVEN: tl.constexpr = K % 256 == 0 and N % BLOCK_N == 0
        n = first + tl.arange(0, BLOCK_N)
        begin = tl.program_id(1) * PART
        end = tl.minimum(begin + PART, K)
        sum_NM = sums_of(words, scales, n.to(tl.int64), n < N, x_M, m < rows, begin, end, K, EVEN)
        out_M = out + (tl.program_id(1).to(tl.int64) * rows + m) * N
        mask_NM = (n < N)[:, None] & (m < rows)[None, :]
        tl.store(out_M[None, :] + n[:, None], sum_NM * LEFT, mask=mask_NM)


@triton.jit
def _finished(sums, factors, t, n, rows, ROWS: tl.constexpr, SPLITS: tl.constexpr, inside):
    """Products of row t with rows `n` of a weight that has ROWS, scaled."""
    y_N = tl.zeros(n.shape, tl.float32)
    for i in tl.static_range(SPLITS):
        y_N += tl.load(sums + (i * rows + t) * ROWS + n, mask=inside, other=0.0)
    return y_N * tl.load(factors + n, mask=inside, other=0.0)


@triton.jit
def _finish_kernel(
    sums, factors, out, rows, N: tl.constexpr, GATED: tl.constexpr, FP32: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A piece of one row: its parts' sum, scaled and rounded, and SwiGLU where the weight is
    gated."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    KINDS: tl.constexpr = 2 if GATED else 1
    dtype: tl.constexpr = out.dtype.element_ty
    t, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    y_N = _finished(sums, factors, t, n, rows, KINDS * N, SPLITS, n < N)
    if GATED:
        up_N = _finished(sums, factors, t, N + n, rows, KINDS * N, SPLITS, n < N)
        y_N = rounded_swiglu(y_N, up_N, FP32, dtype)
    tl.store(out + t * N + n, y_N.to(dtype), mask=n < N)


# Columns of a tile of `sums_of`.
SPAN = 256
# The most rows that meet decoded weights, where a cache holds these unpacked or they are kept so;
# and where unpacking moves 4.5 bytes a weight through memory, not 0.56.
CACHED_ROWS, FUSED_ROWS = 16, 384
# Rows of x and of the weight, warps and stages of a program; by the most rows of x.
BLOCKS = {16: (16, 64, 4, 4), 32: (32, 64, 4, 4), 64: (64, 64, 4, 3), 2**31: (128, 128, 8, 2)}
# Programs that a device should have for its memory to be busy; and the most parts of the columns.
PROGRAMS, MOST_SPLITS = 256, 8
# What a cache holds: an unpacked weight, or the FP32 sums of so many rows at a time.
CACHED_BYTES = 32 * 2**20


def scale_words(weight: FP4) -> torch.Tensor:
    """Block scales as `sums_of` reads them: four in an int32 where they fill a row of these."""
    whole = weight.shape[-1] % 64 == 0
    return weight.scales.view(torch.int32 if whole else torch.uint8)


def product(
    x_TF: torch.Tensor,
    weight: FP4,
    *,
    fp32: bool | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x W^T in `dtype`, else the type of x; `fp32` not None means SwiGLU follows."""
    weight.check()
    assert x_TF.shape[1] == weight.shape[1] and x_TF.stride(1) == 1
    outputs = len(weight) if fp32 is None else len(weight) // 2
    y_TN = torch.empty(len(x_TF), outputs, dtype=dtype or x_TF.dtype, device=x_TF.device)
    if len(x_TF):
        small = weight.values is not None or 2 * x_TF.shape[1] * len(weight) <= CACHED_BYTES
        decodes = len(x_TF) <= (CACHED_ROWS if small else FUSED_ROWS)
        (_decoding if decodes else _unpacking)(x_TF, weight, y_TN, fp32)
    return y_TN


def _decoding(x_TF: torch.Tensor, weight: FP4, y_TN: torch.Tensor, fp32: bool | None) -> None:
    (count, columns), rows = x_TF.shape, len(weight)
    block_m, block_n, warps, ahead = by_size(BLOCKS, count)
    programs = cdiv(count, block_m) * cdiv(rows, block_n)
    splits = min(cdiv(PROGRAMS, programs), MOST_SPLITS, cdiv(columns, 512))
    # Parts are of whole spans, and none is empty.
    splits = cdiv(columns, cdiv(columns, splits * SPAN) * SPAN)
    out_TN, outputs, gated = y_TN, y_TN.shape[1], fp32 is not None
    if splits > 1:
        out_TN = torch.empty(splits, count, rows, dtype=torch.float32, device=x_TF.device)
        outputs, gated = rows, False
    _product_kernel[(programs, splits)](
        x_TF, words_of(weight.codes), scale_words(weight), weight.rows, out_TN, count,
        x_TF.stride(0), N=outputs, K=columns, GATED=gated, FP32=bool(fp32), SPLITS=splits,
        BLOCK_M=block_m, BLOCK_N=block_n, num_warps=warps, num_stages=stages(x_TF, ahead),
        **pdl(x_TF),
    )  # fmt: skip
    if splits > 1:
        _finish(out_TN, weight, y_TN, fp32)


def _unpacking(x_TF: torch.Tensor, weight: FP4, y_TN: torch.Tensor, fp32: bool | None) -> None:
    if (held_NF := weight.values) is None:
        held_NF = unpack.kernel(weight.codes, weight.scales, dtype=x_TF.dtype)
    # A graph outlives what the host knows now.
    if weight.runs and fp32 is None and y_TN.dtype == x_TF.dtype and not is_for_graph():
        _by_runs(x_TF, held_NF, weight.runs, y_TN)
        return
    step = max(CACHED_BYTES // (4 * len(weight)) // 128 * 128, 128)
    for x_XF, y_XN in zip(x_TF.split(step), y_TN.split(step), strict=True):
        sums_XN = torch.mm(x_XF, held_NF.T, out_dtype=torch.float32)
        _finish(sums_XN[None], weight, y_XN, fp32)


def _by_runs(
    x_TF: torch.Tensor,
    held_NF: torch.Tensor,
    runs: tuple[tuple[int, float], ...],
    y_TN: torch.Tensor,
) -> None:
    """Products whose sums torch scales before it rounds them, run by run of rows."""
    first = 0
    for end, scale in runs:
        y_TX = y_TN[:, first:end]
        torch.addmm(y_TX, x_TF, held_NF[first:end].T, beta=0.0, alpha=scale, out=y_TX)
        first = end


def _finish(sums_STN: torch.Tensor, weight: FP4, y_TN: torch.Tensor, fp32: bool | None) -> None:
    (splits, count, _), outputs = sums_STN.shape, y_TN.shape[1]
    _finish_kernel[(count, cdiv(outputs, 1024))](
        sums_STN, weight.rows, y_TN, count, N=outputs, GATED=fp32 is not None,
        FP32=bool(fp32), SPLITS=splits, BLOCK_N=1024, num_warps=4, **pdl(y_TN),
    )  # fmt: skip
