"""NVFP4 experts for some rows each: sorted blocks of 8 rows, weights decoded in registers.

Programs stay: each takes as many tiles of weights, one after the other, and copies what comes next
into a ring of shared memory, whatever unit it belongs to. In Gluon, for a thread must load the very
words that it multiplies. Of 128 columns the four threads that share a row of the matrix units' left
operand have 32 each that lie together, and columns are taken in the order in which they are
decoded; those of x lie in shared memory in that order.
"""

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from limelight.ops import cdiv, is_roomy, next_power_of_2, pdl, processors
from limelight.ops.activation import rounded_swiglu
from limelight.ops.fp4 import FP4
from limelight.ops.fp4_codes import LEFT, decoded_pairs
from limelight.ops.fp4_few import few_parts

# Rows of a block, and the columns that are decoded together.
BLOCK_M = 8
SPAN = gl.constexpr(128)
_rounded_swiglu = gluon.jit(rounded_swiglu.fn)
_decoded_pairs = gluon.jit(decoded_pairs.fn)


@gluon.constexpr_function
def _over_warps(bases, warps):
    """What of the bases is for the warps, and for a thread's registers; [0, 0]: the same again."""
    count = warps.bit_length() - 1
    return (bases + [[0] * len(bases[0])] * count)[:count], bases[count:]


@gluon.constexpr_function
def _row_bases(rows, warps):
    """Warps, then the products of each, along rows in pieces of 16."""
    return _over_warps([[16 << i, 0] for i in range((rows // 16).bit_length() - 1)], warps)


@gluon.constexpr_function
def _word_layout(rows, warps):
    """Words [rows, 16] of a chunk: four in a thread, four threads a row."""
    along, held = _row_bases(rows, warps)
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [8, 0], *held],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=along,
        block_bases=[],
        shape=[rows, 16],
    )


@gluon.constexpr_function
def _scale_layout(rows, warps):
    """The scales of two blocks each, [rows, 4]: one in a thread."""
    along, held = _row_bases(rows, warps)
    return gl.DistributedLinearLayout(
        reg_bases=[[8, 0], *held],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=along,
        block_bases=[],
        shape=[rows, 4],
    )


@gluon.constexpr_function
def _x_layout(chunks, warps):
    """Chunks of x, [8, 128 chunks], as they are loaded: eight neighbours in a thread."""
    pieces = [[0, 8], [0, 16]] + [[0, 128 << i] for i in range(chunks.bit_length() - 1)]
    along, held = _over_warps(pieces, warps)
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], *held],
        lane_bases=[[0, 32], [0, 64], [1, 0], [2, 0], [4, 0]],
        warp_bases=along,
        block_bases=[],
        shape=[8, 128 * chunks],
    )


