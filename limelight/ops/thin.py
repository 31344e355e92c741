"""Products of a few rows with a weight, which is read once: its bytes are what they cost.

    y = x W^T, rounded once;   gated: silu(gate) * up of y = [gate, up], as `activation` rounds it

One row, with its norm within: the weight waits in registers for the row and meets it on the FP32
units. A few rows: it waits there in the order of the matrix units' operands.

Both ask for their weights before they wait for their rows.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from limelight.ops import by_size, pdl
from limelight.ops.activation import rounded_swiglu


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
    if COPIES == 2:
        # The same in both copies.
        sum_WTN = tl.sum(tl.reshape(sum_WTN, [WARPS, 2, BLOCK_T, BLOCK_N]), axis=1) * 0.5
    y_TN = tl.sum(sum_WTN, axis=0)
    if GATED:
        gate_TN, up_TN = tl.split(tl.reshape(y_TN, [BLOCK_T, BLOCK_N // 2, 2]))
        y_TN = rounded_swiglu(gate_TN, up_TN, FP32, out.dtype.element_ty)
    t = tl.arange(0, BLOCK_T)[:, None]
    n = tl.program_id(0) * y_TN.shape[1] + tl.arange(0, y_TN.shape[1])[None, :]
    y_TN = y_TN.to(out.dtype.element_ty)
    tl.store(out + t.to(tl.int64) * N + n, y_TN, mask=(t < rows) & (n < N))


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
    768: Tile(32, 4, 4),
    2048: Tile(8, 8, 4),
    2560: Tile(16, 8, 2),
    5120: Tile(4, 4, 4),
    8192: Tile(4, 8, 2),
}
# By the most rows; then as above. The products of more rows are torch's.
FEW_ROWS: dict[int, dict[int, Tile | None]] = {
    8: {768: Tile(16, 4, 4), 2048: Tile(16, 4, 3), 2560: Tile(16, 8, 2), 8192: Tile(8, 8, 2)},
    16: {768: Tile(16, 4, 4), 2560: None, 8192: Tile(8, 4, 2)},
}
MOST_COLUMNS = 8192  # that registers hold


def check(x_TF: torch.Tensor, weight_DF: torch.Tensor) -> None:
    assert x_TF.stride(1) == 1 and x_TF.dtype == weight_DF.dtype
    assert weight_DF.is_contiguous() and weight_DF.shape[1] == x_TF.shape[1]


def one_row(
    h_TD: torch.Tensor | None,
    x_TD: torch.Tensor | None,
    norm_D: torch.Tensor | None,
    weight_DF: torch.Tensor,
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
    tile = tile or by_size(ONE_ROW, columns)
    out_TD = None
    if h_TD is not None and x_TD is not None:
        assert x_TD.shape == h_TD.shape and x_TD.stride(1) == 1 and x_TD.dtype == h_TD.dtype
        out_TD = torch.empty_like(h_TD, memory_format=torch.contiguous_format)
    outputs = rows if fp32 is None else rows // 2
    y_TN = torch.empty(1, outputs, dtype=dtype or row_TD.dtype, device=row_TD.device)
    # The widest piece that leaves no rest, if that is not too narrow.
    span, most = columns & -columns, 256 * tile.warps
    block = min(span if span >= 256 else triton.next_power_of_2(columns), most)
    _one_kernel[(triton.cdiv(rows, tile.rows),)](
        h_TD, x_TD, norm_D, weight_DF, out_TD, y_TN, eps, N=outputs, F=columns,
        GATED=fp32 is not None, FP32=bool(fp32), BLOCK_N=tile.rows, BLOCK_F=max(block, 32),
        num_warps=tile.warps, maxnreg=tile.registers, **pdl(row_TD),
    )  # fmt: skip
    return out_TD, y_TN


def few_rows(
    x_TF: torch.Tensor,
    weight_DF: torch.Tensor,
    *,
    fp32: bool | None = None,
    dtype: torch.dtype | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """The product; `fp32` not None means SwiGLU follows."""
    check(x_TF, weight_DF)
    (count, columns), rows = x_TF.shape, len(weight_DF)
    tile = tile or few_tile(count, columns)
    assert tile is not None
    outputs = rows if fp32 is None else rows // 2
    y_TN = torch.empty(count, outputs, dtype=dtype or x_TF.dtype, device=x_TF.device)
    run = columns // (32 * tile.warps) if columns % (32 * tile.warps) == 0 else 1
    _few_kernel[(triton.cdiv(rows, tile.rows),)](
        x_TF, weight_DF, y_TN, count, x_TF.stride(0), N=outputs, F=columns,
        GATED=fp32 is not None, FP32=bool(fp32), BLOCK_T=max(triton.next_power_of_2(count), 8),
        BLOCK_N=tile.rows, WARPS=tile.warps, RUN=run & -run,
        num_warps=tile.warps, maxnreg=tile.registers, **pdl(x_TF),
    )  # fmt: skip
    return y_TN


def few_tile(count: int, columns: int) -> Tile | None:
    """The tile for a few rows; None where torch's product is as good."""
    if not 0 < count <= max(FEW_ROWS) or columns > MOST_COLUMNS:
        return None
    return by_size(by_size(FEW_ROWS, count), columns)


def swiglu_rows(gate_up_TG: torch.Tensor, *, fp32: bool) -> torch.Tensor:
    """SwiGLU of rows [gate, up]."""
    assert gate_up_TG.is_contiguous()
    count, outputs = len(gate_up_TG), gate_up_TG.shape[1] // 2
    y_TN = gate_up_TG.new_empty(count, outputs)
    if count:
        _swiglu_kernel[(count, triton.cdiv(outputs, 1024))](
            gate_up_TG, y_TN, outputs, FP32=fp32, BLOCK_N=1024, num_warps=4, **pdl(gate_up_TG)
        )
    return y_TN
