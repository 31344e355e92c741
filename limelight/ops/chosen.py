"""The experts for a few rows: `moe` of `experts.py` by kernels that read the chosen experts alone.

Weights stay in registers and are multiplied on the FP32 units, each row's by itself. Two kernels:
gate and up with SwiGLU; down and the sum. NVFP4 weights stay there as they are stored, in tiles of
blocks that have one for each thread.
"""

import torch
import triton
import triton.language as tl

from limelight.ops import by_size, cdiv, next_power_of_2, pdl
from limelight.ops.activation import rounded_swiglu
from limelight.ops.fp4 import BLOCK, FP4, PlainOrFP4, stacked
from limelight.ops.fp4_codes import LEFT
from limelight.ops.thin import block_sums, blocks_of, decoded


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
            tile = tl.load(at_RC + start, mask=inside_RC, other=0)
        tiles = tiles + (tile,)  # type: ignore[assignment]
    return tiles


@triton.jit
def _held_gate_up(
    weight, scales, factors, expert, first,
    ROWS: tl.constexpr, SIZE: tl.constexpr, BLOCK_R: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """BLOCK_R rows of an expert's gate and of its up; of NVFP4 blocks, their scales and rows'."""
    if scales is None:
        weight += expert * (2 * ROWS * SIZE)
        gates = _held(weight, first, ROWS, SIZE, BLOCK_R, CHUNK)
        ups = _held(weight + ROWS * SIZE, first, ROWS, SIZE, BLOCK_R, CHUNK)
    else:
        BLOCKS: tl.constexpr = SIZE // 16
        weight += expert * (2 * ROWS * BLOCKS)
        scales += expert * (2 * ROWS * BLOCKS)
        row = first + tl.arange(0, BLOCK_R)
        factors += expert * (2 * ROWS) + row
        gates = (
            _held(weight, first, ROWS, BLOCKS, BLOCK_R, CHUNK // 16),
            _held(scales, first, ROWS, BLOCKS, BLOCK_R, CHUNK // 16),
            tl.load(factors, mask=row < ROWS, other=0.0),
        )
        ups = (
            _held(weight + ROWS * BLOCKS, first, ROWS, BLOCKS, BLOCK_R, CHUNK // 16),
            _held(scales + ROWS * BLOCKS, first, ROWS, BLOCKS, BLOCK_R, CHUNK // 16),
            tl.load(factors + ROWS, mask=row < ROWS, other=0.0),
        )
    return gates, ups


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
def _columns_of_blocks(y, c, SIZE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_B: tl.constexpr):
    """The columns of the c-th tile of blocks: [BLOCK_R, BLOCK_B, 8], the low and the high ones.

    In this order of dimensions a thread loads the columns of the block that it holds.
    """
    b = (tl.arange(0, BLOCK_B) + c * BLOCK_B)[:, None, None] * 16
    f = tl.broadcast_to(b, (BLOCK_B, BLOCK_R, 8)) + tl.arange(0, 8)
    low = tl.load(y + f, mask=f < SIZE, other=0.0)
    high = tl.load(y + f + 8, mask=f < SIZE, other=0.0)
    return tl.permute(low, (1, 0, 2)), tl.permute(high, (1, 0, 2))


@triton.jit
def _fp4_swiglu_rows(
    gates, ups, y, stride_y, out, stride_out, inside_F,
    SIZE: tl.constexpr, ROWS: tl.constexpr, FP32: tl.constexpr,
):  # fmt: skip
    """`_held_swiglu_rows` of NVFP4 weights, each decoded once for all rows."""
    BLOCK_R: tl.constexpr = gates[0][0].shape[0]
    BLOCK_B: tl.constexpr = gates[0][0].shape[1]
    CHUNKS: tl.constexpr = len(gates[0])
    dtype: tl.constexpr = y.dtype.element_ty
    row, gate_sums, up_sums = (), (), ()
    if ROWS == 1:
        for c in tl.static_range(CHUNKS):
            both = _columns_of_blocks(y, c, SIZE, BLOCK_R, BLOCK_B)
            row = row + (both,)  # type: ignore[assignment]
    for _ in tl.static_range(ROWS):
        zero = tl.zeros((BLOCK_R, BLOCK_B), tl.float32)
        gate_sums, up_sums = gate_sums + (zero,), up_sums + (zero,)  # type: ignore[assignment]
    for c in tl.static_range(CHUNKS):
        gate, up = decoded(gates[0][c], gates[1][c], dtype), decoded(ups[0][c], ups[1][c], dtype)
        old_gates, old_ups = gate_sums, up_sums
        gate_sums, up_sums = (), ()
        for t in tl.static_range(ROWS):
            if ROWS == 1:
                both = row[c]
            else:
                both = _columns_of_blocks(y + t * stride_y, c, SIZE, BLOCK_R, BLOCK_B)
            low, high = both[0].to(tl.float32), both[1].to(tl.float32)
            gate_sum = old_gates[t] + block_sums(gate, low, high)
            gate_sums = gate_sums + (gate_sum,)  # type: ignore[assignment]
            up_sums = up_sums + (old_ups[t] + block_sums(up, low, high),)  # type: ignore[assignment]
    for t in tl.static_range(ROWS):
        gate_R, up_R = tl.reduce((gate_sums[t], up_sums[t]), 1, _add_two)
        gate_R, up_R = gate_R * gates[2] * LEFT, up_R * ups[2] * LEFT
        value_R = rounded_swiglu(gate_R, up_R, FP32, out.dtype.element_ty)
        tl.store(out + t * stride_out, value_R, mask=inside_F)


@triton.jit
def _gate_up_kernel(
    y, gate_up, scales, factors, shared_gate_up, shared_scales, shared_factors, ids, inner,
    rows, stride_y,
    SIZE: tl.constexpr, INNER: tl.constexpr, SHARED: tl.constexpr, COUNT: tl.constexpr,
    ROWS: tl.constexpr, FP32: tl.constexpr, BLOCK_F: tl.constexpr,
    CHUNK: tl.constexpr, PDL: tl.constexpr,
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
            gates, ups = _held_gate_up(
                shared_gate_up, shared_scales, shared_factors, 0, first, SHARED, SIZE, BLOCK_F,
                CHUNK,
            )  # fmt: skip
            if PDL:
                tl.extra.cuda.gdc_wait()
                tl.extra.cuda.gdc_launch_dependents()
            f = first + tl.arange(0, BLOCK_F)
            into_F = inner + COUNT * INNER + f
            if scales is None:
                _held_swiglu_rows(
                    gates, ups, y, stride_y, into_F, WIDTH, f < SHARED, SIZE, ROWS, FP32
                )  # fmt: skip
            else:
                _fp4_swiglu_rows(
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
        expert = tl.load(ids + pair).to(tl.int64)
        gates, ups = _held_gate_up(
            gate_up, scales, factors, expert, first, INNER, SIZE, BLOCK_F, CHUNK
        )  # fmt: skip
        f = first + tl.arange(0, BLOCK_F)
        into_F = inner + t * WIDTH + n * INNER + f
        if scales is None:
            row = _held_row(y + t * stride_y, SIZE, BLOCK_F, CHUNK)
            tl.store(into_F, _held_swiglu(gates, ups, row, FP32, dtype), mask=f < INNER)
        else:
            _fp4_swiglu_rows(
                gates, ups, y + t * stride_y, 0, into_F, 0, f < INNER, SIZE, 1, FP32
            )  # fmt: skip


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
            tile = tl.load(at + start, mask=inside, other=0)
        tiles = tiles + (tile,)  # type: ignore[assignment]
    return tiles


@triton.jit
def _summed_down(
    tiles, inner, weights_N, added, out, d_XD, scale,
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
    _store_summed(
        tl.sum(sums, axis=3), weights_N, added, out, d_XD, scale, SIZE, SHARED, COUNT, SCALED
    )  # fmt: skip


@triton.jit
def _store_summed(
    out_NXD, weights_N, added, out, d_XD, scale,
    SIZE: tl.constexpr, SHARED: tl.constexpr, COUNT: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """The sum of the experts' outputs, and the shared one's: of all that come after the COUNT."""
    dtype: tl.constexpr = out.dtype.element_ty
    n = tl.arange(0, out_NXD.shape[0])[:, None, None]
    rounded_NXD = weights_N[:, None, None] * out_NXD.to(dtype).to(tl.float32)
    parts = tl.where(n < COUNT, rounded_NXD, 0.0), tl.where(n < COUNT, 0.0, out_NXD)
    total_XD, shared_XD = tl.reduce(parts, 0, _add_two)
    total_XD = total_XD.to(dtype)
    if SCALED:
        total_XD = (total_XD.to(tl.float32) * scale).to(dtype)
    if SHARED:
        total_XD = (total_XD.to(tl.float32) + shared_XD.to(dtype).to(tl.float32)).to(dtype)
    if added is not None:
        added_XD = tl.load(added + d_XD, mask=d_XD < SIZE, other=0.0)
        total_XD = (total_XD.to(tl.float32) + added_XD.to(tl.float32)).to(dtype)
    tl.store(out + d_XD, total_XD, mask=d_XD < SIZE)


@triton.jit
def _held_down_fp4(
    down, scales, factors, shared_down, shared_scales, shared_factors, e_N, first, d_XD,
    SIZE: tl.constexpr, INNER: tl.constexpr, SHARED: tl.constexpr, COUNT: tl.constexpr,
    BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Of NVFP4: tiles [BLOCK_N, X, 1, CHUNK / 16] of blocks for each D, their scales, the rows'."""
    BLOCK_N: tl.constexpr = e_N.shape[0]
    X: tl.constexpr = d_XD.shape[0]
    ITEMS: tl.constexpr = d_XD.shape[1]
    blocks, block_scales = (), ()
    for i in tl.static_range(ITEMS):
        d_X1 = first + tl.arange(0, X)[:, None] * ITEMS + i
        held = _held_down(
            down, shared_down, e_N, d_X1, SIZE, INNER // 16, SHARED // 16, COUNT, BLOCK_D,
            CHUNK // 16, 0, INNER // 16,
        )  # fmt: skip
        blocks = blocks + (held,)  # type: ignore[assignment]
        held = _held_down(
            scales, shared_scales, e_N, d_X1, SIZE, INNER // 16, SHARED // 16, COUNT, BLOCK_D,
            CHUNK // 16, 0, INNER // 16,
        )  # fmt: skip
        block_scales = block_scales + (held,)  # type: ignore[assignment]
    n = tl.arange(0, BLOCK_N)
    first_N = factors + e_N.to(tl.int64) * SIZE
    if SHARED:
        first_N = tl.where(n < COUNT, first_N, shared_factors)
    factor_NXD = tl.load(
        first_N[:, None, None] + d_XD[None], mask=(d_XD < SIZE)[None], other=0.0
    )  # fmt: skip
    return blocks, block_scales, factor_NXD


@triton.jit
def _summed_down_fp4(
    held, inner, weights_N, added, out, d_XD, scale,
    SIZE: tl.constexpr, INNER: tl.constexpr, SHARED: tl.constexpr, COUNT: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """`_summed_down` of NVFP4 weights."""
    BLOCK_N: tl.constexpr = held[0][0][0].shape[0]
    X: tl.constexpr = held[0][0][0].shape[1]
    BLOCK_B: tl.constexpr = held[0][0][0].shape[3]
    ITEMS: tl.constexpr = len(held[0])
    # In this order of dimensions a thread loads the columns of the block that it holds.
    n = tl.arange(0, BLOCK_N)[None, :, None, None, None]
    f = tl.arange(0, BLOCK_B)[:, None, None, None, None] * 16 + tl.arange(0, 8)
    f = tl.broadcast_to(f, (BLOCK_B, BLOCK_N, X, 1, 8))
    width = tl.minimum(COUNT * INNER + SHARED - n * INNER, INNER)
    dtype: tl.constexpr = inner.dtype.element_ty
    row, sums = (), ()
    for start in tl.static_range(0, INNER, BLOCK_B * 16):
        for half in tl.static_range(2):
            # From L2, for the same kernel may have written it.
            part = tl.load(
                inner + n * INNER + (start + half * 8 + f), mask=start + f < width, other=0.0,
                cache_modifier=".cg",
            )  # fmt: skip
            row = row + (tl.permute(part, (1, 2, 3, 0, 4)),)  # type: ignore[assignment]
    for _ in tl.static_range(ITEMS):
        zero = tl.zeros((BLOCK_N, X, 1, BLOCK_B), tl.float32)
        sums = sums + (zero,)  # type: ignore[assignment]
    for c in tl.static_range(len(row) // 2):
        low = row[2 * c].to(tl.float32)  # type: ignore[var-annotated]
        high = row[2 * c + 1].to(tl.float32)
        old = sums
        sums = ()
        for i in tl.static_range(ITEMS):
            sum_ = block_sums(decoded(held[0][i][c], held[1][i][c], dtype), low, high)
            sums = sums + (old[i] + sum_,)
    out_NXD = tl.reshape(tl.sum(stacked(sums), axis=3), (BLOCK_N, X, ITEMS)) * held[2] * LEFT
    _store_summed(out_NXD, weights_N, added, out, d_XD, scale, SIZE, SHARED, COUNT, SCALED)


@triton.jit
def _down_kernel(
    inner, down, scales, factors, shared_down, shared_scales, shared_factors, weights, ids, added,
    out, rows, scale,
    SIZE: tl.constexpr, INNER: tl.constexpr, SHARED: tl.constexpr, COUNT: tl.constexpr,
    SCALED: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr, COPIES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_D channels of one row's result.

    The weights are asked for before the wait. That needs the ids, which are not the previous
    kernel's result: that kernel waited for them before it let this one start.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    t = tl.program_id(0) % rows
    first = tl.program_id(0) // rows * BLOCK_D
    d_XD = first + tl.reshape(tl.arange(0, BLOCK_D), (COPIES, BLOCK_D // COPIES))
    n = tl.arange(0, BLOCK_N)
    # From L2, for a line of L1 may be older than the ids.
    e_N = tl.load(ids + t * COUNT + n, mask=n < COUNT, other=0, cache_modifier=".cg")
    if scales is None:
        tiles = _held_down(
            down, shared_down, e_N, d_XD, SIZE, INNER, SHARED, COUNT, BLOCK_D, CHUNK, 0, INNER
        )  # fmt: skip
    else:
        tiles = _held_down_fp4(
            down, scales, factors, shared_down, shared_scales, shared_factors, e_N, first, d_XD,
            SIZE, INNER, SHARED, COUNT, BLOCK_D, CHUNK,
        )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    weights_N = tl.load(weights + t * COUNT + n, mask=n < COUNT, other=0.0)
    inner += t * (COUNT * INNER + SHARED)
    out += t * SIZE
    if added is not None:
        added += t * SIZE
    if scales is None:
        _summed_down(
            tiles, inner, weights_N, added, out, d_XD, scale, SIZE, INNER, SHARED, COUNT, SCALED
        )  # fmt: skip
    else:
        _summed_down_fp4(
            tiles, inner, weights_N, added, out, d_XD, scale, SIZE, INNER, SHARED, COUNT, SCALED,
        )  # fmt: skip


Tile = dict[str, int]
# Up to this many rows, each goes to its experts by itself; by the most columns.
FEW = {4096: 5, 2**31: 12}
FEW_FP4 = {4096: 5, 2**31: 8}
# Rows of weight a program, columns at a time and warps; by the most columns.
GATE_UP: dict[int, Tile] = {
    4096: {"BLOCK_F": 8, "CHUNK": 512, "num_warps": 8},
    2**31: {"BLOCK_F": 4, "CHUNK": 512, "num_warps": 8, "maxnreg": 128},
}
# By the most rows, then by columns: the shared expert's programs have sums for each row.
GATE_UP_FP4: dict[int, dict[int, Tile]] = {
    1: {
        2048: {"BLOCK_F": 4, "CHUNK": 512, "num_warps": 4, "maxnreg": 80},
        2**31: {"BLOCK_F": 2, "CHUNK": 512, "num_warps": 2, "maxnreg": 128},
    },
    4: {
        2048: {"BLOCK_F": 4, "CHUNK": 512, "num_warps": 4, "maxnreg": 88},
        2**31: {"BLOCK_F": 2, "CHUNK": 512, "num_warps": 2, "maxnreg": 128},
    },
    2**31: {2**31: {"BLOCK_F": 4, "CHUNK": 512, "num_warps": 4, "maxnreg": 128}},
}
# By the most columns of the down matrices of all experts of a row together.
DOWN: dict[int, Tile] = {
    3072: {"BLOCK_D": 8, "CHUNK": 256, "num_warps": 4},
    2**31: {"BLOCK_D": 16, "CHUNK": 256, "num_warps": 16, "maxnreg": 96},
}
DOWN_FP4: dict[int, Tile] = {
    3072: {"BLOCK_D": 8, "CHUNK": 128, "num_warps": 4, "maxnreg": 96},
    2**31: {"BLOCK_D": 8, "CHUNK": 512, "num_warps": 8, "maxnreg": 128},
}


def most_rows(size: int, weight: PlainOrFP4) -> int:
    """How many rows `few_moe` is for."""
    return by_size(FEW_FP4 if isinstance(weight, FP4) else FEW, size)


def _chunk(size: int, most: int, *, fp4: bool) -> int:
    """A number of columns that divides `size`, if a power of two of any use does: of four-bit
    weights fewer than 128 are pieces too small for memory."""
    chunk, useful = size & -size, 128 if fp4 else 32
    return min(most, chunk if chunk >= useful else max(next_power_of_2(size), 8))


def _parts(weight: PlainOrFP4 | None) -> tuple[torch.Tensor | None, ...]:
    """What kernels take of a weight: itself, or blocks, their scales and those of the rows."""
    return (*blocks_of(weight), weight.rows) if isinstance(weight, FP4) else (weight, None, None)


def few_moe(
    y_TD: torch.Tensor,
    gate_up_EGD: PlainOrFP4,
    down_EDF: PlainOrFP4,
    weights_TN: torch.Tensor,
    ids_TN: torch.Tensor,
    shared_gate_up_GD: PlainOrFP4 | None,
    shared_down_DF: PlainOrFP4 | None,
    added_TD: torch.Tensor | None = None,
    *,
    fp32: bool,
    scale: float,
) -> torch.Tensor:
    """`moe` of weights of one kind, which the arguments have been checked for, plus `added_TD`."""
    fp4 = isinstance(down_EDF, FP4)
    (rows, size), count, width = y_TD.shape, ids_TN.shape[1], down_EDF.shape[2]
    shared = 0 if shared_down_DF is None else shared_down_DF.shape[1]
    columns = count * width + shared
    inner_TF, out_TD = y_TD.new_empty(rows, columns), y_TD.new_empty(rows, size)
    sizes = {"SIZE": size, "INNER": width, "SHARED": shared, "COUNT": count}
    tile = by_size(by_size(GATE_UP_FP4, rows) if fp4 else GATE_UP, size)
    blocks = rows * count * cdiv(width, tile["BLOCK_F"])
    _gate_up_kernel[(blocks + cdiv(shared, tile["BLOCK_F"]),)](
        y_TD, *_parts(gate_up_EGD), *_parts(shared_gate_up_GD), ids_TN, inner_TF,
        rows, y_TD.stride(0), **sizes, ROWS=rows if shared else 0, FP32=fp32,
        **tile | {"CHUNK": _chunk(size, tile["CHUNK"], fp4=fp4)}, **pdl(y_TD),
    )  # fmt: skip
    tile = by_size(DOWN_FP4 if fp4 else DOWN, columns)
    chunk, block_n = (
        _chunk(width, tile["CHUNK"], fp4=fp4),
        next_power_of_2(cdiv(columns, width)),
    )
    at_once = tile["num_warps"] * 32 * (BLOCK if fp4 else 8)
    copies = min(max(at_once // (block_n * chunk), 1), tile["BLOCK_D"])
    _down_kernel[(rows * cdiv(size, tile["BLOCK_D"]),)](
        inner_TF, *_parts(down_EDF), *_parts(shared_down_DF), weights_TN, ids_TN, added_TD, out_TD,
        rows, scale, **sizes, SCALED=scale != 1.0, BLOCK_N=block_n,
        COPIES=copies, **tile | {"CHUNK": chunk}, **pdl(y_TD),
    )  # fmt: skip
    return out_TD
