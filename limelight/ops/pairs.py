"""Pairs of a token and one of its experts, sorted by expert into blocks of rows, on the device.

    slot of a pair = that of its block, and how many pairs of its expert come before it in the block

A block holds up to BLOCK_M pairs of one expert, in order. Where blocks come to lie changes no
result, so few pairs are not counted first: each expert, or each pair, has a place of its own for a
block, which may stay empty. Of more pairs the blocks follow each other.
"""

import torch
import triton
import triton.language as tl

from limelight.ops import by_size, cdiv, next_power_of_2, pdl

# This many pairs are sorted without being counted first; of more, so many a program.
SORTED_AT_ONCE, SLICE = 1024, 512
# Experts, or pairs, of a program then, and its warps, of which a single one needs no barrier; by
# the most tokens.
OWNERS = {256: (1, 1), SORTED_AT_ONCE: (2, 4)}


def sort_pairs_reference(
    ids_TN: torch.Tensor, experts: int, block_m: int, *, absent: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The pairs of each row of each block; and of each block the expert, times 256, plus its rows,
    or 0 of a block that is not taken.

    A token's experts differ. With `absent` there are pairs of an expert beyond the last, which get
    no block. The kernel has the same blocks in another order.
    """
    order_P = ids_TN.flatten().argsort(stable=True)
    sizes = torch.bincount(ids_TN.flatten(), minlength=experts + absent).tolist()[:experts]
    parts = [
        (e, block_P)
        for e, part_P in enumerate(order_P[: sum(sizes)].split(sizes))
        for block_P in part_P.split(block_m)
        if len(block_P)
    ]
    rows_BM = ids_TN.new_zeros(len(parts), block_m, dtype=torch.int32)
    for row_M, (_, block_P) in zip(rows_BM, parts, strict=True):
        row_M[: len(block_P)] = block_P
    packed = [e * 256 + len(block_P) for e, block_P in parts]
    return rows_BM, torch.tensor(packed, dtype=torch.int32, device=ids_TN.device)


@triton.jit(do_not_specialize=["tokens", "owners"])
def _few_kernel(
    ids, rows, blocks, tokens, owners,
    COUNT: tl.constexpr, EXPERTS: tl.constexpr, BY_PAIR: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_X: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All blocks of BLOCK_X experts; or, BY_PAIR, of as many pairs those that they are first in.

    The first block of expert e is e. Later ones follow the experts: with s pairs before its own,
    it has those from s // BLOCK_M on, which are as many or one more. A block BY_PAIR is its first
    pair's.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    own_X1 = tl.program_id(0) * BLOCK_X + tl.arange(0, BLOCK_X)[:, None]
    inside_X1 = own_X1 < owners
    e_X1 = own_X1
    if BY_PAIR:
        e_X1 = tl.load(ids + own_X1, mask=inside_X1, other=EXPERTS).to(tl.int32)
    t_T = tl.arange(0, BLOCK_T)
    n_XT = tl.full((BLOCK_X, BLOCK_T), COUNT, tl.int32)
    less_XT = tl.zeros((BLOCK_X, BLOCK_T), tl.int32)
    for n in tl.static_range(COUNT):
        id_T = tl.load(ids + t_T * COUNT + n, mask=t_T < tokens, other=2**31 - 1).to(tl.int32)
        n_XT = tl.where(id_T[None, :] == e_X1, n, n_XT)
        if not BY_PAIR:
            less_XT += (id_T[None, :] < e_X1).to(tl.int32)
    has_XT = n_XT < COUNT
    rank_XT = tl.cumsum(has_XT.to(tl.int32), axis=1) - 1
    size_X1 = tl.sum(has_XT.to(tl.int32), axis=1)[:, None]
    pair_XT = t_T[None, :] * COUNT + n_XT
    taken_X1 = inside_X1 & (e_X1 < EXPERTS)
    if BY_PAIR:
        first_X1 = tl.sum((has_XT & (pair_XT < own_X1)).to(tl.int32), axis=1)[:, None]
        taken_X1 &= first_X1 % BLOCK_M == 0
        m_XT = rank_XT - first_X1
        has_XT &= (m_XT >= 0) & (m_XT < BLOCK_M)
        row_XT = own_X1 * BLOCK_M + m_XT
        block_X1 = e_X1 * 256 + tl.minimum(size_X1 - first_X1, BLOCK_M)
        tl.store(blocks + own_X1, tl.where(taken_X1, block_X1, 0), mask=inside_X1)
    else:
        less_X1 = tl.sum(less_XT, axis=1)[:, None]
        later_X1 = EXPERTS + less_X1 // BLOCK_M
        end_X1 = EXPERTS + (less_X1 + size_X1) // BLOCK_M
        slot_XT = tl.where(rank_XT < BLOCK_M, own_X1, later_X1 + rank_XT // BLOCK_M - 1)
        row_XT = slot_XT * BLOCK_M + rank_XT % BLOCK_M
        block_X1 = tl.where(size_X1 > 0, e_X1 * 256 + tl.minimum(size_X1, BLOCK_M), 0)
        tl.store(blocks + own_X1, block_X1, mask=taken_X1)
        j_1J = tl.arange(0, max(BLOCK_T // BLOCK_M, 1))[None, :]
        left_XJ = tl.where(taken_X1, size_X1 - (j_1J + 1) * BLOCK_M, 0)
        block_XJ = tl.where(left_XJ > 0, e_X1 * 256 + tl.minimum(left_XJ, BLOCK_M), 0)
        owned_XJ = inside_X1 & (later_X1 + j_1J < end_X1)
        tl.store(blocks + later_X1 + j_1J, block_XJ, mask=owned_XJ)
    tl.store(rows + row_XT, pair_XT, mask=taken_X1 & has_XT)


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
    """SLICE pairs a program, each to its row of the blocks; and BLOCK_B of the `most` blocks, which
    follow each other. `sizes` [parts, BLOCK_E] counts slice by slice."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    i = tl.program_id(0)
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
    p_P = tl.arange(0, BLOCK_P)
    for start in range(i * SLICE, tl.minimum((i + 1) * SLICE, pairs), BLOCK_P):
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
    """The blocks of `sort_pairs_reference`, with empty ones among them."""
    assert not absent or ids_TN.shape[1] == 1  # else a token may have the absent one twice
    sort = _sort_few if ids_TN.numel() <= SORTED_AT_ONCE else _sort_many
    return sort(ids_TN, experts, block_m, experts + absent)


def _empty_blocks(
    ids_TN: torch.Tensor, most: int, block_m: int
) -> tuple[torch.Tensor, torch.Tensor]:
    rows_BM = ids_TN.new_empty(most, block_m, dtype=torch.int32)
    return rows_BM, ids_TN.new_empty(most, dtype=torch.int32)


def _sort_few(
    ids_TN: torch.Tensor, experts: int, block_m: int, kinds: int
) -> tuple[torch.Tensor, torch.Tensor]:
    (tokens, count), pairs = ids_TN.shape, ids_TN.numel()
    places = experts + pairs // block_m
    by_pair = pairs <= places
    rows_BM, blocks_B = _empty_blocks(ids_TN, min(pairs, places), block_m)
    owners, (each, warps) = pairs if by_pair else kinds, by_size(OWNERS, tokens)
    _few_kernel[(cdiv(owners, each),)](
        ids_TN, rows_BM, blocks_B, tokens, owners, COUNT=count, EXPERTS=experts, BY_PAIR=by_pair,
        BLOCK_M=block_m, BLOCK_T=next_power_of_2(tokens), BLOCK_X=each, num_warps=warps,
        **pdl(ids_TN),
    )  # fmt: skip
    return rows_BM, blocks_B


def _sort_many(
    ids_TN: torch.Tensor, experts: int, block_m: int, kinds: int
) -> tuple[torch.Tensor, torch.Tensor]:
    pairs, block_e = ids_TN.numel(), next_power_of_2(kinds)
    most = min(pairs, (pairs + kinds * (block_m - 1)) // block_m)
    rows_BM, blocks_B = _empty_blocks(ids_TN, most, block_m)
    parts = cdiv(pairs, SLICE)
    sizes_XE = ids_TN.new_empty(parts, block_e, dtype=torch.int32)
    _count_kernel[(parts,)](
        ids_TN, sizes_XE, pairs, BLOCK_E=block_e, BLOCK_P=SLICE, num_warps=4, **pdl(ids_TN)
    )
    _place_kernel[(parts,)](
        ids_TN, sizes_XE, rows_BM, blocks_B, pairs, parts, most,
        EXPERTS=experts, BLOCK_M=block_m, BLOCK_E=block_e, BLOCK_P=32,
        BLOCK_B=next_power_of_2(cdiv(most, parts)), SLICE=SLICE, num_warps=8,
        **pdl(ids_TN),
    )  # fmt: skip
    return rows_BM, blocks_B
