"""The experts for many rows: `moe` of `experts.py` as products of blocks of rows.

Pairs of a token and one of its experts are sorted by expert, in order, and each expert's fill
blocks of BLOCK_M rows, the last with padding. The number of blocks that this may take is known
from the shapes alone; those not taken are left at once. The shared expert's blocks are the tokens
as they come. Kernels: sort (of many pairs, count first); gate and up with SwiGLU; down; the
weighted sum.
"""

import torch
import triton
import triton.language as tl

from limelight.ops import pdl
from limelight.ops.activation import rounded_swiglu


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
def _sort_kernel(
    ids, sizes, rows, experts, pairs, parts, blocks,
    EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One expert a program: its pairs into rows of blocks, `pairs` into padding rows.

    `sizes` [parts, BLOCK_E] has the counts; without it there are at most BLOCK_P pairs to count.
    `experts` gets the expert of each block, EXPERTS for a block that is not taken.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    e = tl.program_id(0)
    e_E, p_P, m_M = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_M)
    if sizes is None:
        ids_P = tl.load(ids + p_P, mask=p_P < pairs, other=0).to(tl.int32)
        sizes_E = tl.histogram(ids_P, BLOCK_E, mask=p_P < pairs)
    else:
        sizes_E = tl.zeros((BLOCK_E,), tl.int32)
        part = tl.arange(0, 16)
        start = 0
        while start < parts:
            at_XE = sizes + (start + part)[:, None] * BLOCK_E + e_E[None, :]
            sizes_XE = tl.load(at_XE, mask=(start + part < parts)[:, None], other=0)
            sizes_E += tl.sum(sizes_XE, axis=0)
            start += 16
    blocks_E = (sizes_E + BLOCK_M - 1) // BLOCK_M
    first = tl.sum(tl.where(e_E < e, blocks_E, 0), axis=0)
    end = first + tl.sum(tl.where(e_E == e, blocks_E, 0), axis=0)
    done = first * BLOCK_M
    start = 0
    while start < pairs:
        inside_P = start + p_P < pairs
        ids_P = tl.load(ids + start + p_P, mask=inside_P, other=0).to(tl.int32)
        mine_P = ((ids_P == e) & inside_P).to(tl.int32)
        tl.store(rows + done + tl.cumsum(mine_P, axis=0) - 1, start + p_P, mask=mine_P != 0)
        done += tl.sum(mine_P, axis=0)
        start += BLOCK_P
    tl.store(rows + done + m_M, pairs, mask=done + m_M < end * BLOCK_M)
    while first < end:
        tl.store(experts + first + p_P, e, mask=first + p_P < end)
        first += BLOCK_P
    if e == EXPERTS - 1:
        while end < blocks:
            tl.store(experts + end + p_P, EXPERTS, mask=end + p_P < blocks)
            end += BLOCK_P


@triton.jit
def _load(at, inside, EVEN: tl.constexpr):
    """With a mask only where some of the tile may be outside."""
    return tl.load(at) if EVEN else tl.load(at, mask=inside, other=0.0)