@gluon.constexpr_function
def _operand_layout(warps):
    """One of them as [4, 8, 32] in the order of the right operand, all of it in every warp."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0]],
        lane_bases=[[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        warp_bases=[[0, 0, 0]] * (warps.bit_length() - 1),
        block_bases=[],
        shape=[4, 8, 32],
    )


@gluon.constexpr_function
def _copied(rows, columns, each, warps):
    """How rows of a stage are copied: `each` neighbours in a thread, a line of memory by as many
    threads as it takes."""
    across = min(columns // each, 32)
    return gl.BlockedLayout([1, each], [32 // across, across], [warps, 1], [1, 0])


@gluon.jit
def _row_of(first, i, N: gl.constexpr, GATED: gl.constexpr):
    """The i-th row of a weight's tile from the `first` output on; of a gated weight [gate, up] come
    8 of the gate's, then 8 of up's."""
    row = first + i
    if GATED:
        row = first + i // 16 * 8 + i % 8 + i // 8 % 2 * N
    return row


# Of the two E4M3 in an int32 each twice, as BF16 times 2^118.
TWO_SCALES = gl.constexpr(
    """
    {
    .reg .b32 a, c, z;
    mov.b32 z, 0x80008000; mov.b32 c, 0x7B007B00;
    prmt.b32 a, $2, 0, 0x4140; shl.b32 a, a, 4;
    fma.rn.bf16x2 a, a, c, z; fma.rn.bf16x2 a, a, c, z;
    prmt.b32 $0, a, a, 0x1010; prmt.b32 $1, a, a, 0x3232;
    }
    """
)


@gluon.jit
def _decoded(word, pair):
    """Weights [..., 2, 2, 2] of each word [...]; see `fp4_codes.py`."""
    v0, v1, v2, v3, v4, v5, v6, v7 = _decoded_pairs(word, pair)
    even = gl.join(gl.join(v0, v4), gl.join(v2, v6))
    odd = gl.join(gl.join(v1, v5), gl.join(v3, v7))
    return gl.join(even, odd)


@gluon.jit
def _left(fetched, OPERAND: gl.constexpr):
    """The weights of a chunk, LEFT times too small, as the left operand."""
    word_NX, scale_NQ = fetched
    N: gl.constexpr = word_NX.shape[0]
    low_NQ, high_NQ = gl.inline_asm_elementwise(
        TWO_SCALES,
        "=r,=r,r",
        [scale_NQ.to(gl.int32) & 0xFFFF],
        (gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    # Each is for two words, and for a thread's four.
    pair = gl.join(gl.join(low_NQ, low_NQ), gl.join(high_NQ, high_NQ))
    pair_NX = gl.reshape(gl.permute(pair, [0, 1, 3, 2]), [N, 16])
    weight = _decoded(word_NX, gl.convert_layout(pair_NX, word_NX.type.layout))
    # [N, t, i, e, p, h] -> [N, i, p, h, t, e]
    weight = gl.permute(gl.reshape(weight, [N, 4, 4, 2, 2, 2]), [0, 2, 4, 5, 1, 3])
    return gl.convert_layout(gl.reshape(weight, [N, 128]), OPERAND)


@gluon.jit
def _right(held, OPERAND: gl.constexpr):
    """A chunk of x as the right operand."""
    x = gl.reshape(held.load(_operand_layout(gl.num_warps())), [4, 8, 4, 2, 2, 2])
    # [i, g, t, p, h, e] -> [i, p, h, t, e, g]
    return gl.convert_layout(gl.reshape(gl.permute(x, [0, 3, 4, 2, 5, 1]), [128, 8]), OPERAND)


@gluon.jit
def _rows(rows, start, valid, layout: gl.constexpr):
    """The `valid` ones of 8 rows from the `start` on: what `rows` has there, if given."""
    m = gl.arange(0, 8, layout=layout)
    row_M = start + m
    if rows is not None:
        row_M = gl.load(rows + row_M, mask=m < valid, other=0)
    return row_M, m < valid


@gluon.jit
def _hold(
    x, stride_x, rows, start, valid, held, K: gl.constexpr, COUNT: gl.constexpr,
    TOGETHER: gl.constexpr,
):  # fmt: skip
    """8 rows of x into shared memory, TOGETHER pieces of 128 columns at a time."""
    PIECES: gl.constexpr = held.shape[0]
    LAYOUT: gl.constexpr = _x_layout(TOGETHER, gl.num_warps())
    row_M, valid_M = _rows(rows, start, valid, gl.SliceLayout(1, LAYOUT))
    k_K = gl.arange(0, TOGETHER * SPAN, layout=gl.SliceLayout(0, LAYOUT))
    at_MK = x + (row_M // COUNT).to(gl.int64)[:, None] * stride_x + k_K[None, :]
    turns = held._reinterpret(held.dtype, [PIECES // TOGETHER, 4 * TOGETHER, 8, 32], held.layout)
    for turn in range(PIECES // TOGETHER):
        k = turn * (TOGETHER * SPAN)
        tile = gl.load(at_MK + k, mask=valid_M[:, None] & (k + k_K < K)[None, :], other=0.0)
        # [g, c, t, i, e, p, h] -> [c, i, g, t, p, h, e]
        tile = gl.permute(gl.reshape(tile, [8, TOGETHER, 4, 4, 2, 2, 2]), [1, 3, 0, 2, 5, 6, 4])
        turns.index(turn).store(gl.reshape(tile, [4 * TOGETHER, 8, 32]))


@gluon.jit
def _factors(
    factors, first, N: gl.constexpr, GATED: gl.constexpr, BLOCK_N: gl.constexpr,
    SUMS: gl.constexpr,
):  # fmt: skip
    """What scales the sums of a tile's rows."""
    i_N = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, SUMS))
    return gl.load(factors + _row_of(first, i_N, N, GATED))


