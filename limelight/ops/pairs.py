"""Pairs of a token and one of its experts, sorted by expert into blocks of rows, on the device."""

import torch
import triton
import triton.language as tl

from limelight.ops import cdiv, next_power_of_2, pdl

# This many pairs are sorted without being counted first; of more, so many a program.
SORTED_AT_ONCE, SLICE = 1024, 512


@triton.jit
def _count_kernel(
    ids, sizes, pairs, BLOCK_E: tl.constexpr, BLOCK_P: tl.constexpr, PDL: tl.constexpr
):
    """How many of BLOCK_P pairs go to each expert."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    p_P = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    ids_P = tl.load(ids + p_P, mask=p_P < pairs, other=0).to(tl.int32)
    sizes_E = tl.histogram(ids_P, BLOCK_E, mask=p_P < pairs)
    tl.store(sizes + tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E), sizes_E)


@triton.jit
def _place_kernel(
    ids, sizes, rows, blocks, pairs, parts, most,
    EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_B: tl.constexpr, SLICE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """SLICE pairs a program, each to its row of the blocks; and of BLOCK_B of the `most` blocks
    the expert, times 256, plus the number of rows; 0 of a block that is not taken.

    `sizes` [parts, BLOCK_E] counts slice by slice; without it BLOCK_P is enough for all pairs.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    i = tl.program_id(0)
    p_P = tl.arange(0, BLOCK_P)
    if sizes is None:
        first = 0
        ids_P = tl.load(ids + p_P, mask=p_P < pairs, other=0).to(tl.int32)
        sizes_E = tl.histogram(ids_P, BLOCK_E, mask=p_P < pairs)
        before_E = tl.zeros((BLOCK_E,), tl.int32)
    else:
        first = i * SLICE
        x_X = tl.arange(0, 32)
        sizes_XE = tl.zeros((32, BLOCK_E), tl.int32)
        before_XE = tl.zeros((32, BLOCK_E), tl.int32)
        for start in range(0, parts, 32):
            at_XE = sizes + (start + x_X)[:, None] * BLOCK_E + tl.arange(0, BLOCK_E)[None, :]
            part_XE = tl.load(at_XE, mask=(start + x_X < parts)[:, None], other=0)
            sizes_XE += part_XE
            before_XE += tl.where((start + x_X < i)[:, None], part_XE, 0)
        sizes_E, before_E = tl.sum(sizes_XE, axis=0), tl.sum(before_XE, axis=0)
    end_E = tl.cumsum((sizes_E + BLOCK_M - 1) // BLOCK_M, axis=0)
    start_E = (end_E - (sizes_E + BLOCK_M - 1) // BLOCK_M) * BLOCK_M
    p_S = i * SLICE + tl.arange(0, SLICE)
    ids_S = tl.load(ids + p_S, mask=p_S < pairs, other=0).to(tl.int32)
    row_S = tl.gather(start_E + before_E, ids_S, 0)
    for start in range(first, tl.minimum((i + 1) * SLICE, pairs), BLOCK_P):
        inside_P = start + p_P < pairs
        ids_P = tl.load(ids + start + p_P, mask=inside_P, other=-1).to(tl.int32)
        before_PS = (start + p_P)[:, None] < p_S[None, :]
        before_PS = before_PS & (ids_P[:, None] == ids_S[None, :])
        row_S += tl.sum(before_PS.to(tl.int32), axis=0)
    tl.store(rows + row_S, p_S, mask=p_S < pairs)
    b_B = i * BLOCK_B + tl.arange(0, BLOCK_B)
    e_B = tl.sum((end_E[None, :] <= b_B[:, None]).to(tl.int32), axis=1)
    left_B = tl.gather(start_E + sizes_E, tl.minimum(e_B, BLOCK_E - 1), 0) - b_B * BLOCK_M
    block_B = tl.where(e_B < EXPERTS, e_B * 256 + tl.minimum(left_B, BLOCK_M), 0)
    tl.store(blocks + b_B, block_B, mask=b_B < most)


def sort_pairs(
    ids_TN: torch.Tensor, experts: int, block_m: int, *, absent: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The pairs of each row of each block; and of each block the expert and its rows, packed. With
    `absent` there are pairs of an expert beyond the last, whose blocks are not taken."""
    pairs, kinds = ids_TN.numel(), experts + absent
    most = min(pairs, (pairs + kinds * (block_m - 1)) // block_m)
    rows_BM = ids_TN.new_empty(most, block_m, dtype=torch.int32)
    blocks_B = ids_TN.new_empty(most, dtype=torch.int32)
    block_e, sizes_XE = next_power_of_2(kinds), None
    block_p, part, warps = max(128, next_power_of_2(pairs)), 8, 4
    if pairs > SORTED_AT_ONCE:
        block_p, part, warps = 32, SLICE, 8
        sizes_XE = ids_TN.new_empty(cdiv(pairs, part), block_e, dtype=torch.int32)
        _count_kernel[(len(sizes_XE),)](
            ids_TN, sizes_XE, pairs, BLOCK_E=block_e, BLOCK_P=part, num_warps=4, **pdl(ids_TN)
        )
    parts = cdiv(pairs, part)
    _place_kernel[(parts,)](
        ids_TN, sizes_XE, rows_BM, blocks_B, pairs, parts, most,
        EXPERTS=experts, BLOCK_M=block_m, BLOCK_E=block_e, BLOCK_P=block_p,
        BLOCK_B=next_power_of_2(cdiv(most, parts)), SLICE=part, num_warps=warps,
        **pdl(ids_TN),
    )  # fmt: skip
    return rows_BM, blocks_B
