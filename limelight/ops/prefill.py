"""The kernel of attention for sequences with many queries: tiles of queries, FlashAttention's way.

The running maximum starts at the sink and the running sum at 1, the sink's own term. Weights are
rounded to the type of the values before they are divided by the sum of the unrounded ones.

Keys that all queries of a tile see are read without masks, after the others. Where a query's result
must not depend on those beside it (`ordered`), all keys are read in their order, in tiles that are
counted from the sequence's first token: tiles that a query does not see leave its sums as they are.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from limelight.ops import by_size, cdiv, next_power_of_2, pdl, stages
from limelight.ops.far import Far
from limelight.ops.keys import (
    HIDDEN,
    LOG2E,
    End,
    absorb,
    block_start,
    check_paging,
    empty_sums,
    end_with,
    fetch,
    halved,
    joined,
    kernel_view,
    locate,
)
from limelight.ops.paging import LayerCache, PagedLayout


@triton.jit
def _located(
    tile, starts, few, count, QUERIES: tl.constexpr, MIXED: tl.constexpr, BLOCK_B: tl.constexpr
):
    """The sequence of a tile of queries, as they follow each other behind the `few` first
    sequences, and its place among the sequence's; of `count` where there are no more."""
    sequence, before = few * 0, few * 0
    end = few * 0
    for first in range(0, count, BLOCK_B):
        b = first + tl.arange(0, BLOCK_B)
        start_B = tl.load(starts + few + b, mask=b < count, other=0)
        queries_B = tl.load(starts + few + b + 1, mask=b < count, other=0) - start_B
        if MIXED is not None:
            queries_B = tl.where(queries_B > MIXED, queries_B, 0)
        tiles_B = tl.cdiv(queries_B, QUERIES)
        passed_B = (end + tl.cumsum(tiles_B, axis=0) <= tile) & (b < count)
        sequence += tl.sum(passed_B.to(tl.int32), axis=0)
        before += tl.sum(tl.where(passed_B, tiles_B, 0), axis=0)
        end += tl.sum(tiles_B, axis=0)
    return sequence, tile - before


