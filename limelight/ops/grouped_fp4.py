"""NVFP4 experts for some rows each: sorted blocks of 8 rows, weights straight into registers.

In Gluon, for a thread must load the very words that it multiplies. Of 128 columns, a chunk, the
four threads that share a row of the matrix units' left operand have 32 each that lie together, and
columns are taken in the order in which they are decoded; those of x lie in shared memory in that
order. What a thread will decode next is under way while it decodes.
"""

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from limelight.ops import by_size, cdiv, pdl
from limelight.ops.activation import rounded_swiglu
from limelight.ops.fp4 import BLOCK, DECODED_PAIRS, FP4, LEFT
from limelight.ops.fp4_few import few_parts

# Rows of a block, and the columns of a chunk.
BLOCK_M = 8
SPAN = gl.constexpr(128)
# Chunks of x that a program holds, of all of its rows: 32 KB.
MOST_HELD = 16
_rounded_swiglu = gluon.jit(rounded_swiglu.fn)


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
def _chunks(columns, ahead):
    """Chunks of a row, a multiple of those that are under way."""
    return -(-columns // (128 * ahead)) * ahead


@gluon.constexpr_function
def _held(chunks):
    """Chunks of x that a program holds at a time, a power of two: all of them, else few, for they
    come through registers while weights are under way."""
    return 1 << (chunks - 1).bit_length() if chunks <= MOST_HELD else MOST_HELD // 2


@gluon.jit
def _row_of(first, i, N: gl.constexpr, GATED: gl.constexpr):
    """The i-th row of a weight's tile from the `first` output on, and its output; of a gated weight
    [gate, up] come 8 of the gate's, then 8 of up's."""
    row, n = first + i, first + i
    if GATED:
        n = first + i // 16 * 8 + i % 8
        row = n + i // 8 % 2 * N
    return row, n


@gluon.jit
def _places(
    first, N: gl.constexpr, K: gl.constexpr, GATED: gl.constexpr, BLOCK_N: gl.constexpr
):  # fmt: skip
    """Where words and scales of a tile's first chunk lie, and the outputs of their rows."""
    WORDS: gl.constexpr = _word_layout(BLOCK_N, gl.num_warps())
    SCALES: gl.constexpr = _scale_layout(BLOCK_N, gl.num_warps())
    row_N, n_N = _row_of(first, gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, WORDS)), N, GATED)
    x_X = gl.arange(0, 16, layout=gl.SliceLayout(0, WORDS))
    at_NX = row_N[:, None] * (K // 8) + x_X[None, :]
    row_N, m_N = _row_of(first, gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, SCALES)), N, GATED)
    q_Q = gl.arange(0, 4, layout=gl.SliceLayout(0, SCALES))
    at_NQ = row_N[:, None] * (K // 32) + q_Q[None, :]
    return at_NX, n_N, x_X, at_NQ, m_N, q_Q


@gluon.jit
def _fetch(
    words, scales, places, index, N: gl.constexpr, K: gl.constexpr, GATED: gl.constexpr,
    BLOCK_N: gl.constexpr, TIMES: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """Words and scales of the index-th chunk of TIMES tiles; past the last chunk it again."""
    CHUNKS: gl.constexpr = _chunks(K, AHEAD)
    OUTPUTS: gl.constexpr = BLOCK_N // (2 if GATED else 1)
    EVEN: gl.constexpr = K == CHUNKS * SPAN and N % (OUTPUTS * TIMES) == 0
    index = gl.minimum(index, CHUNKS * TIMES - 1)
    later, chunk = index // CHUNKS * OUTPUTS, index % CHUNKS
    at_NX, n_N, x_X, at_NQ, m_N, q_Q = places
    words += later * (K // 8) + chunk * 16
    scales += later * (K // 32) + chunk * 4
    if EVEN:
        word_NX, scale_NQ = gl.load(words + at_NX), gl.load(scales + at_NQ)
    else:
        inside_NX = (later + n_N < N)[:, None] & (chunk * 16 + x_X < K // 8)[None, :]
        inside_NQ = (later + m_N < N)[:, None] & (chunk * 4 + q_Q < K // 32)[None, :]
        word_NX = gl.load(words + at_NX, mask=inside_NX, other=0)
        scale_NQ = gl.load(scales + at_NQ, mask=inside_NQ, other=0)
    return word_NX, scale_NQ


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
    """Weights [..., 2, 2, 2] of each word [...]; see `fp4.py`."""
    v0, v1, v2, v3, v4, v5, v6, v7 = gl.inline_asm_elementwise(
        DECODED_PAIRS,
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
        [word, pair],
        (gl.bfloat16,) * 8,
        is_pure=True,
        pack=1,
    )
    even = gl.join(gl.join(v0, v4), gl.join(v2, v6))
    odd = gl.join(gl.join(v1, v5), gl.join(v3, v7))
    return gl.join(even, odd)


@gluon.jit
def _left(fetched, OPERAND: gl.constexpr):
    """The weights of a chunk, LEFT_OF_WEIGHTS too small, as the left operand."""
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
    x, stride_x, rows, start, valid, held, first, K: gl.constexpr, COUNT: gl.constexpr
):  # fmt: skip
    """Chunks of 8 rows of x from the `first` on into shared memory, which has as many."""
    CHUNKS: gl.constexpr = held.shape[0]
    LAYOUT: gl.constexpr = _x_layout(CHUNKS, gl.num_warps())
    row_M, valid_M = _rows(rows, start, valid, gl.SliceLayout(1, LAYOUT))
    k_K = first * SPAN + gl.arange(0, CHUNKS * SPAN, layout=gl.SliceLayout(0, LAYOUT))
    at_MK = x + (row_M // COUNT).to(gl.int64)[:, None] * stride_x + k_K[None, :]
    tile = gl.load(at_MK, mask=valid_M[:, None] & (k_K < K)[None, :], other=0.0)
    # [g, c, t, i, e, p, h] -> [c, i, g, t, p, h, e]
    tile = gl.permute(gl.reshape(tile, [8, CHUNKS, 4, 4, 2, 2, 2]), [1, 3, 0, 2, 5, 6, 4])
    pieces = held._reinterpret(held.dtype, [CHUNKS * 4, 8, 32], held.layout)
    pieces.store(gl.reshape(tile, [CHUNKS * 4, 8, 32]))


@gluon.jit
def _finish(
    sum_NM, factors, out, rows, start, valid, first, N: gl.constexpr, GATED: gl.constexpr,
    FP32: gl.constexpr,
):  # fmt: skip
    """Scale the sums of rows from the `first` output on, and store them or their SwiGLU."""
    BLOCK_N: gl.constexpr = sum_NM.shape[0]
    OUTPUTS: gl.constexpr = BLOCK_N // (2 if GATED else 1)
    i_N = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, sum_NM.type.layout))
    row_N, n_N = _row_of(first, i_N, N, GATED)
    factor_N = gl.load(factors + row_N, mask=n_N < N, other=0.0) * LEFT
    y_NM = sum_NM * factor_N[:, None]
    dtype: gl.constexpr = out.dtype.element_ty
    if GATED:
        y_NMX = gl.permute(gl.reshape(y_NM, [OUTPUTS // 8, 2, 8, 8]), [0, 2, 3, 1])
        gate_NM, up_NM = gl.split(gl.reshape(y_NMX, [OUTPUTS, 8, 2]))
        y_NM = _rounded_swiglu(gate_NM, up_NM, FP32, dtype)
    row_M, valid_M = _rows(rows, start, valid, gl.SliceLayout(0, y_NM.type.layout))
    n_N = first + gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, y_NM.type.layout))
    at_NM = out + row_M.to(gl.int64)[None, :] * N + n_N[:, None]
    gl.store(at_NM, y_NM.to(dtype), mask=(n_N < N)[:, None] & valid_M[None, :])


@gluon.jit
def _tiles(
    x, stride_x, words, scales, factors, out, rows, start, valid, first,
    N: gl.constexpr, K: gl.constexpr, COUNT: gl.constexpr, GATED: gl.constexpr,
    FP32: gl.constexpr, BLOCK_N: gl.constexpr, TIMES: gl.constexpr, AHEAD: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """TIMES tiles of BLOCK_N rows of a weight, from that of the `first` output on, by a block of 8
    rows."""
    CHUNKS: gl.constexpr = _chunks(K, AHEAD)
    OUTPUTS: gl.constexpr = BLOCK_N // (2 if GATED else 1)
    PIECE: gl.constexpr = _held(CHUNKS)
    PIECES: gl.constexpr = (CHUNKS + PIECE - 1) // PIECE
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [gl.num_warps(), 1], [16, 8])
    places = _places(first, N, K, GATED, BLOCK_N)
    ahead = ()
    for a in gl.static_range(AHEAD):
        next_ = _fetch(words, scales, places, a, N, K, GATED, BLOCK_N, TIMES, AHEAD)
        ahead = ahead + (next_,)  # type: ignore[assignment]
    if PDL:
        tl.extra.cuda.gdc_wait()
        if GATED:
            tl.extra.cuda.gdc_launch_dependents()
    held = gl.allocate_shared_memory(
        x.dtype.element_ty, [PIECE, 4, 8, 32], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    )
    if PIECES == 1:
        _hold(x, stride_x, rows, start, valid, held, 0, K, COUNT)
        # Here, or else it comes to stand within the loop.
        gl.thread_barrier()
    for tile in range(TIMES):
        sum_NM = gl.zeros([BLOCK_N, 8], gl.float32, layout=SUMS)
        for piece in range(PIECES):
            if PIECES > 1:
                _hold(x, stride_x, rows, start, valid, held, piece * PIECE, K, COUNT)
                gl.thread_barrier()
            for chunk in range(0, gl.minimum(PIECE, CHUNKS - piece * PIECE), AHEAD):
                later = ()
                for a in gl.static_range(AHEAD):
                    index = tile * CHUNKS + piece * PIECE + chunk + a
                    next_ = _fetch(
                        words, scales, places, index + AHEAD, N, K, GATED, BLOCK_N, TIMES, AHEAD
                    )
                    later = later + (next_,)  # type: ignore[assignment]
                    left = _left(ahead[a], gl.DotOperandLayout(0, SUMS, 2))
                    right = _right(held.index(chunk + a), gl.DotOperandLayout(1, SUMS, 2))
                    sum_NM = mma_v2(left, right, sum_NM)
                ahead = later
        _finish(sum_NM, factors, out, rows, start, valid, first + tile * OUTPUTS, N, GATED, FP32)


@gluon.jit(do_not_specialize=["rows"])
def _grouped_fp4_few_kernel(
    x, shared_x, words, scales, factors, shared_words, shared_scales, shared_factors,
    block_rows, blocks, out, shared_out, rows, stride_x, stride_shared,
    N: gl.constexpr, K: gl.constexpr, SHARED_N: gl.constexpr, SHARED_K: gl.constexpr,
    COUNT: gl.constexpr, GATED: gl.constexpr, FP32: gl.constexpr, BLOCK_N: gl.constexpr,
    TIMES: gl.constexpr, AHEAD: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """A block of up to 8 rows by TIMES tiles of BLOCK_N rows of the weight; COUNT rows of `out`
    share one of x.

    Gate and up let down begin when they have waited, so `blocks` are whole whenever it reads them.
    """
    KINDS: gl.constexpr = 2 if GATED else 1
    OUTPUTS: gl.constexpr = BLOCK_N * TIMES // KINDS
    SHARED_TILES: gl.constexpr = (SHARED_N + OUTPUTS - 1) // OUTPUTS
    TILES: gl.constexpr = (N + OUTPUTS - 1) // OUTPUTS
    program = gl.program_id(0)
    shared_programs = (rows + 7) // 8 * SHARED_TILES
    if PDL and not GATED:
        tl.extra.cuda.gdc_launch_dependents()
    if program < shared_programs:
        if SHARED_N:
            start = program // SHARED_TILES * 8
            _tiles(
                shared_x, stride_shared, shared_words, shared_scales, shared_factors, shared_out,
                None, start, rows - start, program % SHARED_TILES * OUTPUTS,
                SHARED_N, SHARED_K, 1, GATED, FP32, BLOCK_N, TIMES, AHEAD, PDL,
            )  # fmt: skip
    else:
        program -= shared_programs
        if PDL and GATED:
            tl.extra.cuda.gdc_wait()
        # A line of L1 may be older than the blocks.
        block = gl.load(blocks + program // TILES, cache_modifier=".cg")
        e, valid = (block // 256).to(gl.int64) * (KINDS * N), block % 256
        if valid > 0:
            _tiles(
                x, stride_x, words + e * (K // 8), scales + e * (K // 32), factors + e, out,
                block_rows, program // TILES * 8, valid, program % TILES * OUTPUTS,
                N, K, COUNT, GATED, FP32, BLOCK_N, TIMES, AHEAD, PDL,
            )  # fmt: skip


# What decoded weights are multiplied with.
DTYPES = (torch.bfloat16,)
# Up to so many pairs of an expert on average: with more, blocks of 64 rows decode less often.
MOST_EACH = 8
Tile = dict[str, int]
# Tiles of gate and up, and of down, by the most pairs: the best ones within a whole step, which are
# not the best alone.
TILES: dict[int, tuple[Tile, Tile]] = {
    256: (
        {"BLOCK_N": 64, "TIMES": 1, "AHEAD": 4, "num_warps": 4, "maxnreg": 128},
        {"BLOCK_N": 64, "TIMES": 1, "AHEAD": 4, "num_warps": 4},
    ),
    2**31: (
        {"BLOCK_N": 128, "TIMES": 1, "AHEAD": 2, "num_warps": 4, "maxnreg": 160},
        {"BLOCK_N": 64, "TIMES": 2, "AHEAD": 2, "num_warps": 4},
    ),
}


def fits(y_TD: torch.Tensor, down: tuple[FP4, FP4 | None]) -> bool:
    """Whether weights are decoded to the type of these rows, and have whole pairs of blocks."""
    sizes = [size for weight in down if weight is not None for size in weight.shape[-2:]]
    return y_TD.dtype in DTYPES and all(size % (2 * BLOCK) == 0 for size in sizes)


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
    tiles, most, shared_blocks = by_size(TILES, rows * count), len(blocks[1]), cdiv(rows, BLOCK_M)

    def launch(tile: Tile, x, shared_x, weights, out, shared_out, **sizes: int) -> None:
        outputs = tile["BLOCK_N"] * tile["TIMES"] // (2 if sizes["GATED"] else 1)
        programs, shared_programs = (cdiv(sizes[n], outputs) for n in ("N", "SHARED_N"))
        _grouped_fp4_few_kernel[(most * programs + shared_blocks * shared_programs,)](
            x, shared_x, *_parts(weights[0]), *_parts(weights[1]), *blocks, out, shared_out,
            rows, x.stride(0), shared_x.stride(0), **sizes, FP32=fp32, **tile, **pdl(y_TD),
        )  # fmt: skip

    launch(
        tiles[0], y_TD, y_TD, gate_up, inner_PF, shared_TF,
        N=width, K=size, SHARED_N=shared, SHARED_K=size, COUNT=count, GATED=True,
    )  # fmt: skip
    launch(
        tiles[1], inner_PF, shared_TF, down, out_PD, shared_TD,
        N=size, K=width, SHARED_N=size if shared else 0, SHARED_K=shared, COUNT=1, GATED=False,
    )  # fmt: skip
    return out_PD, shared_TD
