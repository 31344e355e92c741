"""Products of NVFP4 weights with a few rows, decoded into the matrix units' left operand.

Nothing of a weight changes its thread: of 128 columns the four threads that share a row there have
32 that lie together, two rows of 16 each, and the columns are taken in the order in which they are
decoded, those of x likewise. Weights are the 16 rows of an operand and x its 8 columns, so that
no row of x stands there twice.
"""

import torch
import triton
import triton.language as tl

from limelight.ops import cdiv, next_power_of_2
from limelight.ops.fp4 import FP4, outputs_of, row_of, stacked
from limelight.ops.fp4_codes import LEFT, weights_of, words_of

# Columns that a warp takes at a time.
SPAN = tl.constexpr(128)


@triton.jit
def _weights(word_RWX, scale_RWQ, dtype: tl.constexpr):
    """Words [8, W, 16] and the scales of two blocks each [8, W, 4]: weights [8, W, 4, 4, 8]."""
    WARPS: tl.constexpr = word_RWX.shape[1]
    scale = tl.join(scale_RWQ & 255, (scale_RWQ >> 8) & 255)[:, :, :, :, None]
    scale = tl.reshape(tl.broadcast_to(scale, [8, WARPS, 4, 2, 2]), [8, WARPS, 16])
    return tl.reshape(weights_of(word_RWX, scale, dtype), [8, WARPS, 4, 4, 2, 2, 2])