@triton.jit(do_not_specialize=["far_b", "far_rows", "few", "count", "table_stride"])
def _prefill_kernel(
    q, pairs, scales, tables, rows, seq_lens, starts, sinks, gate, bias, far, far_lse, out,
    far_b, far_rows, far_keys, few, count, q_stride, table_stride, half_stride, gate_stride, scale,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, C: tl.constexpr, SIZE: tl.constexpr,
    WINDOW: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    MIXED: tl.constexpr, ORDERED: tl.constexpr, SINKS: tl.constexpr, GATE: tl.constexpr,
    BLOCK_B: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """QUERIES queries of one sequence and KV head; grid (tiles of all sequences, K)."""
    HEADS: tl.constexpr = GROUP * KV_HEADS
    FP8: tl.constexpr = pairs.dtype.element_ty == tl.int16
    WIDTH: tl.constexpr = C // 2 if FP8 else C
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    v_scale = 1.0
    if FP8:
        scale *= tl.load(scales)
        v_scale = tl.load(scales + 1)
    kv = tl.program_id(1).to(tl.int64)
    sequence, place = _located(tl.program_id(0), starts, few, count, QUERIES, MIXED, BLOCK_B)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if sequence < count:
        b = few + sequence
        start, length = tl.load(starts + b), tl.load(seq_lens + b)
        queries = tl.load(starts + b + 1) - start
        # The last queries see the most keys, so they are begun first.
        i0 = (tl.cdiv(queries, QUERIES) - 1 - place) * QUERIES
        table = tables + tl.load(rows + b).to(tl.int64) * table_stride
        # A row is one of the KV head's query heads in one of the queries.
        r = tl.arange(0, ROWS)
        i, head = i0 + r // GROUP, kv * GROUP + r % GROUP
        real_R1 = ((i < queries) & (r < QUERIES * GROUP))[:, None]
        position_R, t_R1 = length - queries + i, (start + i).to(tl.int64)[:, None]
        c = tl.arange(0, C)
        q_RC = tl.load(q + t_R1 * q_stride + head[:, None] * C + c, mask=real_R1, other=0.0)
        m_R, l_R = tl.full((ROWS,), HIDDEN, tl.float32), tl.zeros((ROWS,), tl.float32)
        if SINKS:
            m_R, l_R = tl.load(sinks + head).to(tl.float32) * LOG2E, l_R + 1.0
        a_RC = empty_sums(ROWS, C, FP8)
        if FP8:
            q_RC = halved(q_RC)

        # All queries see the keys from `inner` to `outer`; the tiles around have hidden ones.
        oldest = length - queries + i0
        end = tl.minimum(oldest + QUERIES, length)
        first = tl.zeros_like(length)
        if far is not None:
            begun = (b == far_b) & (i0 + QUERIES <= far_rows)
            first = tl.where(begun, far_keys, first)
            end = tl.where(begun, length - queries, end)
            oldest = tl.minimum(oldest, end - 1)
            at_R, seen_R = i * HEADS + head, begun & (r < QUERIES * GROUP)
            lse_R = tl.load(far_lse + at_R, mask=seen_R, other=HIDDEN) * LOG2E
            top_R = tl.maximum(m_R, lse_R)
            share_R = tl.exp2(lse_R - top_R)
            m_R, l_R = top_R, l_R * tl.exp2(m_R - top_R) + tl.where(seen_R, share_R, 0.0)
            a_RC = tl.load(
                far + at_R[:, None].to(tl.int64) * C + c, mask=seen_R[:, None], other=0.0
            )
            a_RC *= share_R[:, None]
        inner, begin = first, first
        if WINDOW is not None:
            first = tl.maximum(oldest - WINDOW + 1, 0)
            begin = block_start(first, SIZE, KEYS)
            inner = tl.minimum(tl.maximum(end - WINDOW, 0), end)
            inner = begin + tl.cdiv(inner - begin, KEYS) * KEYS
        outer = tl.maximum(begin + (oldest + 1 - begin) // KEYS * KEYS, inner)
        if ORDERED:
            begin = first // KEYS * KEYS
            inner, outer = begin, begin
        left = (inner - begin) // KEYS
        for edge in tl.range(0, left + tl.cdiv(end - outer, KEYS)):
            at = tl.where(edge < left, begin + edge * KEYS, outer + (edge - left) * KEYS)
            slot_L = locate(table, at, end, SIZE, KEYS)
            k_CL, v_LC = fetch(
                pairs, slot_L, kv, at, first, end, half_stride, KV_HEADS, WIDTH, KEYS, False
            )
            m_R, l_R, a_RC = absorb(
                q_RC, k_CL, v_LC, at, end, position_R, m_R, l_R, a_RC, scale,
                WINDOW, KEYS, False, FP8,
            )  # fmt: skip
        slot_L = locate(table, inner, outer, SIZE, KEYS)
        for at in tl.range(inner, outer, KEYS):
            k_CL, v_LC = fetch(
                pairs, slot_L, kv, at, first, end, half_stride, KV_HEADS, WIDTH, KEYS, True
            )
            # A step ahead, so that keys and values can be copied several ahead.
            slot_L = locate(table, at + KEYS, outer, SIZE, KEYS)
            m_R, l_R, a_RC = absorb(
                q_RC, k_CL, v_LC, at, end, position_R, m_R, l_R, a_RC, scale,
                WINDOW, KEYS, True, FP8,
            )  # fmt: skip

        a_RC = joined(a_RC, v_scale, FP8)
        end_with(out, a_RC, l_R, t_R1, head, real_R1, gate, bias, gate_stride, HEADS, C, GATE)


# Sequences that a program looks at together to find its own.
BLOCK_B = 64


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows (heads of queries) and keys at once."""

    rows: int
    keys: int
    warps: int
    stages: int


# By the most queries of a sequence.
FULL = {4096: Tile(64, 64, 4, 3), 2**31: Tile(128, 128, 8, 2)}
WINDOW = {2**31: Tile(64, 64, 4, 3)}
# Keys and values of FP8 are made wider once for all rows of a tile.
FULL_FP8 = {4096: Tile(128, 64, 8, 3), 2**31: Tile(128, 128, 8, 2)}
WINDOW_FP8 = {2**31: Tile(128, 64, 8, 3)}


def launch(
    q_TN: torch.Tensor,
    cache: LayerCache,
    layout: PagedLayout,
    out_THC: torch.Tensor,
    end: End,
    *,
    scale: float,
    far: Far | None = None,
    tile: Tile | None = None,
    ordered: bool = False,
) -> None:
    """Attention of all sequences but the `few` first, or those with few queries, into `out_THC`;
    from where `far` leaves one of them; `ordered`, of all, with the same tiles in every batch."""
    (_, heads, head_dim), kv_heads = out_THC.shape, cache.pairs_2KSC.shape[1]
    check_paging(q_TN, cache, layout, out_THC)
    pairs, group = kernel_view(cache), heads // kv_heads
    full, windowed = (FULL, WINDOW) if cache.scales_2 is None else (FULL_FP8, WINDOW_FP8)
    most = 1 if ordered else layout.max_query
    tile = tile or by_size(full if layout.window is None else windowed, most)
    rows = max(tile.rows, next_power_of_2(group))
    queries = rows // group
    mixed = None if ordered else layout.mixed
    few = 0 if ordered or mixed is not None else layout.few
    count = len(layout.rows_B) - few
    begun = (None, None) if far is None else (far.out_THC, far.lse_TH)
    place = (0, 0, 0) if far is None else (far.b, far.rows, far.keys)
    # Each sequence has at most one tile that is not full.
    _prefill_kernel[(cdiv(len(q_TN), queries) + min(count, len(q_TN)), kv_heads)](
        q_TN, pairs, cache.scales_2, layout.tables_SN, layout.rows_B, layout.seq_lens_B,
        layout.starts_B, *end.arguments, *begun, out_THC,
        *place, few, count, q_TN.stride(0), layout.tables_SN.stride(0), pairs.stride(1),
        end.gate_stride, scale * LOG2E.value,
        GROUP=group, KV_HEADS=kv_heads, C=head_dim, SIZE=layout.block_size,
        WINDOW=layout.window, QUERIES=queries, ROWS=rows, KEYS=tile.keys, MIXED=mixed,
        ORDERED=ordered, BLOCK_B=BLOCK_B,
        **end.options, num_warps=tile.warps, num_stages=stages(q_TN, tile.stages), **pdl(q_TN),
    )  # fmt: skip
