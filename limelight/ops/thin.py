"""Products of a few rows with a weight, which is read once: its bytes are what they cost.

    y = x W^T, rounded once;   gated: silu(gate) * up of y = [gate, up], as `activation` rounds it

One row, with its norm within: the weight waits in registers for the row and meets it on the FP32
units. A few rows: it waits there in the order of the matrix units' operands. NVFP4 weights wait as
they are stored, some columns of a row a thread, and are decoded when the rows are there.

Both ask for their weights before they wait for their rows.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from limelight.ops import by_size, cdiv, next_power_of_2, pdl
from limelight.ops.activation import rounded_swiglu
from limelight.ops.fp4 import BLOCK, FP4, PlainOrFP4, stacked
from limelight.ops.fp4_codes import ASSEMBLY, LEFT, wide_weights_of
from limelight.ops.fp4_few import along, few_parts, finish, held, sums


@triton.jit
def _weight_row(i, N: tl.constexpr, GATED: tl.constexpr):
    """The i-th row of the weight; of a gated one [gate, up], the gate's and up's by turns."""
    if GATED:
        i = i // 2 + i % 2 * N
    return i.to(tl.int64)


@triton.jit
def _one_kernel(
    h, x, norm, weight, out_h, out, eps,
    N: tl.constexpr, F: tl.constexpr, GATED: tl.constexpr, FP32: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row x, or the norm of h or of h + x, which the first program writes."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    CHUNKS: tl.constexpr = (F + BLOCK_F - 1) // BLOCK_F
    ROWS: tl.constexpr = N * (2 if GATED else 1)
    dtype: tl.constexpr = weight.dtype.element_ty
    i, f = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_F)
    at = weight + _weight_row(i, N, GATED)[:, None] * F + f[None, :]
    tiles, norms, row = (), (), ()
    for c in tl.static_range(CHUNKS):
        if ROWS % BLOCK_N == 0 and F % BLOCK_F == 0:
            tile = tl.load(at + c * BLOCK_F)
        else:
            inside = (i < ROWS)[:, None] & (c * BLOCK_F + f < F)[None, :]
            tile = tl.load(at + c * BLOCK_F, mask=inside, other=0.0)
        tiles = tiles + (tile,)  # type: ignore[assignment]
        if norm is not None:
            tile = tl.load(norm + c * BLOCK_F + f, mask=c * BLOCK_F + f < F, other=0.0)
            norms = norms + (tile,)  # type: ignore[assignment]
    if PDL:
        tl.extra.cuda.gdc_wait()
    square = tl.zeros([BLOCK_F], tl.float32)
    for c in tl.static_range(CHUNKS):
        inside = c * BLOCK_F + f < F
        tile = tl.load((x if h is None else h) + c * BLOCK_F + f, mask=inside, other=0.0)
        if h is not None and x is not None:
            added = tl.load(x + c * BLOCK_F + f, mask=inside, other=0.0).to(tl.float32)
            tile = (tile.to(tl.float32) + added).to(dtype)
            tl.store(out_h + c * BLOCK_F + f, tile, mask=inside & (tl.program_id(0) == 0))
        if norm is not None:
            square += tile.to(tl.float32) * tile.to(tl.float32)
        row = row + (tile,)  # type: ignore[assignment]
    if norm is not None:
        scale = tl.rsqrt(tl.sum(square, axis=0) / F + eps)
    sum_NX = tl.zeros([BLOCK_N, BLOCK_F // 8], tl.float32)
    for c in tl.static_range(CHUNKS):
        x_F = row[c].to(tl.float32)  # type: ignore[var-annotated]
        if norm is not None:
            x_F = (x_F * scale * norms[c].to(tl.float32)).to(dtype).to(tl.float32)
        product_NF = tiles[c].to(tl.float32) * x_F[None, :]
        sum_NX += tl.sum(tl.reshape(product_NF, [BLOCK_N, BLOCK_F // 8, 8]), axis=2)
    y_N = tl.sum(sum_NX, axis=1)
    if GATED:
        gate_N, up_N = tl.split(tl.reshape(y_N, [BLOCK_N // 2, 2]))
        y_N = rounded_swiglu(gate_N, up_N, FP32, out.dtype.element_ty)
    n = tl.program_id(0) * y_N.shape[0] + tl.arange(0, y_N.shape[0])
    tl.store(out + n, y_N.to(out.dtype.element_ty), mask=n < N)


@triton.jit
def decoded(block, scale, dtype: tl.constexpr):
    """The weights [..., 8] of both halves of each block, an int64, for rows of `dtype`."""
    low = wide_weights_of(block.to(tl.int32), scale, dtype)
    return low, wide_weights_of((block >> 32).to(tl.int32), scale, dtype)


@triton.jit
def block_sums(weights, low, high):
    """Each block of `decoded` times its columns [..., 8]: FP32, LEFT times too small."""
    return tl.sum(weights[0] * low, axis=-1) + tl.sum(weights[1] * high, axis=-1)


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    """FP32 values as `dtype` has them; two at once, for one by one they are converted slowly."""
    if dtype != tl.bfloat16 or not ASSEMBLY:
        return x.to(dtype).to(tl.float32)
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 a;
        cvt.rn.bf16x2.f32 a, $3, $2; shl.b32 $0, a, 16; and.b32 $1, a, 0xFFFF0000;
        }
        """,
        "=r,=r,r,r",
        [x],
        tl.float32,
        is_pure=True,
        pack=2,
    )