@triton.jit
def _loaded(
    words, scales, row_RW1, inside_RW1, start_W, K: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """The words and scales of 128 columns of each row from `start_W` on."""
    word, pair = tl.arange(0, 16)[None, None, :], tl.arange(0, 4)[None, None, :]
    at = words + row_RW1 * (K // 8) + (start_W // 8 + word)
    at_scale = scales + row_RW1 * (K // 32) + (start_W // 32 + pair)
    if EVEN:
        tile, scale = tl.load(at), tl.load(at_scale)
    else:
        tile = tl.load(at, mask=inside_RW1 & (start_W + word * 8 < K), other=0)
        scale = tl.load(at_scale, mask=inside_RW1 & (start_W + pair * 32 < K), other=0)
    return tile, scale


@triton.jit
def held(
    words, scales, first, N: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr,
    BLOCK_N: tl.constexpr, WARPS: tl.constexpr, ALONG: tl.constexpr,
):  # fmt: skip
    """BLOCK_N rows of a weight from the `first` on, as they are stored: pieces of tiles.

    ALONG of the warps lie along the columns. Of a gated weight [gate, up] of 2 N rows, 8 of the
    gate's and 8 of up's are an operand's.
    """
    ROWS: tl.constexpr = N * (2 if GATED else 1)
    ITEMS: tl.constexpr = BLOCK_N * ALONG // (16 * WARPS)
    CHUNKS: tl.constexpr = (K + ALONG * SPAN - 1) // (ALONG * SPAN)
    EVEN: tl.constexpr = ROWS % BLOCK_N == 0 and K == CHUNKS * ALONG * SPAN and (
        N % 8 == 0 or not GATED
    )  # fmt: skip
    w = tl.arange(0, WARPS)[None, :, None]
    r = tl.arange(0, 8)[:, None, None]
    tiles, pairs = (), ()
    for c in tl.static_range(CHUNKS):
        start_W = (w % ALONG * CHUNKS + c) * SPAN
        for i in tl.static_range(ITEMS):
            for half in tl.static_range(2):
                n = first + (w // ALONG * ITEMS + i) * 16 + half * 8 + r
                row, inside = n, n < ROWS
                if GATED:
                    n = n // 16 * 8 + r
                    row, inside = n + half * N, n < N
                tile, pair = _loaded(words, scales, row.to(tl.int64), inside, start_W, K, EVEN)
                tiles = tiles + (tile,)  # type: ignore[assignment]
                pairs = pairs + (pair,)  # type: ignore[assignment]
    return tiles, pairs


@triton.jit
def _columns(
    x_M, valid_M, chunk: tl.constexpr, CHUNKS: tl.constexpr, K: tl.constexpr, WARPS: tl.constexpr,
    ALONG: tl.constexpr,
):  # fmt: skip
    """The chunk-th 128 columns of 8 rows of each warp, as the right operand: [W, 128, 8]."""
    shape: tl.constexpr = [4, 8, WARPS, 4, 8]
    # In this order of dimensions a thread loads the columns that it has.
    f = tl.arange(0, 4)[:, None, None, None, None] * 32
    w = tl.arange(0, WARPS)[None, None, :, None, None]
    f += (w % ALONG * CHUNKS + chunk) * SPAN
    f += tl.arange(0, 4)[None, None, None, :, None] * 8 + tl.arange(0, 8)
    f = tl.broadcast_to(f, shape)
    inside = tl.broadcast_to(valid_M[None, :, None, None, None], shape)
    if K != CHUNKS * ALONG * SPAN:
        inside = inside & (f < K)
    tile = tl.load(x_M[None, :, None, None, None] + f, mask=inside, other=0.0)
    tile = tl.reshape(tile, [4, 8, WARPS, 4, 2, 2, 2])
    return tl.reshape(tl.permute(tile, [2, 3, 5, 0, 6, 4, 1]), [WARPS, 128, 8])


@triton.jit
def sums(
    tiles, pairs, x_M, valid_M, K: tl.constexpr, BLOCK_N: tl.constexpr, WARPS: tl.constexpr,
    ALONG: tl.constexpr,
):  # fmt: skip
    """Products of `held` rows with up to 8 at `x_M`: FP32 [BLOCK_N, 8], LEFT times too
    small."""
    dtype: tl.constexpr = x_M.dtype.element_ty
    ITEMS: tl.constexpr = BLOCK_N * ALONG // (16 * WARPS)
    CHUNKS: tl.constexpr = (K + ALONG * SPAN - 1) // (ALONG * SPAN)
    totals = ()
    for _ in tl.static_range(ITEMS):
        totals = totals + (tl.zeros([WARPS, 16, 8], tl.float32),)  # type: ignore[assignment]
    for c in tl.static_range(CHUNKS):
        x_WKM = _columns(x_M, valid_M, c, CHUNKS, K, WARPS, ALONG)
        old = totals
        totals = ()
        for i in tl.static_range(ITEMS):
            low = _weights(tiles[2 * (c * ITEMS + i)], pairs[2 * (c * ITEMS + i)], dtype)
            high = _weights(tiles[2 * (c * ITEMS + i) + 1], pairs[2 * (c * ITEMS + i) + 1], dtype)
            # [8, W, t, v, b, j, j', half] -> [W, half, 8, v, j, t, j', b]
            both = tl.permute(tl.join(low, high), [1, 7, 0, 3, 5, 2, 6, 4])
            both = tl.reshape(both, [WARPS, 16, 128])
            total = tl.dot(both, x_WKM, old[i], input_precision="ieee")
            totals = totals + (total,)  # type: ignore[assignment]
    sum_WRM = tl.permute(stacked(totals), [0, 3, 1, 2])
    sum_WRM = tl.reshape(sum_WRM, [WARPS // ALONG, ALONG, 16 * ITEMS, 8])
    return tl.reshape(tl.sum(sum_WRM, axis=1), [BLOCK_N, 8])


@triton.jit
def finish(
    sum_NM, factors, first, out_M, valid_M, N: tl.constexpr, GATED: tl.constexpr,
    FP32: tl.constexpr,
):  # fmt: skip
    """Scale `sums` of rows from the `first` on, and store them or their SwiGLU at `out_M`."""
    BLOCK_N: tl.constexpr = sum_NM.shape[0]
    OUTPUTS: tl.constexpr = BLOCK_N // (2 if GATED else 1)
    i = first + tl.arange(0, BLOCK_N)
    inside_N = i // 16 * 8 + i % 8 < N if GATED else i < N
    factor_N = tl.load(factors + row_of(i, N, GATED), mask=inside_N, other=0.0) * LEFT
    y_NM = outputs_of(sum_NM * factor_N[:, None], GATED, FP32, out_M.dtype.element_ty)
    n = first // BLOCK_N * OUTPUTS + tl.arange(0, OUTPUTS)
    tl.store(out_M[None, :] + n[:, None], y_NM, mask=(n < N)[:, None] & valid_M[None, :])


def along(columns: int, rows: int, warps: int) -> int:
    """How many of the warps lie along the columns, two pieces each if there are so many.

    The others lie along a program's rows, 16 at least.
    """
    wanted = next_power_of_2(cdiv(columns, 2 * SPAN.value))
    return min(max(wanted, 16 * warps // rows), warps)


def few_parts(weight: FP4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Words, the scales of two blocks at once, and those of the rows."""
    return words_of(weight.codes), weight.scales.view(torch.int16), weight.rows
