"""Long prompts: queries over whole pieces of keys, by cuDNN, which is faster than our own kernel.

A piece gives, for each query and head, its own result and the logarithm of its sum,

    lse = log sum_j exp(s_j);   o = sum_j exp(s_j - lse) v_j

and two that follow each other join as

    lse = log(exp(lse_1) + exp(lse_2));   o = o_1 exp(lse_1 - lse) + o_2 exp(lse_2 - lse)

with o_1 and o_2 rounded to the type of the queries, and their sums FP32. The kernel of `prefill.py`
goes on from there, with the keys that are left, the sink and the gate. cuDNN knows no pages, so the
keys and values of a piece are copied side by side first; and it makes a plan for each shape, so
pieces and numbers of queries are multiples.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from limelight.ops import op
from limelight.ops.paging import LayerCache, PagedLayout, Prompt

PIECE, QUERIES = 8192, 1024
# Pairs of queries and keys from which copying and joining pay.
LEAST_PAIRS = 2**23
# The same in a layer from which a step takes longer than its launches, so a graph gains nothing.
WITHOUT_GRAPH = 2**25
BLOCK_H = 8


@dataclass(frozen=True, slots=True)
class Far:
    """What the first `rows` queries of sequence `b` have seen: their own keys up to each, and the
    first `keys` of all. [rows, H, C] and [rows, H], FP32."""

    b: int
    rows: int
    keys: int
    out_THC: torch.Tensor
    lse_TH: torch.Tensor


def chosen(
    prompts: Sequence[Prompt],
    cache: LayerCache,
    *,
    dtype: torch.dtype,
    block_size: int,
    least: int = LEAST_PAIRS,
) -> Prompt | None:
    """The prompt of a step for which pieces pay most, if any does; `dtype` is that of queries."""
    if not prompts or not able(cache, dtype=dtype, block_size=block_size):
        return None
    most = max(prompts, key=_pairs)
    return most if _pairs(most) >= least else None


def able(cache: LayerCache, *, dtype: torch.dtype, block_size: int) -> bool:
    """Whether a cache holds what cuDNN can read, on a GPU where that is faster than our kernel."""
    pairs = cache.pairs_2KSC
    if pairs.dtype != dtype or PIECE % block_size:
        return False
    if not pairs.is_cuda:
        return True
    hopper = torch.cuda.get_device_capability(pairs.device)[0] == 9
    of_16_bits = pairs.dtype in (torch.bfloat16, torch.float16)
    return hopper and of_16_bits and torch.backends.cudnn.is_available()


def _pairs(prompt: Prompt) -> int:
    rows = prompt.queries // QUERIES * QUERIES
    return rows * (prompt.past // PIECE * PIECE + rows // 2)


def far(
    q_THC: torch.Tensor, cache: LayerCache, layout: PagedLayout, prompt: Prompt, *, scale: float
) -> Far:
    """All pieces of a prompt's keys, for as many of its queries as are a multiple."""
    rows, keys = prompt.queries // QUERIES * QUERIES, prompt.past // PIECE * PIECE
    q_THC = q_THC[prompt.start : prompt.start + rows]
    own_T = layout.slots_T[prompt.start : prompt.start + rows]
    k_KTC, v_KTC = cache.pairs_2KSC.flatten(0, 1).index_select(1, own_T).chunk(2)
    out_THC, lse_TH = attend_piece(q_THC, k_KTC, v_KTC, causal=True, scale=scale)
    sums = out_THC.float(), lse_TH
    if keys:
        blocks_M = _blocks(layout, prompt.b, keys)
        pairs_JMX = cache.pairs_2KSC.flatten(0, 1).unflatten(1, (-1, layout.block_size)).flatten(2)
        for piece_M in blocks_M.split(PIECE // layout.block_size):
            k_KLC, v_KLC = (
                x_KMX.view(len(x_KMX), -1, q_THC.shape[2])
                for x_KMX in pairs_JMX.index_select(1, piece_M).chunk(2)
            )
            join(*sums, *attend_piece(q_THC, k_KLC, v_KLC, causal=False, scale=scale))
    return Far(prompt.b, rows, keys, *sums)


def _blocks(layout: PagedLayout, b: int, keys: int) -> torch.Tensor:
    """Those of a sequence's first keys."""
    table_M = layout.tables_SN.index_select(0, layout.rows_B[b : b + 1])[0]
    return table_M[: keys // layout.block_size]


def attend_piece_reference(
    q_THC: torch.Tensor, k_KLC: torch.Tensor, v_KLC: torch.Tensor, *, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries over all L keys, or `causal`, with L = T, up to their own: o [T, H, C], lse [T, H].

    o is of the queries' type, lse FP32.
    """
    (queries, heads, _), kv_heads = q_THC.shape, len(k_KLC)
    q_KGTC = q_THC.float().view(queries, kv_heads, heads // kv_heads, -1).permute(1, 2, 0, 3)
    scores_KGTL = q_KGTC @ k_KLC.float()[:, None].transpose(2, 3) * scale
    if causal:
        ahead_TL = torch.ones(scores_KGTL.shape[2:], dtype=torch.bool, device=q_THC.device).triu(1)
        scores_KGTL = scores_KGTL.masked_fill(ahead_TL, float("-inf"))
    lse_KGT = scores_KGTL.logsumexp(-1)
    out_KGTC = (scores_KGTL - lse_KGT[..., None]).exp() @ v_KLC.float()[:, None]
    out_THC = out_KGTC.permute(2, 0, 1, 3).reshape(q_THC.shape).to(q_THC.dtype)
    return out_THC.contiguous(), lse_KGT.flatten(0, 1).T.contiguous()


def _launch_attend_piece(
    q_THC: torch.Tensor, k_KLC: torch.Tensor, v_KLC: torch.Tensor, *, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out_1HTC, lse_1HT1, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q_THC.transpose(0, 1)[None], k_KLC[None], v_KLC[None],
        None, True, 0.0, causal, False, scale=scale,
    )  # fmt: skip
    lse_HT = lse_1HT1.view(q_THC.shape[1], q_THC.shape[0])
    return out_1HTC[0].transpose(0, 1).contiguous(), lse_HT.T.contiguous()


def join_reference(
    out_THC: torch.Tensor, lse_TH: torch.Tensor, new_THC: torch.Tensor, new_TH: torch.Tensor
) -> None:
    """The next piece's part into what has been seen, in place."""
    both_TH = torch.logaddexp(lse_TH, new_TH)
    shares = ((x_TH - both_TH).exp()[..., None] for x_TH in (lse_TH, new_TH))
    out_THC.copy_(out_THC * next(shares) + new_THC.float() * next(shares))
    lse_TH.copy_(both_TH)


@triton.jit
def _join_kernel(
    out, lse, new, new_lse, HEADS: tl.constexpr, C: tl.constexpr, BLOCK_H: tl.constexpr
):
    """Some heads of a query; grid (T, heads)."""
    h, c = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, C)
    at_H, held_H = tl.program_id(0).to(tl.int64) * HEADS + h, h < HEADS
    at_HC = at_H[:, None] * C + c
    old_H = tl.load(lse + at_H, mask=held_H, other=0.0)
    new_H = tl.load(new_lse + at_H, mask=held_H, other=0.0)
    top_H = tl.maximum(old_H, new_H)
    old_share_H, new_share_H = tl.exp(old_H - top_H), tl.exp(new_H - top_H)
    sum_H = old_share_H + new_share_H
    a_HC = tl.load(out + at_HC, mask=held_H[:, None], other=0.0)
    b_HC = tl.load(new + at_HC, mask=held_H[:, None], other=0.0).to(tl.float32)
    joined_HC = a_HC * (old_share_H / sum_H)[:, None] + b_HC * (new_share_H / sum_H)[:, None]
    tl.store(out + at_HC, joined_HC, mask=held_H[:, None])
    tl.store(lse + at_H, top_H + tl.log(sum_H), mask=held_H)


def _launch_join(
    out_THC: torch.Tensor, lse_TH: torch.Tensor, new_THC: torch.Tensor, new_TH: torch.Tensor
) -> None:
    (queries, heads, size), all_of = out_THC.shape, (out_THC, lse_TH, new_THC, new_TH)
    assert out_THC.dtype == lse_TH.dtype == new_TH.dtype == torch.float32
    assert all(x.is_contiguous() for x in all_of) and size & (size - 1) == 0
    grid = (queries, -(-heads // BLOCK_H))
    _join_kernel[grid](*all_of, HEADS=heads, C=size, BLOCK_H=BLOCK_H, num_warps=4)


attend_piece = op(reference=attend_piece_reference, kernel=_launch_attend_piece)
join = op(reference=join_reference, kernel=_launch_join)