@triton.jit
def _one_fp4_kernel(
    h, x, norm, weight, scales, factors, out_h, out, eps,
    N: tl.constexpr, F: tl.constexpr, GATED: tl.constexpr, FP32: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_B: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """As `_one_kernel`. Tiles [BLOCK_B, BLOCK_R] of blocks, one a thread; a program has several.

    All threads lie along the columns where there are enough: each makes its part of the row once,
    for all rows of the weight.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    BLOCKS: tl.constexpr = F // 16
    CHUNKS: tl.constexpr = (BLOCKS + BLOCK_B - 1) // BLOCK_B
    ITEMS: tl.constexpr = BLOCK_N // BLOCK_R
    ROWS: tl.constexpr = N * (2 if GATED else 1)
    dtype: tl.constexpr = (x if h is None else h).dtype.element_ty
    b = tl.arange(0, BLOCK_B)[:, None]
    i_RI = tl.program_id(0) * BLOCK_N + tl.reshape(tl.arange(0, BLOCK_N), [BLOCK_R, ITEMS])
    i_R = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_R) * ITEMS
    # Of every block first the low 8 columns, then the high ones.
    f = tl.broadcast_to((b * 16)[:, :, None], [BLOCK_B, BLOCK_R, 8]) + tl.arange(0, 8)
    tiles, tile_scales, norms, row = (), (), (), ()
    for c in tl.static_range(CHUNKS):
        for i in tl.static_range(ITEMS):
            at = _weight_row(i_R + i, N, GATED)[None, :] * BLOCKS + c * BLOCK_B + b
            if ROWS % BLOCK_N == 0 and BLOCKS % BLOCK_B == 0:
                tile, scale = tl.load(weight + at), tl.load(scales + at)
            else:
                inside = (i_R + i < ROWS)[None, :] & (c * BLOCK_B + b < BLOCKS)
                tile = tl.load(weight + at, mask=inside, other=0)
                scale = tl.load(scales + at, mask=inside, other=0)
            tiles = tiles + (tile,)  # type: ignore[assignment]
            tile_scales = tile_scales + (scale,)  # type: ignore[assignment]
    factor_RI = tl.load(factors + _weight_row(i_RI, N, GATED), mask=i_RI < ROWS, other=0.0)
    if norm is not None:
        for c in tl.static_range(2 * CHUNKS):
            at = c // 2 * BLOCK_B * 16 + c % 2 * 8 + f
            tile = tl.load(norm + at, mask=at < F, other=0.0)
            norms = norms + (tile,)  # type: ignore[assignment]
    if PDL:
        tl.extra.cuda.gdc_wait()
    square = tl.zeros([BLOCK_B, BLOCK_R, 8], tl.float32)
    for c in tl.static_range(2 * CHUNKS):
        at = c // 2 * BLOCK_B * 16 + c % 2 * 8 + f
        tile = tl.load((x if h is None else h) + at, mask=at < F, other=0.0)
        if h is not None and x is not None:
            added = tl.load(x + at, mask=at < F, other=0.0).to(tl.float32)
            tile = (tile.to(tl.float32) + added).to(dtype)
            first = (tl.program_id(0) == 0) & (tl.arange(0, BLOCK_R) == 0)
            tl.store(out_h + at, tile, mask=(at < F) & first[None, :, None])
        if norm is not None:
            square += tile.to(tl.float32) * tile.to(tl.float32)
        row = row + (tile,)  # type: ignore[assignment]
    if norm is not None:
        mean_R = tl.sum(tl.sum(square, axis=2), axis=0) / F
        scale_R = tl.rsqrt(mean_R + eps)[None, :, None]
    sums = ()
    for _ in tl.static_range(ITEMS):
        sums = sums + (tl.zeros([BLOCK_B, BLOCK_R], tl.float32),)  # type: ignore[assignment]
    for c in tl.static_range(CHUNKS):
        low = row[2 * c].to(tl.float32)  # type: ignore[var-annotated]
        high = row[2 * c + 1].to(tl.float32)
        if norm is not None:
            low = _rounded(low * scale_R * norms[2 * c].to(tl.float32), dtype)
            high = _rounded(high * scale_R * norms[2 * c + 1].to(tl.float32), dtype)
        old = sums
        sums = ()
        for i in tl.static_range(ITEMS):
            weights = decoded(tiles[c * ITEMS + i], tile_scales[c * ITEMS + i], dtype)
            sums = sums + (old[i] + block_sums(weights, low, high),)
    y_RI = tl.sum(stacked(sums), axis=0) * factor_RI * LEFT
    y_N = tl.reshape(y_RI, [BLOCK_N])
    if GATED:
        gate_N, up_N = tl.split(tl.reshape(y_RI, [BLOCK_N // 2, 2]))
        y_N = rounded_swiglu(gate_N, up_N, FP32, out.dtype.element_ty)
    n = tl.program_id(0) * y_N.shape[0] + tl.arange(0, y_N.shape[0])
    tl.store(out + n, y_N.to(out.dtype.element_ty), mask=n < N)


@triton.jit
def _places(WARPS: tl.constexpr, RUN: tl.constexpr, BLOCKS: tl.constexpr):
    """Rows and columns of a tile [8, WARPS, RUN, BLOCKS, 32] of BLOCKS * 8 rows.

    In this order of dimensions 8 rows of 4 x 8 columns are what the threads of one warp load at
    once, 16 bytes each.
    """
    r = tl.arange(0, 8)[:, None, None, None, None]
    w = tl.arange(0, WARPS)[None, :, None, None, None]
    c = tl.arange(0, RUN)[None, None, :, None, None]
    b = tl.arange(0, BLOCKS)[None, None, None, :, None]
    f = tl.arange(0, 32)[None, None, None, None, :]
    return b * 8 + r, (w * RUN + c) * 32 + f


@triton.jit
def _of_copies(sum_WTN, BLOCK_T: tl.constexpr):
    """The sum over warps [T, N]; where rows stand twice for the matrix unit, of one of each."""
    WARPS: tl.constexpr = sum_WTN.shape[0]
    BLOCK_N: tl.constexpr = sum_WTN.shape[2]
    if sum_WTN.shape[1] != BLOCK_T:
        sum_WTN = tl.sum(tl.reshape(sum_WTN, [WARPS, 2, BLOCK_T, BLOCK_N]), axis=1) * 0.5
    return tl.sum(sum_WTN, axis=0)


@triton.jit
def _store_few(y_TN, out, rows, N: tl.constexpr, GATED: tl.constexpr, FP32: tl.constexpr):
    """Products of this program's rows of the weight, or their SwiGLU, rounded."""
    BLOCK_T: tl.constexpr = y_TN.shape[0]
    if GATED:
        gate_TN, up_TN = tl.split(tl.reshape(y_TN, [BLOCK_T, y_TN.shape[1] // 2, 2]))
        y_TN = rounded_swiglu(gate_TN, up_TN, FP32, out.dtype.element_ty)
    t = tl.arange(0, BLOCK_T)[:, None]
    n = tl.program_id(0) * y_TN.shape[1] + tl.arange(0, y_TN.shape[1])[None, :]
    y_TN = y_TN.to(out.dtype.element_ty)
    tl.store(out + t.to(tl.int64) * N + n, y_TN, mask=(t < rows) & (n < N))


@triton.jit
def _few_kernel(
    x, weight, out, rows, stride_x,
    N: tl.constexpr, F: tl.constexpr, GATED: tl.constexpr, FP32: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, WARPS: tl.constexpr, RUN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Up to BLOCK_T rows. Of every span of columns a warp has RUN * 32 that lie together.

    A thread loads 8 neighbouring columns and hands them to the matrix unit as the 4 pairs that it
    holds of 32 there. That is another order of columns, the same for x and the weight; so nothing
    is exchanged between threads.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    SPAN: tl.constexpr = WARPS * RUN * 32
    ROWS: tl.constexpr = N * (2 if GATED else 1)
    BLOCKS: tl.constexpr = BLOCK_T // 8
    # The matrix unit takes 16 rows at least.
    COPIES: tl.constexpr = 2 if BLOCK_T == 8 else 1
    M: tl.constexpr = BLOCK_T * COPIES
    i, f = _places(WARPS, RUN, BLOCK_N // 8)
    i += tl.program_id(0) * BLOCK_N
    at = weight + _weight_row(i, N, GATED) * F + f
    tiles = ()
    for start in tl.static_range(0, F, SPAN):
        if ROWS % BLOCK_N == 0 and F % SPAN == 0:
            tile = tl.load(at + start)
        else:
            tile = tl.load(at + start, mask=(i < ROWS) & (start + f < F), other=0.0)
        tile = tl.reshape(tile, [8, WARPS, RUN, BLOCK_N // 8, 4, 4, 2])
        tile = tl.permute(tile, [1, 2, 5, 4, 6, 3, 0])
        tiles = tiles + (tl.reshape(tile, [WARPS, RUN * 32, BLOCK_N]),)  # type: ignore[assignment]
    if PDL:
        tl.extra.cuda.gdc_wait()
    t, f = _places(WARPS, RUN, BLOCKS)
    x_tiles = ()
    for start in tl.static_range(0, F, SPAN):
        inside = t < rows
        if F % SPAN != 0:
            inside = inside & (start + f < F)
        tile = tl.load(x + t.to(tl.int64) * stride_x + (start + f), mask=inside, other=0.0)
        tile = tl.broadcast_to(tile, [8, WARPS, RUN, BLOCKS * COPIES, 32])
        tile = tl.reshape(tile, [8, WARPS, RUN, BLOCKS * COPIES, 4, 4, 2])
        tile = tl.permute(tile, [1, 3, 0, 2, 5, 4, 6])
        x_tiles = x_tiles + (tl.reshape(tile, [WARPS, M, RUN * 32]),)  # type: ignore[assignment]
    sum_WTN = tl.zeros([WARPS, M, BLOCK_N], tl.float32)
    for c in tl.static_range(len(tiles)):
        sum_WTN = tl.dot(x_tiles[c], tiles[c], sum_WTN, input_precision="ieee")
    _store_few(_of_copies(sum_WTN, BLOCK_T), out, rows, N, GATED, FP32)


@triton.jit
def _few_fp4_kernel(
    x, weight, scales, factors, out, rows, stride_x,
    N: tl.constexpr, F: tl.constexpr, GATED: tl.constexpr, FP32: tl.constexpr,
    BLOCK_N: tl.constexpr, WARPS: tl.constexpr, ALONG: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Up to 8 rows."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.program_id(0) * BLOCK_N
    tiles, pairs = held(weight, scales, first, N, F, GATED, BLOCK_N, WARPS, ALONG)
    if PDL:
        tl.extra.cuda.gdc_wait()
    m = tl.arange(0, 8)
    x_M, out_M = x + m.to(tl.int64) * stride_x, out + m.to(tl.int64) * N
    sum_NM = sums(tiles, pairs, x_M, m < rows, F, BLOCK_N, WARPS, ALONG)
    finish(sum_NM, factors, first, out_M, m < rows, N, GATED, FP32)


@triton.jit
def _swiglu_kernel(
    gate_up, out, N, FP32: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """A piece of one row a program."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    t, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = gate_up + t * 2 * N + n
    gate_N = tl.load(at, mask=n < N, other=0.0).to(tl.float32)
    up_N = tl.load(at + N, mask=n < N, other=0.0).to(tl.float32)
    y_N = rounded_swiglu(gate_N, up_N, FP32, out.dtype.element_ty)
    tl.store(out + t * N + n, y_N, mask=n < N)


@dataclass(frozen=True, slots=True)
class Tile:
    """How a weight is dealt to programs that hold all their columns in registers."""

    rows: int  # of the weight, a program; of a gated one half as many outputs
    warps: int
    together: int  # programs on a multiprocessor, whose 64 K registers they share

    @property
    def registers(self) -> int:
        """A thread's. The compiler fills what it is given with loads on their way."""
        return min(65536 // (32 * self.warps * self.together) // 8 * 8, 255)


# By the most columns.
ONE_ROW = {
    768: Tile(16, 4, 4),
    2048: Tile(8, 8, 4),
    2560: Tile(16, 8, 2),
    4096: Tile(8, 8, 2),
    5120: Tile(4, 4, 4),
    8192: Tile(4, 8, 2),
}
# By the most rows; then as above. The products of more rows are torch's.
FEW_ROWS: dict[int, dict[int, Tile | None]] = {
    8: {768: Tile(16, 4, 4), 2048: Tile(16, 4, 3), 2560: Tile(16, 8, 2), 8192: Tile(8, 8, 2)},
    16: {768: Tile(16, 4, 4), 2560: None, 8192: Tile(8, 4, 2)},
}
# One row and an NVFP4 weight, by the most columns.
ONE_ROW_FP4 = {2048: Tile(8, 4, 6), 8192: Tile(4, 4, 5)}
FEW_FP4 = 8  # rows, at most
# By the most columns.
FEW_ROWS_FP4 = {
    1024: Tile(64, 4, 3), 2048: Tile(32, 4, 2), 4096: Tile(32, 8, 1), 8192: Tile(16, 8, 2)
}  # fmt: skip
# Of so many rows that programs come in many waves, as LM heads have.
LONG = 65536
LONG_FP4 = {1: Tile(16, 2, 8), FEW_FP4: Tile(32, 4, 3)}
MOST_COLUMNS = 8192  # that registers hold


def check(x_TF: torch.Tensor, weight_DF: PlainOrFP4) -> None:
    assert x_TF.stride(1) == 1 and weight_DF.shape[1] == x_TF.shape[1]
    if isinstance(weight_DF, FP4):
        weight_DF.check()
    else:
        assert weight_DF.is_contiguous() and x_TF.dtype == weight_DF.dtype


def blocks_of(weight: FP4) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes as int64 [..., N, K / 16], a block each, and the bits of their scales."""
    return weight.codes.view(torch.int64), weight.scales.view(torch.uint8)


def one_row(
    h_TD: torch.Tensor | None,
    x_TD: torch.Tensor | None,
    norm_D: torch.Tensor | None,
    weight_DF: PlainOrFP4,
    *,
    eps: float = 0.0,
    fp32: bool | None = None,
    dtype: torch.dtype | None = None,
    tile: Tile | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """The new h where there is a sum, and the product; `fp32` not None means SwiGLU follows."""
    row_TD = x_TD if h_TD is None else h_TD
    assert row_TD is not None and (norm_D is None) == (h_TD is None)
    check(row_TD, weight_DF)
    assert norm_D is None or norm_D.is_contiguous() and norm_D.shape == row_TD.shape[1:]
    rows, columns = weight_DF.shape
    tile = tile or by_size(ONE_ROW_FP4 if isinstance(weight_DF, FP4) else ONE_ROW, columns)
    out_TD = None
    if h_TD is not None and x_TD is not None:
        assert x_TD.shape == h_TD.shape and x_TD.stride(1) == 1 and x_TD.dtype == h_TD.dtype
        out_TD = torch.empty_like(h_TD, memory_format=torch.contiguous_format)
    outputs = rows if fp32 is None else rows // 2
    y_TN = torch.empty(1, outputs, dtype=dtype or row_TD.dtype, device=row_TD.device)
    options = {"N": outputs, "F": columns, "GATED": fp32 is not None, "FP32": bool(fp32)}
    options |= {"num_warps": tile.warps, "maxnreg": tile.registers, **pdl(row_TD)}
    grid = (cdiv(rows, tile.rows),)
    # The widest piece that leaves no rest, if that is not too narrow.
    span = columns & -columns
    if isinstance(weight_DF, FP4):
        block = span if span >= 256 else next_power_of_2(columns)
        block = min(block // BLOCK, 32 * tile.warps)
        _one_fp4_kernel[grid](
            h_TD, x_TD, norm_D, *blocks_of(weight_DF), weight_DF.rows, out_TD, y_TN, eps,
            BLOCK_N=tile.rows, BLOCK_R=min(32 * tile.warps // block, tile.rows), BLOCK_B=block,
            **options,
        )  # fmt: skip
    else:
        block = min(span if span >= 256 else next_power_of_2(columns), 256 * tile.warps)
        _one_kernel[grid](
            h_TD, x_TD, norm_D, weight_DF, out_TD, y_TN, eps,
            BLOCK_N=tile.rows, BLOCK_F=max(block, 32), **options,
        )  # fmt: skip
    return out_TD, y_TN


def few_rows(
    x_TF: torch.Tensor,
    weight_DF: PlainOrFP4,
    *,
    fp32: bool | None = None,
    dtype: torch.dtype | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """The product; `fp32` not None means SwiGLU follows."""
    check(x_TF, weight_DF)
    (count, columns), rows = x_TF.shape, len(weight_DF)
    tile = tile or few_tile(count, weight_DF)
    assert tile is not None
    outputs = rows if fp32 is None else rows // 2
    y_TN = torch.empty(count, outputs, dtype=dtype or x_TF.dtype, device=x_TF.device)
    options = {"N": outputs, "F": columns, "GATED": fp32 is not None, "FP32": bool(fp32)}
    options |= {"BLOCK_N": tile.rows, "WARPS": tile.warps, "num_warps": tile.warps}
    options |= {"maxnreg": tile.registers}
    grid = (cdiv(rows, tile.rows),)
    if isinstance(weight_DF, FP4):
        _few_fp4_kernel[grid](
            x_TF, *few_parts(weight_DF), y_TN, count, x_TF.stride(0),
            ALONG=along(columns, tile.rows, tile.warps), **options, **pdl(x_TF),
        )  # fmt: skip
    else:
        run = columns // (32 * tile.warps) if columns % (32 * tile.warps) == 0 else 1
        _few_kernel[grid](
            x_TF, weight_DF, y_TN, count, x_TF.stride(0), RUN=run & -run,
            BLOCK_T=max(next_power_of_2(count), 8), **options, **pdl(x_TF),
        )  # fmt: skip
    return y_TN


def few_tile(count: int, weight_DF: PlainOrFP4) -> Tile | None:
    """The tile for a few rows, or one; None where another product is as good."""
    columns = weight_DF.shape[1]
    if not 0 < count <= max(FEW_ROWS) or columns > MOST_COLUMNS:
        return None
    if not isinstance(weight_DF, FP4):
        return by_size(by_size(FEW_ROWS, count), columns)
    # A thread loads the scales of two blocks at once.
    if count > FEW_FP4 or columns % (2 * BLOCK):
        return None
    long = len(weight_DF) >= LONG and columns <= 2048
    return by_size(LONG_FP4, count) if long else by_size(FEW_ROWS_FP4, columns)


def swiglu_rows(gate_up_TG: torch.Tensor, *, fp32: bool) -> torch.Tensor:
    """SwiGLU of rows [gate, up]."""
    assert gate_up_TG.is_contiguous()
    count, outputs = len(gate_up_TG), gate_up_TG.shape[1] // 2
    y_TN = gate_up_TG.new_empty(count, outputs)
    if count:
        _swiglu_kernel[(count, cdiv(outputs, 1024))](
            gate_up_TG, y_TN, outputs, FP32=fp32, BLOCK_N=1024, num_warps=4, **pdl(gate_up_TG)
        )
    return y_TN
