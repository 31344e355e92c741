"""Low-rank adapters beside a weight: each row of a product adds what its own adapter does to it.

    y <- y + B (A x)       (LoRA, Hu et al., 2021; the factor alpha / r is within B)

There is room for S adapters beside each matrix: `adapters_T` tells which one a row has, from 1 on,
or 0 for none. As PEFT rounds: x, A x and B A x to the type of A and B, their sum with y to that of
y. The rows of several matrices that share an input lie one below the other in B and share no rank:
matrix p has rows [p R, p R + R) of A. Beside experts, each has an A and a B of its own.

Two kernels: `shrink` makes A x of blocks of rows, its channels divided among programs; `expand`
adds those up, multiplies by B and adds to y. A block goes through the adapters that its rows have.
Blocks are rows in order, or those of `grouped.py`, each of one expert.
"""

from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from limelight.ops import (
    by_size,
    cdiv,
    invariant,
    is_batch_invariant,
    next_power_of_2,
    op,
    pdl,
    stages,
)
from limelight.ops.weight import Stack, Weight

Blocks = tuple[torch.Tensor, torch.Tensor]


@dataclass(slots=True)
class StepAdapters:
    """Which adapter each row of the step under way has; None: no row has one.

    The weights of a model share one of these, and who runs the model sets it before.
    """

    of_rows_T: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Adapted:
    """A weight [N, K], or of E experts [E, N, K], and room for S adapters beside it.

    `a` [S, P R, K] and `b` [S, N, R], or [S, E, P R, K] and [S, E, N, R], for P matrices whose
    first rows, and the end of the last, are in `starts` (int32 [P + 1]).
    """

    base: Weight | Stack
    a: torch.Tensor
    b: torch.Tensor
    sizes: tuple[int, ...]
    starts: torch.Tensor
    step: StepAdapters = field(default_factory=StepAdapters)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.base.shape)

    @property
    def nbytes(self) -> int:
        """Of what is beside the weight."""
        return self.a.nbytes + self.b.nbytes

    def __len__(self) -> int:
        return len(self.base)

    def expert(self, index: int) -> "Adapted":
        """That of one expert."""
        base = without_adapters(self)[index]
        return replace(self, base=base, a=self.a[:, index], b=self.b[:, index])


Matrix = Weight | Stack | Adapted


def needed(weight: Matrix) -> Matrix:
    """The weight alone in a step where no row has an adapter."""
    if isinstance(weight, Adapted) and weight.step.of_rows_T is None:
        return weight.base
    return weight


def without_adapters(weight: Matrix) -> Weight:
    """The weight of experts, or of the LM head."""
    alone = weight.base if isinstance(weight, Adapted) else weight
    assert not isinstance(alone, Stack), "these are held in one"
    return alone


def add_lora_reference(
    x_TK: torch.Tensor,
    adapters_T: torch.Tensor,
    a_SUK: torch.Tensor,
    b_SNR: torch.Tensor,
    starts: torch.Tensor,
    sizes: tuple[int, ...],
    *,
    onto: torch.Tensor,
) -> torch.Tensor:
    """`onto` [T, N], to which B A x of each row's adapter was added; U = P R."""
    rank = b_SNR.shape[-1]
    linear = invariant.linear if is_batch_invariant() else F.linear
    for adapter in adapters_T.unique().tolist():
        if not adapter:
            continue
        rows = (adapters_T == adapter).nonzero()[:, 0]
        shrunk_XU = linear(x_TK[rows].to(a_SUK.dtype), a_SUK[adapter - 1])
        parts = zip(shrunk_XU.split(rank, dim=-1), b_SNR[adapter - 1].split(sizes), strict=True)
        added_XN = torch.cat([linear(u_XR, b_NR) for u_XR, b_NR in parts], dim=-1)
        onto[rows] = (onto[rows] + added_XN).to(onto.dtype)
    return onto