@gluon.jit
def _finish(
    sum_NM, factor_N, out, row_M, valid, first, N: gl.constexpr, GATED: gl.constexpr,
    FP32: gl.constexpr,
):  # fmt: skip
    """Scale the sums of rows from the `first` output on, and store them or their SwiGLU."""
    BLOCK_N: gl.constexpr = sum_NM.shape[0]
    OUTPUTS: gl.constexpr = BLOCK_N // (2 if GATED else 1)
    y_NM = sum_NM * (factor_N * LEFT)[:, None]
    dtype: gl.constexpr = out.dtype.element_ty
    if GATED:
        y_NMX = gl.permute(gl.reshape(y_NM, [OUTPUTS // 8, 2, 8, 8]), [0, 2, 3, 1])
        gate_NM, up_NM = gl.split(gl.reshape(y_NMX, [OUTPUTS, 8, 2]))
        y_NM = _rounded_swiglu(gate_NM, up_NM, FP32, dtype)
    layout: gl.constexpr = y_NM.type.layout
    row_M = gl.convert_layout(row_M, gl.SliceLayout(0, layout))
    valid_M = gl.arange(0, 8, layout=gl.SliceLayout(0, layout)) < valid
    n_N = first + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, layout))
    at_NM = out + row_M.to(gl.int64)[None, :] * N + n_N[:, None]
    gl.store(at_NM, y_NM.to(dtype), mask=valid_M[None, :])


@gluon.jit
def _copy(
    ring, words, scales, places, row, chunk, wanted, K: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """Bring a chunk of the tile that begins at a row, its words and scales, into a stage of the
    ring, if it is wanted."""
    held, held_scales = ring
    at_NX, x_X, at_NQ, q_Q = places
    words += row * (K // 8) + chunk * (WIDTH // 8)
    scales += row * (K // 32) + chunk * (WIDTH // 32)
    inside_NX, inside_NQ = wanted, wanted
    if K % WIDTH != 0:
        inside_NX = inside_NX & (chunk * (WIDTH // 8) + x_X < K // 8)[None, :]
        inside_NQ = inside_NQ & (chunk * (WIDTH // 32) + q_Q < K // 32)[None, :]
    async_copy.async_copy_global_to_shared(held, words + at_NX, mask=inside_NX)
    async_copy.async_copy_global_to_shared(held_scales, scales + at_NQ, mask=inside_NQ)
    async_copy.commit_group()


@gluon.jit
def _places(
    N: gl.constexpr, K: gl.constexpr, GATED: gl.constexpr, BLOCK_N: gl.constexpr,
    WIDTH: gl.constexpr,
):  # fmt: skip
    """Where words and scales of a weight's first chunk lie, and which columns they are."""
    WORDS: gl.constexpr = _copied(BLOCK_N, WIDTH // 8, 4, gl.num_warps())
    # 16 bytes at once, of rows that begin at a multiple of these.
    SCALES: gl.constexpr = _copied(
        BLOCK_N, WIDTH // 32, 8 if K % 256 == 0 and WIDTH % 256 == 0 else 2, gl.num_warps()
    )
    row_N = _row_of(0, gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, WORDS)), N, GATED)
    x_X = gl.arange(0, WIDTH // 8, layout=gl.SliceLayout(0, WORDS))
    at_NX = row_N[:, None] * (K // 8) + x_X[None, :]
    row_N = _row_of(0, gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, SCALES)), N, GATED)
    q_Q = gl.arange(0, WIDTH // 32, layout=gl.SliceLayout(0, SCALES))
    at_NQ = row_N[:, None] * (K // 32) + q_Q[None, :]
    return at_NX, x_X, at_NQ, q_Q


@gluon.jit
def _block_of(blocks, place, rows, SHARED: gl.constexpr):
    """Expert, first row and number of rows of the block that comes at a place; none past the last.

    Of the shared expert blocks follow each other; others are those that are taken of a list.
    """
    if SHARED:
        e, start, valid = place * 0, place * 8, gl.minimum(rows - place * 8, 8)
    else:
        block_B, order_B, b_B = blocks
        wanted_B = (block_B > 0) & (order_B == place)
        found = gl.sum(gl.where(wanted_B, b_B * 2**17 + block_B, 0), axis=0)
        e, start, valid = found % 2**17 // 256, found // 2**17 * 8, found % 256
    return e, start, valid


@gluon.jit
def _ask(
    ring, stage, cursor, weight, places, blocks, rows, end,
    N: gl.constexpr, K: gl.constexpr, GATED: gl.constexpr, SHARED: gl.constexpr,
    BLOCK_N: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """Have the chunk at the cursor, a unit, a chunk of it and its expert, copied into a stage if it
    comes before the `end`: the cursor behind it."""
    CHUNKS: gl.constexpr = (K + WIDTH - 1) // WIDTH
    ROWS: gl.constexpr = N * (2 if GATED else 1)
    OUTPUTS: gl.constexpr = BLOCK_N // (2 if GATED else 1)
    TILES: gl.constexpr = N // OUTPUTS
    unit, chunk, e = cursor
    _copy(
        (ring[0].index(stage), ring[1].index(stage)), weight[0], weight[1], places,
        e.to(gl.int64) * ROWS + unit % TILES * OUTPUTS, chunk, unit < end, K, WIDTH,
    )  # fmt: skip
    chunk += 1
    if chunk == CHUNKS:
        chunk = 0
        unit += 1
        if unit % TILES == 0:
            e, _, _ = _block_of(blocks, unit // TILES, rows, SHARED)
    return unit, chunk, e


@gluon.jit
def _multiplied(
    sum_NM, ring, stage, held, chunk, BLOCK_N: gl.constexpr, WIDTH: gl.constexpr,
    SUMS: gl.constexpr,
):  # fmt: skip
    """The sums, plus those of a stage's columns."""
    PIECES: gl.constexpr = WIDTH // SPAN
    WORDS: gl.constexpr = _word_layout(BLOCK_N, gl.num_warps())
    SCALES: gl.constexpr = _scale_layout(BLOCK_N, gl.num_warps())
    for p in gl.static_range(PIECES):
        word_NX = ring[0].index(stage).slice(p * 16, 16, 1).load(WORDS)
        scale_NQ = ring[1].index(stage).slice(p * 4, 4, 1).load(SCALES)
        left = _left((word_NX, scale_NQ), gl.DotOperandLayout(0, SUMS, 2))
        right = _right(held.index(chunk * PIECES + p), gl.DotOperandLayout(1, SUMS, 2))
        sum_NM = mma_v2(left, right, sum_NM)
    return sum_NM


@gluon.jit
def _stream(
    x, stride_x, words, scales, factors, out, block_rows, blocks, rows, program, programs, units,
    N: gl.constexpr, K: gl.constexpr, COUNT: gl.constexpr, GATED: gl.constexpr,
    FP32: gl.constexpr, SHARED: gl.constexpr, BLOCK_N: gl.constexpr, WIDTH: gl.constexpr,
    STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A program's share of the units, which are tiles of BLOCK_N rows by blocks of 8 rows of x.

    Weights come through a ring of STAGES stages, WIDTH columns each, without regard to where a unit
    ends; x is held while the block stays the same.
    """
    CHUNKS: gl.constexpr = (K + WIDTH - 1) // WIDTH
    ROWS: gl.constexpr = N * (2 if GATED else 1)
    OUTPUTS: gl.constexpr = BLOCK_N // (2 if GATED else 1)
    TILES: gl.constexpr = N // OUTPUTS
    PIECES: gl.constexpr = WIDTH // SPAN
    # The power of two that divides them, up to 4.
    TOGETHER: gl.constexpr = CHUNKS * PIECES & -(CHUNKS * PIECES) & 3 or 4
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [gl.num_warps(), 1], [16, 8])
    # Of two rows 64 bytes each, which a warp reads at once, lie in different banks.
    words_held = gl.allocate_shared_memory(
        gl.int32, [STAGES, BLOCK_N, WIDTH // 8], gl.SwizzledSharedLayout(16, 1, 2, [1, 0])
    )
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    scales_held = gl.allocate_shared_memory(gl.int16, [STAGES, BLOCK_N, WIDTH // 32], PLAIN)
    ring = (words_held, scales_held)
    held = gl.allocate_shared_memory(
        x.dtype.element_ty, [CHUNKS * PIECES, 4, 8, 32],
        gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]),
    )  # fmt: skip
    unit, end = program * units // programs, (program + 1) * units // programs
    places = _places(N, K, GATED, BLOCK_N, WIDTH)
    e, start, valid = _block_of(blocks, unit // TILES, rows, SHARED)
    cursor = (unit, unit * 0, e)
    for s in gl.static_range(STAGES - 1):
        cursor = _ask(
            ring, s, cursor, (words, scales), places, blocks, rows, end,
            N, K, GATED, SHARED, BLOCK_N, WIDTH,
        )  # fmt: skip
    if PDL and not GATED:
        tl.extra.cuda.gdc_wait()
    stage, place = 0, unit // TILES - 1
    row_M, valid_M = _rows(None, 0, 0, gl.SliceLayout(0, SUMS))
    while unit < end:
        if unit // TILES != place:
            place = unit // TILES
            e, start, valid = _block_of(blocks, place, rows, SHARED)
            row_M, valid_M = _rows(block_rows, start, valid, gl.SliceLayout(0, SUMS))
            gl.thread_barrier()
            _hold(x, stride_x, block_rows, start, valid, held, K, COUNT, TOGETHER)
        first = unit % TILES * OUTPUTS
        factor_N = _factors(factors + e * ROWS, first, N, GATED, BLOCK_N, SUMS)
        sum_NM = gl.zeros([BLOCK_N, 8], gl.float32, layout=SUMS)
        for chunk in range(CHUNKS):
            async_copy.wait_group(STAGES - 2)
            gl.thread_barrier()
            sum_NM = _multiplied(sum_NM, ring, stage, held, chunk, BLOCK_N, WIDTH, SUMS)
            cursor = _ask(
                ring, gl.where(stage == 0, STAGES, stage) - 1, cursor, (words, scales), places,
                blocks, rows, end, N, K, GATED, SHARED, BLOCK_N, WIDTH,
            )  # fmt: skip
            stage = gl.where(stage == STAGES - 1, 0, stage + 1)
        _finish(sum_NM, factor_N, out, row_M, valid, first, N, GATED, FP32)
        unit += 1
    async_copy.wait_group(0)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit(do_not_specialize=["rows", "most"])
def _grouped_fp4_few_kernel(
    x, shared_x, words, scales, factors, shared_words, shared_scales, shared_factors,
    block_rows, blocks, out, shared_out, rows, most, stride_x, stride_shared,
    N: gl.constexpr, K: gl.constexpr, SHARED_N: gl.constexpr, SHARED_K: gl.constexpr,
    COUNT: gl.constexpr, GATED: gl.constexpr, FP32: gl.constexpr, BLOCKS: gl.constexpr,
    BLOCK_N: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Blocks of up to 8 rows by BLOCK_N rows of the weight, units, as many for each program; COUNT
    rows of `out` share one of x.

    Gate and up let down begin when they have waited, so `blocks` are whole whenever it reads them.
    """
    OUTPUTS: gl.constexpr = BLOCK_N // (2 if GATED else 1)
    if PDL and GATED:
        tl.extra.cuda.gdc_wait()
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    LIST: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    b_B = gl.arange(0, BLOCKS, layout=LIST)
    # A line of L1 may be older than the blocks.
    block_B = gl.load(blocks + b_B, mask=b_B < most, other=0, cache_modifier=".cg")
    taken_B = (block_B > 0).to(gl.int32)
    listed = (block_B, gl.associative_scan(taken_B, 0, _add) - 1, b_B)
    units = gl.sum(taken_B, axis=0) * (N // OUTPUTS)
    program, programs = gl.program_id(0), gl.num_programs(0)
    shared_units, shared_programs = 0, 0
    if SHARED_N:
        # So many of the programs as it has of the columns.
        shared_units = (rows + 7) // 8 * (SHARED_N // OUTPUTS)
        columns = shared_units * (SHARED_K // 32)
        shared_programs = gl.cdiv(programs * columns, columns + units * (K // 32))
    if program < shared_programs:
        if SHARED_N:
            _stream(
                shared_x, stride_shared, shared_words, shared_scales, shared_factors, shared_out,
                None, None, rows, program, shared_programs, shared_units,
                SHARED_N, SHARED_K, 1, GATED, FP32, True, BLOCK_N, WIDTH, STAGES, PDL,
            )  # fmt: skip
    else:
        _stream(
            x, stride_x, words, scales, factors, out, block_rows, listed, rows,
            program - shared_programs, programs - shared_programs, units,
            N, K, COUNT, GATED, FP32, False, BLOCK_N, WIDTH, STAGES, PDL,
        )  # fmt: skip


# What decoded weights are multiplied with.
DTYPES = (torch.bfloat16,)
# Up to so many pairs of an expert on average: with more, blocks of 64 rows decode less often.
MOST_EACH = 8
# Rows of a tile, and stages of the ring.
BLOCK_N, STAGES = 64, 3
# Columns of a stage: the first that divide a row, or the last; of these no more than a WIDE part of
# the shared memory leaves room for, where x takes much of it.
WIDTHS, WIDE = (512, 256, 128), 0.28
# Bytes of shared memory that programs share, by the room of a device; each takes some of its own.
ROOM, SMALL_ROOM, OWN = 232_448, 101_376, 1024
# The most programs that a multiprocessor runs at a time: there are no more, and they stay.
MOST_PROGRAMS = 3


def _room(tensor: torch.Tensor) -> int:
    return ROOM if is_roomy(tensor) else SMALL_ROOM


def _width(room: int, *columns: int) -> int:
    """Columns of a stage, for weights that have so many."""
    x = 16 * max(columns)
    widths = WIDTHS[(x > WIDE * room) + (x > 2 * WIDE * room) :]
    return next((w for w in widths if not any(k % w for k in columns)), WIDTHS[-1])


def _bytes(room: int, *columns: int) -> int:
    """Shared memory of a program: x, and the ring of words and scales."""
    width = _width(room, *columns)
    return cdiv(max(columns), width) * width * 16 + STAGES * BLOCK_N * width * 9 // 16 + OWN


def fits(y_TD: torch.Tensor, down: tuple[FP4, FP4 | None]) -> bool:
    """Whether weights are decoded to the type of these rows, have whole tiles of rows, and so whole
    words of scales, and a program has room for its rows of x."""
    columns = [weight.shape[-1] for weight in down if weight is not None]
    whole = all(size % BLOCK_N == 0 for size in (y_TD.shape[1], *columns))
    room = _room(y_TD)
    needed = max(_bytes(room, y_TD.shape[1]), _bytes(room, *columns))
    return y_TD.dtype in DTYPES and whole and needed <= room


def _parts(weight: FP4 | None) -> tuple[torch.Tensor | None, ...]:
    return (None, None, None) if weight is None else few_parts(weight)


def some_each(
    y_TD: torch.Tensor,
    gate_up: tuple[FP4, FP4 | None],
    down: tuple[FP4, FP4 | None],
    blocks: tuple[torch.Tensor, torch.Tensor],
    count: int,
    fp32: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Each pair's output and the shared expert's; `blocks` are of BLOCK_M rows."""
    (rows, size), width = y_TD.shape, down[0].shape[-1]
    shared = 0 if down[1] is None else down[1].shape[-1]
    inner_PF, shared_TF = y_TD.new_empty(rows * count, width), y_TD.new_empty(rows, shared)
    out_PD = y_TD.new_empty(rows * count, size)
    shared_TD = y_TD.new_empty(rows, size) if shared else None
    most = len(blocks[1])

    def launch(x, shared_x, weights, out, shared_out, **sizes: int) -> None:
        columns = [sizes["K"], sizes["SHARED_K"] or sizes["K"]]
        each = min(_room(x) // _bytes(_room(x), *columns), MOST_PROGRAMS)
        _grouped_fp4_few_kernel[(processors(x.device) * each,)](
            x, shared_x, *_parts(weights[0]), *_parts(weights[1]), *blocks, out, shared_out,
            rows, most, x.stride(0), shared_x.stride(0), **sizes, FP32=fp32,
            BLOCKS=max(next_power_of_2(most), 128), BLOCK_N=BLOCK_N,
            WIDTH=_width(_room(x), *columns), STAGES=STAGES, num_warps=4, **pdl(y_TD),
        )  # fmt: skip

    launch(
        y_TD, y_TD, gate_up, inner_PF, shared_TF,
        N=width, K=size, SHARED_N=shared, SHARED_K=size if shared else 0, COUNT=count, GATED=True,
    )  # fmt: skip
    launch(
        inner_PF, shared_TF, down, out_PD, shared_TD,
        N=size, K=width, SHARED_N=size if shared else 0, SHARED_K=shared, COUNT=1, GATED=False,
    )  # fmt: skip
    return out_PD, shared_TD
