"""The experts for a few rows: `moe` of `experts.py` by kernels that read the chosen experts alone.

Weights stay in registers and are multiplied on the FP32 units, each row's by itself. Two kernels:
gate and up with SwiGLU; down and the sum.
"""

import torch
import triton
import triton.language as tl

from limelight.ops import by_size, pdl
from limelight.ops.activation import rounded_swiglu


@triton.jit
def _held(
    weight, first, ROWS: tl.constexpr, SIZE: tl.constexpr, BLOCK_R: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """BLOCK_R rows of a weight [ROWS, SIZE] from `first` on: tiles [BLOCK_R, CHUNK].

    With as many warps as rows, and 8 columns of CHUNK a thread, sums cross no warps.
    """
    row, column = first + tl.arange(0, BLOCK_R), tl.arange(0, CHUNK)
    at_RC = weight + row[:, None] * SIZE + column[None, :]
    tiles = ()
    for start in tl.static_range(0, SIZE, CHUNK):
        if ROWS % BLOCK_R == 0 and SIZE % CHUNK == 0:
            tile = tl.load(at_RC + start)
        else:
            inside_RC = (row < ROWS)[:, None] & (start + column < SIZE)[None, :]
            tile = tl.load(at_RC + start, mask=inside_RC, other=0.0)
        tiles = tiles + (tile,)  # type: ignore[assignment]
    return tiles


@triton.jit
def _held_row(x, SIZE: tl.constexpr, BLOCK_R: tl.constexpr, CHUNK: tl.constexpr):
    """The row at x as tiles [BLOCK_R, CHUNK], BLOCK_R times the same: each warp has its own."""
    column = tl.arange(0, CHUNK)[None, :] + tl.zeros((BLOCK_R, 1), tl.int32)
    row = ()
    for start in tl.static_range(0, SIZE, CHUNK):
        tile = tl.load(x + start + column, mask=start + column < SIZE, other=0.0)
        row = row + (tile,)  # type: ignore[assignment]
    return row


@triton.jit
def _add_two(a, b, more_a, more_b):
    """For sums of two tensors in one go, which wait for other warps but once."""
    return a + more_a, b + more_b


@triton.jit
def _held_swiglu(gates, ups, row, FP32: tl.constexpr, dtype: tl.constexpr):
    """SwiGLU [BLOCK_R] of held weights times a held row."""
    gate_RC = tl.zeros(gates[0].shape, tl.float32)
    up_RC = tl.zeros(gates[0].shape, tl.float32)
    for c in tl.static_range(len(row)):
        gate_RC += gates[c].to(tl.float32) * row[c].to(tl.float32)
        up_RC += ups[c].to(tl.float32) * row[c].to(tl.float32)
    gate_R, up_R = tl.reduce((gate_RC, up_RC), 1, _add_two)
    return rounded_swiglu(gate_R, up_R, FP32, dtype)


@triton.jit
def _held_swiglu_rows(
    gates, ups, y, stride_y, out, stride_out, inside_F,
    SIZE: tl.constexpr, ROWS: tl.constexpr, FP32: tl.constexpr,
):  # fmt: skip
    """SwiGLU [BLOCK_R] of held weights times ROWS rows of y, into rows of `out`.

    Each weight is widened to FP32 once, for all rows, and 8 products of a thread are one sum.
    """
    BLOCK_R: tl.constexpr = gates[0].shape[0]
    CHUNK: tl.constexpr = gates[0].shape[1]
    column = tl.arange(0, CHUNK)[None, :] + tl.zeros((BLOCK_R, 1), tl.int32)
    gate_sums, up_sums = (), ()
    for _ in tl.static_range(ROWS):
        zero = tl.zeros((BLOCK_R, CHUNK // 8), tl.float32)
        gate_sums, up_sums = gate_sums + (zero,), up_sums + (zero,)  # type: ignore[assignment]
    for c in tl.static_range(len(gates)):
        gate_RC, up_RC = gates[c].to(tl.float32), ups[c].to(tl.float32)
        old_gates, old_ups = gate_sums, up_sums
        gate_sums, up_sums = (), ()
        for t in tl.static_range(ROWS):
            inside = c * CHUNK + column < SIZE
            x_RC = tl.load(y + t * stride_y + c * CHUNK + column, mask=inside, other=0.0)
            x_RC = x_RC.to(tl.float32)
            gate = tl.sum(tl.reshape(gate_RC * x_RC, (BLOCK_R, CHUNK // 8, 8)), axis=2)
            up = tl.sum(tl.reshape(up_RC * x_RC, (BLOCK_R, CHUNK // 8, 8)), axis=2)
            gate_sums = gate_sums + (old_gates[t] + gate,)  # type: ignore[assignment]
            up_sums = up_sums + (old_ups[t] + up,)  # type: ignore[assignment]
    for t in tl.static_range(ROWS):
        gate_R, up_R = tl.reduce((gate_sums[t], up_sums[t]), 1, _add_two)
        value_R = rounded_swiglu(gate_R, up_R, FP32, out.dtype.element_ty)
        tl.store(out + t * stride_out, value_R, mask=inside_F)


@triton.jit
def _gate_up_kernel(
    y, gate_up, shared_gate_up, ids, inner, rows, stride_y,
    SIZE: tl.constexpr, INNER: tl.constexpr, SHARED: tl.constexpr, COUNT: tl.constexpr,
    ROWS: tl.constexpr, FP32: tl.constexpr, BLOCK_F: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_F channels of a chosen expert of one row, or of the shared expert of all ROWS.

    The shared expert's programs come first: they have their weights before the router is done.
    Programs are ordered by channel: where rows share an expert, its weights are read from memory
    once and found in L2 soon after.
    """
    WIDTH: tl.constexpr = COUNT * INNER + SHARED
    dtype: tl.constexpr = inner.dtype.element_ty
    program = tl.program_id(0)
    SHARED_PROGRAMS: tl.constexpr = (SHARED + BLOCK_F - 1) // BLOCK_F
    if program < SHARED_PROGRAMS:
        if SHARED:
            first = program * BLOCK_F
            ups = shared_gate_up + SHARED * SIZE
            gates = _held(shared_gate_up, first, SHARED, SIZE, BLOCK_F, CHUNK)
            ups = _held(ups, first, SHARED, SIZE, BLOCK_F, CHUNK)
            if PDL:
                tl.extra.cuda.gdc_wait()
                tl.extra.cuda.gdc_launch_dependents()
            f = first + tl.arange(0, BLOCK_F)
            into_F = inner + COUNT * INNER + f
            _held_swiglu_rows(
                gates, ups, y, stride_y, into_F, WIDTH, f < SHARED, SIZE, ROWS, FP32
            )  # fmt: skip
    else:
        # The next kernel starts when all programs of this one have come so far: the ids, which
        # this one waits for, are then there for it too.
        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        pair = (program - SHARED_PROGRAMS) % (rows * COUNT)
        first = (program - SHARED_PROGRAMS) // (rows * COUNT) * BLOCK_F
        t, n = pair // COUNT, pair % COUNT
        gates = gate_up + tl.load(ids + pair).to(tl.int64) * (2 * INNER * SIZE)
        ups = gates + INNER * SIZE
        gates = _held(gates, first, INNER, SIZE, BLOCK_F, CHUNK)
        ups = _held(ups, first, INNER, SIZE, BLOCK_F, CHUNK)
        row = _held_row(y + t * stride_y, SIZE, BLOCK_F, CHUNK)
        value_F = _held_swiglu(gates, ups, row, FP32, dtype)
        f = first + tl.arange(0, BLOCK_F)
        tl.store(inner + t * WIDTH + n * INNER + f, value_F, mask=f < INNER)


@triton.jit
def _held_down(
    down, shared_down, e_N, d_XD,
    SIZE: tl.constexpr, INNER: tl.constexpr, SHARED: tl.constexpr, COUNT: tl.constexpr,
    BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, FROM: tl.constexpr, TO: tl.constexpr,
):  # fmt: skip
    """Channels `d_XD` of all experts of a row: tiles [BLOCK_N, X, D, CHUNK] of columns FROM to TO.

    The shared expert counts as several, of INNER columns each.
    """
    BLOCK_N: tl.constexpr = e_N.shape[0]
    EVEN: tl.constexpr = COUNT * INNER + SHARED == BLOCK_N * INNER and SIZE % BLOCK_D == 0
    n, f = tl.arange(0, BLOCK_N), tl.arange(0, CHUNK)
    first_N = down + e_N.to(tl.int64) * (SIZE * INNER)
    stride_N = tl.full((BLOCK_N,), INNER, tl.int32)
    if SHARED:
        first_N = tl.where(n < COUNT, first_N, shared_down + (n - COUNT) * INNER)
        stride_N = tl.where(n < COUNT, INNER, SHARED)
    n = n[:, None, None]
    at = first_N[:, None, None] + d_XD[None] * stride_N[:, None, None]
    at = at[:, :, :, None] + f[None, None, None, :]
    width = tl.where(d_XD < SIZE, INNER, 0)[None]
    width = tl.minimum(COUNT * INNER + SHARED - n * INNER, width)[:, :, :, None]
    tiles = ()
    for start in tl.static_range(FROM, TO, CHUNK):
        if EVEN and INNER % CHUNK == 0:
            tile = tl.load(at + start)
        else:
            inside = start + f[None, None, None, :] < width
            tile = tl.load(at + start, mask=inside, other=0.0)
        tiles = tiles + (tile,)  # type: ignore[assignment]
    return tiles


@triton.jit
def _summed_down(
    tiles, inner, weights_N, out, d_XD, scale,
    SIZE: tl.constexpr, INNER: tl.constexpr, SHARED: tl.constexpr, COUNT: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """The held weights times the row's inner channels, the experts' sum and the shared one's.

    The inner channels are loaded once by all threads together, or X times where there are fewer
    of them than threads. With as many warps as experts, each warp has an expert of its own.
    """
    BLOCK_N: tl.constexpr = tiles[0].shape[0]
    COPIES: tl.constexpr = tiles[0].shape[1]
    CHUNK: tl.constexpr = tiles[0].shape[3]
    WIDTH: tl.constexpr = COUNT * INNER + SHARED
    dtype: tl.constexpr = out.dtype.element_ty
    f = (tl.arange(0, CHUNK)[None, :] + tl.zeros((COPIES, 1), tl.int32))[None, :, None, :]
    n = tl.arange(0, BLOCK_N)[:, None, None]
    width = tl.minimum(WIDTH - n * INNER, INNER)[:, :, :, None]
    at = inner + n[:, :, :, None] * INNER + f
    row = ()
    for start in tl.static_range(0, INNER, CHUNK):
        # From L2, for the same kernel may have written it.
        part = tl.load(at + start, mask=start + f < width, other=0.0, cache_modifier=".cg")
        row = row + (part,)  # type: ignore[assignment]
    sums = tl.zeros(tiles[0].shape, tl.float32)
    for c in tl.static_range(len(tiles)):
        sums += tiles[c].to(tl.float32) * row[c].to(tl.float32)
    out_NXD = tl.sum(sums, axis=3)
    rounded_NXD = weights_N[:, None, None] * out_NXD.to(dtype).to(tl.float32)
    parts = tl.where(n < COUNT, rounded_NXD, 0.0), tl.where(n < COUNT, 0.0, out_NXD)
    total_XD, shared_XD = tl.reduce(parts, 0, _add_two)
    total_XD = total_XD.to(dtype)
    if SCALED:
        total_XD = (total_XD.to(tl.float32) * scale).to(dtype)
    if SHARED:
        total_XD = (total_XD.to(tl.float32) + shared_XD.to(dtype).to(tl.float32)).to(dtype)
    tl.store(out + d_XD, total_XD, mask=d_XD < SIZE)


@triton.jit
def _down_kernel(
    inner, down, shared_down, weights, ids, out, rows, scale,
    SIZE: tl.constexpr, INNER: tl.constexpr, SHARED: tl.constexpr, COUNT: tl.constexpr,
    SCALED: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr,
    COPIES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_D channels of one row's result.

    The weights are asked for before the wait. That needs the ids, which are not the previous
    kernel's result: that kernel waited for them before it let this one start.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    t = tl.program_id(0) % rows
    d_XD = tl.program_id(0) // rows * BLOCK_D
    d_XD += tl.reshape(tl.arange(0, BLOCK_D), (COPIES, BLOCK_D // COPIES))
    n = tl.arange(0, BLOCK_N)
    # From L2, for a line of L1 may be older than the ids.
    e_N = tl.load(ids + t * COUNT + n, mask=n < COUNT, other=0, cache_modifier=".cg")
    tiles = _held_down(
        down, shared_down, e_N, d_XD, SIZE, INNER, SHARED, COUNT, BLOCK_D, CHUNK, 0, INNER
    )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    weights_N = tl.load(weights + t * COUNT + n, mask=n < COUNT, other=0.0)
    inner += t * (COUNT * INNER + SHARED)
    out += t * SIZE
    _summed_down(tiles, inner, weights_N, out, d_XD, scale, SIZE, INNER, SHARED, COUNT, SCALED)


Tile = dict[str, int]
# Up to this many rows, each goes to its experts by itself; by the most columns.
FEW = {4096: 5, 2**31: 12}
# Rows of weight a program, columns at a time and warps; by the most columns.
GATE_UP: dict[int, Tile] = {
    4096: {"BLOCK_F": 4, "CHUNK": 512, "num_warps": 8},
    2**31: {"BLOCK_F": 4, "CHUNK": 512, "num_warps": 8, "maxnreg": 128},
}
# By the most columns of the down matrices of all experts of a row together.
DOWN: dict[int, Tile] = {
    3072: {"BLOCK_D": 8, "CHUNK": 256, "num_warps": 4},
    2**31: {"BLOCK_D": 8, "CHUNK": 256, "num_warps": 8, "maxnreg": 128},
}


def _chunk(size: int, most: int) -> int:
    """A number of columns that divides `size`, if a power of two of any use does."""
    chunk = size & -size
    return min(most, chunk if chunk >= 32 else max(triton.next_power_of_2(size), 8))


def few_moe(
    y_TD: torch.Tensor,
    gate_up_EGD: torch.Tensor,
    down_EDF: torch.Tensor,
    weights_TN: torch.Tensor,
    ids_TN: torch.Tensor,
    shared_gate_up_GD: torch.Tensor | None,
    shared_down_DF: torch.Tensor | None,
    *,
    fp32: bool,
    scale: float,
) -> torch.Tensor:
    (rows, size), count, width = y_TD.shape, ids_TN.shape[1], down_EDF.shape[2]
    shared = 0 if shared_down_DF is None else shared_down_DF.shape[1]
    columns = count * width + shared
    inner_TF, out_TD = y_TD.new_empty(rows, columns), y_TD.new_empty(rows, size)
    sizes = {"SIZE": size, "INNER": width, "SHARED": shared, "COUNT": count}
    tile = by_size(GATE_UP, size)
    blocks = rows * count * triton.cdiv(width, tile["BLOCK_F"])
    _gate_up_kernel[(blocks + triton.cdiv(shared, tile["BLOCK_F"]),)](
        y_TD, gate_up_EGD, shared_gate_up_GD, ids_TN, inner_TF, rows, y_TD.stride(0),
        **sizes, ROWS=rows if shared else 0, FP32=fp32,
        **tile | {"CHUNK": _chunk(size, tile["CHUNK"])}, **pdl(y_TD),
    )  # fmt: skip
    tile = by_size(DOWN, columns)
    chunk, block_n = (
        _chunk(width, tile["CHUNK"]),
        triton.next_power_of_2(triton.cdiv(columns, width)),
    )
    copies = min(max(tile["num_warps"] * 32 * 8 // (block_n * chunk), 1), tile["BLOCK_D"])
    _down_kernel[(rows * triton.cdiv(size, tile["BLOCK_D"]),)](
        inner_TF, down_EDF, shared_down_DF, weights_TN, ids_TN, out_TD, rows, scale,
        **sizes, SCALED=scale != 1.0, BLOCK_N=block_n, COPIES=copies, **tile | {"CHUNK": chunk},
        **pdl(y_TD),
    )  # fmt: skip
    return out_TD