@triton.jit
def _block(block_rows, blocks, adapters, rows, COUNT: tl.constexpr, BLOCK_M: tl.constexpr):
    """The expert of a block, its rows, which of them there are, and their adapters."""
    i, m = tl.program_id(0), tl.arange(0, BLOCK_M)
    if blocks is None:
        e = tl.cast(0, tl.int32)
        row_M = i * BLOCK_M + m
        valid_M = row_M < rows
    else:
        block = tl.load(blocks + i)
        e = block // 256
        valid_M = m < block % 256
        row_M = tl.load(block_rows + i * BLOCK_M + m, mask=valid_M, other=0)
    adapter_M = tl.load(adapters + row_M // COUNT, mask=valid_M, other=0)
    return e, row_M.to(tl.int64), valid_M, adapter_M


@triton.jit
def _shrink_kernel(
    x, adapters, a, u, block_rows, blocks, rows, stride_x, slots, stride_slot, share,
    SIZE: tl.constexpr, RANKS: tl.constexpr, COUNT: tl.constexpr, EACH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows of A x, of `share` channels of x: [shares, rows, RANKS]. COUNT rows are a token's, and
    EACH share a row of x."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    e, row_M, valid_M, adapter_M = _block(block_rows, blocks, adapters, rows, COUNT, BLOCK_M)
    dtype: tl.constexpr = a.dtype.element_ty
    k = tl.arange(0, BLOCK_K)
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    first = tl.program_id(2) * share
    last = tl.minimum(first + share, SIZE)
    if tl.max(adapter_M, axis=0) > 0:
        x_MK = x + (row_M // EACH)[:, None] * stride_x + k[None, :]
        sum_MR = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        for adapter in range(1, slots + 1):
            own_M = adapter_M == adapter
            if tl.max(own_M.to(tl.int32), axis=0) > 0:
                own = a + tl.cast(adapter - 1, tl.int64) * stride_slot
                a_KR = own + e.to(tl.int64) * (RANKS * SIZE) + r[None, :] * SIZE + k[:, None]
                for start in range(first, last, BLOCK_K):
                    inside = start + k < last
                    tile_MK = tl.load(x_MK + start, own_M[:, None] & inside[None, :], other=0.0)
                    inside_KR = inside[:, None] & (r < RANKS)[None, :]
                    tile_KR = tl.load(a_KR + start, mask=inside_KR, other=0.0)
                    sum_MR = tl.dot(tile_MK.to(dtype), tile_KR, sum_MR, input_precision="ieee")
        into_MR = u + (tl.program_id(2) * rows + row_M)[:, None] * RANKS + r[None, :]
        tl.store(into_MR, sum_MR, mask=(adapter_M > 0)[:, None] & (r < RANKS)[None, :])


@triton.jit
def _expand_kernel(
    u, adapters, b, starts, onto, block_rows, blocks, rows, shares, slots, stride_slot, stride_e,
    RANK: tl.constexpr, RANKS: tl.constexpr, COUNT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_N channels of one matrix, for a block of rows."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    e, row_M, valid_M, adapter_M = _block(block_rows, blocks, adapters, rows, COUNT, BLOCK_M)
    dtype: tl.constexpr = b.dtype.element_ty
    part = tl.program_id(2)
    end, size = tl.load(starts + part + 1), tl.load(starts + tl.num_programs(2))
    n = tl.load(starts + part) + tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tl.arange(0, BLOCK_R)
    if (tl.max(adapter_M, axis=0) > 0) & (tl.min(n, axis=0) < end):
        sum_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for adapter in range(1, slots + 1):
            own_M = adapter_M == adapter
            if tl.max(own_M.to(tl.int32), axis=0) > 0:
                own = b + tl.cast(adapter - 1, tl.int64) * stride_slot + e.to(tl.int64) * stride_e
                for start in range(0, RANK, BLOCK_R):
                    inside = start + r < RANK
                    at_MR = u + row_M[:, None] * RANKS + part * RANK + start + r[None, :]
                    u_MR = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
                    for share in range(shares):
                        from_MR = at_MR + tl.cast(share, tl.int64) * rows * RANKS
                        u_MR += tl.load(from_MR, own_M[:, None] & inside[None, :], other=0.0)
                    b_RN = own + n[None, :] * RANK + start + r[:, None]
                    tile_RN = tl.load(b_RN, inside[:, None] & (n < end)[None, :], other=0.0)
                    sum_MN = tl.dot(u_MR.to(dtype), tile_RN, sum_MN, input_precision="ieee")
        at_MN = onto + row_M[:, None] * size + n[None, :]
        mask_MN = (adapter_M > 0)[:, None] & (n < end)[None, :]
        y_MN = tl.load(at_MN, mask=mask_MN, other=0.0).to(tl.float32)
        y_MN += sum_MN.to(dtype).to(tl.float32)
        tl.store(at_MN, y_MN.to(onto.dtype.element_ty), mask=mask_MN)


# Rows of a block, by the most rows; ranks and channels of a program.
TILES = {64: 16, 2**31: 64}
BLOCK_R, BLOCK_N = 32, 64
# Channels in a loop, by the rows of a block.
BLOCK_K = {16: 128, 2**31: 64}
# So many channels of x a program where few programs would have them all.
SHARE, MOST_SHARED = 512, 128


def launch_lora(
    x_XK: torch.Tensor,
    adapters_T: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    starts: torch.Tensor,
    sizes: tuple[int, ...],
    *,
    onto: torch.Tensor,
    blocks: Blocks | None = None,
) -> torch.Tensor:
    """`add_lora` for rows in order; or, with `blocks` of pairs of a token and an expert, for a row
    of `onto` each: x has as many rows, or one for each token."""
    (rows, size), (ranks, width), rank = onto.shape, a.shape[-2:], b.shape[-1]
    assert onto.is_contiguous() and x_XK.stride(1) == 1 and x_XK.shape[1] == width
    assert size == sum(sizes) == b.shape[-2] and ranks == len(sizes) * rank and rank % 16 == 0
    assert a.is_contiguous() and b.is_contiguous() and a.dtype == b.dtype
    if not rows:
        return onto
    alike = is_batch_invariant()
    block_m = by_size(TILES, 1 if alike else rows) if blocks is None else blocks[0].shape[1]
    count = cdiv(rows, block_m) if blocks is None else len(blocks[1])
    block_r = min(BLOCK_R, next_power_of_2(ranks))
    share = SHARE if alike or count * cdiv(ranks, block_r) < MOST_SHARED else width
    shares = cdiv(width, share)
    u_XU = x_XK.new_empty(shares * rows, ranks, dtype=torch.float32)
    per_token, each = rows // len(adapters_T), rows // len(x_XK)
    table = (None, None) if blocks is None else blocks
    options = {"COUNT": per_token, "BLOCK_M": block_m, "num_warps": 4, **pdl(x_XK)}
    _shrink_kernel[(count, cdiv(ranks, block_r), shares)](
        x_XK, adapters_T, a, u_XU, *table, rows, x_XK.stride(0), len(a), a.stride(0), share,
        SIZE=width, RANKS=ranks, EACH=each, BLOCK_R=block_r, BLOCK_K=by_size(BLOCK_K, block_m),
        num_stages=stages(x_XK, 3), **options,
    )  # fmt: skip
    _expand_kernel[(count, cdiv(max(sizes), BLOCK_N), len(sizes))](
        u_XU, adapters_T, b, starts, onto, *table, rows, shares, len(b), b.stride(0),
        b.stride(1) if b.ndim == 4 else 0,
        RANK=rank, RANKS=ranks, BLOCK_R=min(BLOCK_R, next_power_of_2(rank)), BLOCK_N=BLOCK_N,
        **options,
    )  # fmt: skip
    return onto


def _launch_add_lora(
    x_TK: torch.Tensor,
    adapters_T: torch.Tensor,
    a_SUK: torch.Tensor,
    b_SNR: torch.Tensor,
    starts: torch.Tensor,
    sizes: tuple[int, ...],
    *,
    onto: torch.Tensor,
) -> torch.Tensor:
    assert len(x_TK) == len(onto) == len(adapters_T)
    return launch_lora(x_TK, adapters_T, a_SUK, b_SNR, starts, sizes, onto=onto)


add_lora = op(reference=add_lora_reference, kernel=_launch_add_lora)