@triton.jit
def _gate_up_tile(
    y, gate_up, out, token_M, row_M, valid_M, first, stride_y,
    SIZE: tl.constexpr, INNER: tl.constexpr, FP32: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """SwiGLU of rows `token_M` of y for BLOCK_N channels, into rows `row_M`."""
    EVEN: tl.constexpr = SIZE % BLOCK_K == 0 and INNER % BLOCK_N == 0
    k, f = tl.arange(0, BLOCK_K), first + tl.arange(0, BLOCK_N)
    y_MK = y + token_M.to(tl.int64)[:, None] * stride_y + k[None, :]
    gate_KF = gate_up + f[None, :] * SIZE + k[:, None]
    up_KF = gate_KF + INNER * SIZE
    gate_MF = tl.zeros((valid_M.shape[0], BLOCK_N), tl.float32)
    up_MF = tl.zeros((valid_M.shape[0], BLOCK_N), tl.float32)
    for start in range(0, SIZE, BLOCK_K):
        inside_K = start + k < SIZE
        inside_KF = inside_K[:, None] & (f < INNER)[None, :]
        # The weights first: they do not wait for `token_M` to be known.
        gate_tile = _load(gate_KF + start, inside_KF, EVEN)
        up_tile = _load(up_KF + start, inside_KF, EVEN)
        y_tile = tl.load(y_MK + start, mask=valid_M[:, None] & inside_K[None, :], other=0.0)
        gate_MF = tl.dot(y_tile, gate_tile, gate_MF, input_precision="ieee")
        up_MF = tl.dot(y_tile, up_tile, up_MF, input_precision="ieee")
    value_MF = rounded_swiglu(gate_MF, up_MF, FP32, out.dtype.element_ty)
    into_MF = out + row_M.to(tl.int64)[:, None] * INNER + f[None, :]
    tl.store(into_MF, value_MF, mask=valid_M[:, None] & (f < INNER)[None, :])


@triton.jit
def _grouped_gate_up_kernel(
    y, gate_up, shared_gate_up, block_rows, block_experts, inner, shared_inner, rows, stride_y,
    SIZE: tl.constexpr, INNER: tl.constexpr, SHARED: tl.constexpr, COUNT: tl.constexpr,
    EXPERTS: tl.constexpr, FP32: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A block of rows by BLOCK_N channels; the shared expert's first, then block by block."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    SHARED_TILES: tl.constexpr = (SHARED + BLOCK_N - 1) // BLOCK_N
    TILES: tl.constexpr = (INNER + BLOCK_N - 1) // BLOCK_N
    m_M = tl.arange(0, BLOCK_M)
    program = tl.program_id(0)
    shared_programs = (rows + BLOCK_M - 1) // BLOCK_M * SHARED_TILES
    if program < shared_programs:
        if SHARED:
            row_M = program // SHARED_TILES * BLOCK_M + m_M
            _gate_up_tile(
                y, shared_gate_up, shared_inner, row_M, row_M, row_M < rows,
                program % SHARED_TILES * BLOCK_N, stride_y, SIZE, SHARED, FP32, BLOCK_N, BLOCK_K,
            )  # fmt: skip
    else:
        program -= shared_programs
        block = program // TILES
        e = tl.load(block_experts + block)
        row_M = tl.load(block_rows + block * BLOCK_M + m_M)
        if e < EXPERTS:
            _gate_up_tile(
                y, gate_up + e.to(tl.int64) * (2 * INNER * SIZE), inner,
                row_M // COUNT, row_M, row_M < rows * COUNT,
                program % TILES * BLOCK_N, stride_y, SIZE, INNER, FP32, BLOCK_N, BLOCK_K,
            )  # fmt: skip


@triton.jit
def _down_tile(
    inner, down, out, row_M, valid_M, first,
    SIZE: tl.constexpr, INNER: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Rows `row_M` of `inner` to BLOCK_N channels of rows `row_M` of `out`."""
    EVEN: tl.constexpr = INNER % BLOCK_K == 0 and SIZE % BLOCK_N == 0
    k, d = tl.arange(0, BLOCK_K), first + tl.arange(0, BLOCK_N)
    inner_MK = inner + row_M.to(tl.int64)[:, None] * INNER + k[None, :]
    down_KD = down + d[None, :] * INNER + k[:, None]
    total_MD = tl.zeros((valid_M.shape[0], BLOCK_N), tl.float32)
    for start in range(0, INNER, BLOCK_K):
        inside_K = start + k < INNER
        down_tile = _load(down_KD + start, inside_K[:, None] & (d < SIZE)[None, :], EVEN)
        tile = tl.load(inner_MK + start, mask=valid_M[:, None] & inside_K[None, :], other=0.0)
        total_MD = tl.dot(tile, down_tile, total_MD, input_precision="ieee")
    into_MD = out + row_M.to(tl.int64)[:, None] * SIZE + d[None, :]
    mask_MD = valid_M[:, None] & (d < SIZE)[None, :]
    tl.store(into_MD, total_MD.to(out.dtype.element_ty), mask=mask_MD)


@triton.jit
def _grouped_down_kernel(
    inner, shared_inner, down, shared_down, block_rows, block_experts, out, shared_out, rows,
    SIZE: tl.constexpr, INNER: tl.constexpr, SHARED: tl.constexpr, COUNT: tl.constexpr,
    EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """As the kernel before, in the same blocks; a row for each pair and each token."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    TILES: tl.constexpr = (SIZE + BLOCK_N - 1) // BLOCK_N
    m_M = tl.arange(0, BLOCK_M)
    block = tl.program_id(0) // TILES
    first = tl.program_id(0) % TILES * BLOCK_N
    shared_blocks = (rows + BLOCK_M - 1) // BLOCK_M if SHARED else 0
    if block < shared_blocks:
        if SHARED:
            row_M = block * BLOCK_M + m_M
            _down_tile(
                shared_inner, shared_down, shared_out, row_M, row_M < rows, first,
                SIZE, SHARED, BLOCK_N, BLOCK_K,
            )  # fmt: skip
    else:
        block -= shared_blocks
        e = tl.load(block_experts + block)
        row_M = tl.load(block_rows + block * BLOCK_M + m_M)
        if e < EXPERTS:
            _down_tile(
                inner, down + e.to(tl.int64) * (SIZE * INNER), out, row_M, row_M < rows * COUNT,
                first, SIZE, INNER, BLOCK_N, BLOCK_K,
            )  # fmt: skip


@triton.jit
def _combine_kernel(
    routed, shared, weights, out, scale,
    SIZE: tl.constexpr, COUNT: tl.constexpr, SCALED: tl.constexpr, BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A piece of one token's row: the weighted sum of its experts, then the shared one's."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    dtype: tl.constexpr = out.dtype.element_ty
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    total_D = tl.zeros((BLOCK_D,), tl.float32)
    for n in tl.static_range(COUNT):
        pair = t * COUNT + n
        out_D = tl.load(routed + pair * SIZE + d, mask=d < SIZE, other=0.0)
        total_D += tl.load(weights + pair) * out_D.to(tl.float32)
    total_D = total_D.to(dtype)
    if SCALED:
        total_D = (total_D.to(tl.float32) * scale).to(dtype)
    if shared is not None:
        out_D = tl.load(shared + t * SIZE + d, mask=d < SIZE, other=0.0).to(tl.float32)
        total_D = (total_D.to(tl.float32) + out_D).to(dtype)
    tl.store(out + t * SIZE + d, total_D, mask=d < SIZE)


SORTED_AT_ONCE = 1024  # pairs


def _tile(n: int, k: int, warps: int, stages: int) -> dict[str, int]:
    return {"BLOCK_N": n, "BLOCK_K": k, "num_warps": warps, "num_stages": stages}


# Rows of a block, tile of gate and up (BLOCK_N of each), tile of down; by the most pairs of an
# expert on average. The first is bound by memory, the last by arithmetic.
TILES = {
    8: (16, _tile(32, 128, 4, 4), _tile(64, 128, 4, 4)),
    32: (32, _tile(64, 64, 4, 4), _tile(128, 64, 4, 4)),
    64: (64, _tile(64, 64, 4, 4), _tile(128, 64, 4, 4)),
    2**31: (128, _tile(128, 64, 8, 4), _tile(128, 64, 8, 3)),
}


def _sort(ids_TN: torch.Tensor, experts: int, block_m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The pairs of each row of each block, and the expert of each block."""
    pairs = ids_TN.numel()
    blocks = min(pairs, (pairs + experts * (block_m - 1)) // block_m)
    rows_BM = ids_TN.new_empty(blocks, block_m, dtype=torch.int32)
    experts_B = ids_TN.new_empty(blocks, dtype=torch.int32)
    block_e = triton.next_power_of_2(experts)
    block_p = min(SORTED_AT_ONCE, max(128, triton.next_power_of_2(pairs)))
    parts, sizes_XE = triton.cdiv(pairs, block_p), None
    if parts > 1:
        sizes_XE = ids_TN.new_empty(parts, block_e, dtype=torch.int32)
        _count_kernel[(parts,)](
            ids_TN, sizes_XE, pairs, BLOCK_E=block_e, BLOCK_P=block_p, num_warps=4, **pdl(ids_TN)
        )
    _sort_kernel[(experts,)](
        ids_TN, sizes_XE, rows_BM, experts_B, pairs, parts, blocks,
        EXPERTS=experts, BLOCK_M=block_m, BLOCK_E=block_e, BLOCK_P=block_p, num_warps=4,
        **pdl(ids_TN),
    )  # fmt: skip
    return rows_BM, experts_B


def grouped_moe(
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
    """`moe` by sorted blocks; the arguments have been checked."""
    (rows, size), count, (experts, _, width) = y_TD.shape, ids_TN.shape[1], down_EDF.shape
    shared = 0 if shared_down_DF is None else shared_down_DF.shape[1]
    average = rows * count / experts
    block_m, gate_up, down = TILES[min(most for most in TILES if average <= most)]
    rows_BM, experts_B = _sort(ids_TN, experts, block_m)
    inner_PF, shared_TF = y_TD.new_empty(rows * count, width), y_TD.new_empty(rows, shared)
    out_PD = y_TD.new_empty(rows * count, size)
    shared_TD = y_TD.new_empty(rows, size) if shared else None
    out_TD = y_TD.new_empty(rows, size)
    sizes = {
        "SIZE": size, "INNER": width, "SHARED": shared, "COUNT": count, "EXPERTS": experts,
        "BLOCK_M": block_m,
    }  # fmt: skip
    blocks, shared_blocks = len(experts_B), triton.cdiv(rows, block_m) if shared else 0
    programs = blocks * triton.cdiv(width, gate_up["BLOCK_N"])
    programs += shared_blocks * triton.cdiv(shared, gate_up["BLOCK_N"])
    _grouped_gate_up_kernel[(programs,)](
        y_TD, gate_up_EGD, shared_gate_up_GD, rows_BM, experts_B, inner_PF, shared_TF, rows,
        y_TD.stride(0), **sizes, FP32=fp32, **gate_up, **pdl(y_TD),
    )  # fmt: skip
    _grouped_down_kernel[((blocks + shared_blocks) * triton.cdiv(size, down["BLOCK_N"]),)](
        inner_PF, shared_TF, down_EDF, shared_down_DF, rows_BM, experts_B, out_PD, shared_TD, rows,
        **sizes, **down, **pdl(y_TD),
    )  # fmt: skip
    block_d = min(1024, triton.next_power_of_2(size))
    _combine_kernel[(rows, triton.cdiv(size, block_d))](
        out_PD, shared_TD, weights_TN, out_TD, scale,
        SIZE=size, COUNT=count, SCALED=scale != 1.0, BLOCK_D=block_d, num_warps=4, **pdl(y_TD),
    )  # fmt: skip
    return out_TD
