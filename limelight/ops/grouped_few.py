"""NVFP4 experts for so many rows that an expert has a few of them: blocks of up to 8.

As in `grouped.py`, but weights go from memory straight into registers, and few pairs are not
sorted: the program of each pair looks whether it is the first of its expert's.
"""

import torch
import triton
import triton.language as tl

from limelight.ops import by_size, cdiv, next_power_of_2, pdl
from limelight.ops.fp4 import BLOCK, FP4
from limelight.ops.fp4_few import along, few_parts, finish, held, sums


@triton.jit
def _block_of(ids, pair, pairs, BLOCK_P: tl.constexpr):
    """The block of up to 8 pairs of one expert that begins with this one, and their number.

    That is 0 unless the pair is the first, the ninth and so on of its expert's.
    """
    p_P = tl.arange(0, BLOCK_P)
    ids_P = tl.load(ids + p_P, mask=p_P < pairs, other=-1)
    same_P = (ids_P == tl.load(ids + pair)).to(tl.int32)
    before = tl.sum(tl.where(p_P < pair, same_P, 0), axis=0)
    place_P = tl.where(same_P > 0, tl.cumsum(same_P, axis=0) - 1 - before, -1)
    pair_MP = tl.where(place_P[None, :] == tl.arange(0, 8)[:, None], p_P[None, :], 0)
    left = tl.minimum(tl.sum(same_P, axis=0) - before, 8)
    return tl.sum(pair_MP, axis=1), tl.where(before % 8 == 0, left, 0)


@triton.jit
def _grouped_few_kernel(
    x, shared_x, words, scales, factors, shared_words, shared_scales, shared_factors,
    ids, out, shared_out, rows, stride_x, stride_shared,
    N: tl.constexpr, K: tl.constexpr, SHARED_N: tl.constexpr, SHARED_K: tl.constexpr,
    COUNT: tl.constexpr, EACH: tl.constexpr, GATED: tl.constexpr, FP32: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, WARPS: tl.constexpr, ALONG: tl.constexpr,
    SHARED_ALONG: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A block of up to 8 rows by BLOCK_N rows of the weight; EACH rows of `out` share one of x.

    Every program looks through the COUNT `ids` of all rows for those of its block.
    """
    KINDS: tl.constexpr = 2 if GATED else 1
    SHARED_TILES: tl.constexpr = (KINDS * SHARED_N + BLOCK_N - 1) // BLOCK_N
    TILES: tl.constexpr = (KINDS * N + BLOCK_N - 1) // BLOCK_N
    m = tl.arange(0, 8)
    program = tl.program_id(0)
    shared_programs = (rows + 7) // 8 * SHARED_TILES
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if program < shared_programs:
        if SHARED_N:
            first = program % SHARED_TILES * BLOCK_N
            tiles, pairs = held(
                shared_words, shared_scales, first, SHARED_N, SHARED_K, GATED, BLOCK_N, WARPS,
                SHARED_ALONG,
            )  # fmt: skip
            if PDL:
                tl.extra.cuda.gdc_wait()
            row_M = (program // SHARED_TILES * 8 + m).to(tl.int64)
            sum_NM = sums(
                tiles, pairs, shared_x + row_M * stride_shared, row_M < rows, SHARED_K, BLOCK_N,
                WARPS, SHARED_ALONG,
            )  # fmt: skip
            finish(
                sum_NM, shared_factors, first, shared_out + row_M * SHARED_N, row_M < rows,
                SHARED_N, GATED, FP32,
            )  # fmt: skip
    else:
        program -= shared_programs
        if PDL:
            tl.extra.cuda.gdc_wait()
        pair_M, valid = _block_of(ids, program // TILES, rows * COUNT, BLOCK_P)
        if valid > 0:
            expert = tl.load(ids + program // TILES)
            e, first = expert.to(tl.int64) * (KINDS * N), program % TILES * BLOCK_N
            tiles, pairs = held(
                words + e * (K // 8), scales + e * (K // 32), first, N, K, GATED, BLOCK_N, WARPS,
                ALONG,
            )  # fmt: skip
            x_M = x + (pair_M // EACH).to(tl.int64) * stride_x
            sum_NM = sums(tiles, pairs, x_M, m < valid, K, BLOCK_N, WARPS, ALONG)
            out_M = out + pair_M.to(tl.int64) * N
            finish(sum_NM, factors + e, first, out_M, m < valid, N, GATED, FP32)


# Up to so many pairs of an expert on average, and so many in all, for each program looks through
# them: of more pairs sorting costs less.
MOST_EACH, MOST_PAIRS = 2, 32
Tile = dict[str, int]
# Rows of the weight a program, by the most columns.
TILES: dict[int, Tile] = {
    1024: {"BLOCK_N": 32, "num_warps": 2, "maxnreg": 128},
    2048: {"BLOCK_N": 16, "num_warps": 4, "maxnreg": 128},
    2**31: {"BLOCK_N": 16, "num_warps": 8, "maxnreg": 128},
}


def fits(down: tuple[FP4, FP4 | None]) -> bool:
    """Whether rows have whole pairs of blocks."""
    return all(n % (2 * BLOCK) == 0 for w in down if w is not None for n in w.shape[-2:])


def _parts(weight: FP4 | None) -> tuple[torch.Tensor | None, ...]:
    return (None, None, None) if weight is None else few_parts(weight)


def few_each(
    y_TD: torch.Tensor,
    gate_up: tuple[FP4, FP4 | None],
    down: tuple[FP4, FP4 | None],
    ids_TN: torch.Tensor,
    fp32: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Each pair's output and the shared expert's."""
    (rows, size), count, width = y_TD.shape, ids_TN.shape[1], down[0].shape[-1]
    shared = 0 if down[1] is None else down[1].shape[-1]
    inner_PF, shared_TF = y_TD.new_empty(rows * count, width), y_TD.new_empty(rows, shared)
    out_PD = y_TD.new_empty(rows * count, size)
    shared_TD = y_TD.new_empty(rows, size) if shared else None
    pairs = rows * count
    options = {"COUNT": count, "FP32": fp32, "BLOCK_P": next_power_of_2(pairs), **pdl(y_TD)}

    def launch(x, shared_x, weights, out, shared_out, **sizes: int) -> None:
        tile = by_size(TILES, max(sizes["K"], sizes["SHARED_K"]))
        warps, kinds = tile["num_warps"], 2 if sizes["GATED"] else 1
        tiles, shared_tiles = (cdiv(kinds * sizes[n], tile["BLOCK_N"]) for n in ("N", "SHARED_N"))
        ways, shared_ways = (along(sizes[k], tile["BLOCK_N"], warps) for k in ("K", "SHARED_K"))
        _grouped_few_kernel[(pairs * tiles + cdiv(rows, 8) * shared_tiles,)](
            x, shared_x, *_parts(weights[0]), *_parts(weights[1]), ids_TN, out, shared_out,
            rows, x.stride(0), shared_x.stride(0), WARPS=warps, ALONG=ways,
            SHARED_ALONG=shared_ways, **sizes, **options, **tile,
        )  # fmt: skip

    launch(
        y_TD, y_TD, gate_up, inner_PF, shared_TF,
        N=width, K=size, SHARED_N=shared, SHARED_K=size, EACH=count, GATED=True,
    )  # fmt: skip
    launch(
        inner_PF, shared_TF, down, out_PD, shared_TD,
        N=size, K=width, SHARED_N=size if shared else 0, SHARED_K=shared, EACH=1, GATED=False,
    )  # fmt: skip
    return out_PD, shared_TD
