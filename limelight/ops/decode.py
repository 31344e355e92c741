"""Kernels of attention for sequences with few queries, which read a long cache: split-KV.

The visible keys of a sequence are cut into parts, and each part gives

    m = max_j s_j;   l = sum_j exp(s_j - m);   a = sum_j exp(s_j - m) v_j

with s_j = q k_j * scale. A second kernel takes the parts of a query head together, in order:

    M = max(m, sink);   out = sum exp(m - M) a / (sum exp(m - M) l + exp(sink - M))

and applies the gate; where one part is enough, the first kernel does all that itself. It can take
queries, keys and values fresh from the projection: then it prepares them as `rope.prepare` does,
and the last part, or one of their own, has the new tokens, which its program writes into the
cache. How many parts there may be depends on shapes alone, so that a CUDA graph can be replayed;
how many there are, on the lengths that the device reads.

The kernels begin before those ahead of them in the stream have ended. They rely on this: the
tensors of a layout, and the keys and values of all tokens before a step's own, are complete before
the step's first kernel begins (between steps a copy to the device, or the start of a graph, waits
for everything before it; torch's own kernels do, too, and are waited for, so they may make a
layout, and so may those of ours that let none begin before they end). Only what the other kernels
of this step make is waited for.

A drafter's blocks are sequences of as many rows each, which may also see the rows behind them.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from limelight.ops import by_size, cdiv, next_power_of_2, pdl, stages
from limelight.ops.activation import gated
from limelight.ops.keys import (
    FEW_HEADS,
    HIDDEN,
    LOG2E,
    End,
    absorb,
    absorb_either,
    absorb_own,
    block_start,
    check_paging,
    empty_sums,
    empty_totals,
    end_with,
    fetch_either,
    halved,
    joined,
    kernel_view,
    locate,
    stored,
    totals,
    turned,
)
from limelight.ops.paging import FEW_QUERIES, LayerCache, PagedLayout
from limelight.ops.rope import (
    Heads,
    Rotation,
    angles,
    check_preparation,
    prepared,
    rounds_products,
    row_of,
)


@triton.jit
def _raw(row_R1, real_R1, t_R, cos, sin, C: tl.constexpr, TURN: tl.constexpr):
    """Heads [R, C] from the projection, and what turns them: their swapped halves and angles."""
    c = tl.arange(0, C)
    # What is needed last is loaded first: the compiler lets the others wait for the first use.
    if TURN:
        cos_RC = tl.load(cos + t_R[:, None] * C + c, mask=real_R1, other=0.0).to(tl.float32)
        sin_RC = tl.load(sin + t_R[:, None] * C + c, mask=real_R1, other=0.0).to(tl.float32)
        swapped_RC = tl.load(row_R1 + (c + C // 2) % C, mask=real_R1, other=0.0)
    x_RC = tl.load(row_R1 + c, mask=real_R1, other=0.0)
    if not TURN:
        swapped_RC, cos_RC, sin_RC = x_RC, x_RC, x_RC
    return x_RC, swapped_RC, cos_RC, sin_RC


@triton.jit
def _cut(
    seq_lens, starts, positions, b, splits, least, SIZE: tl.constexpr,
    WINDOW: tl.constexpr, KEYS: tl.constexpr, FRESH: tl.constexpr, APART: tl.constexpr,
    BLOCK: tl.constexpr, MIXED: tl.constexpr,
):  # fmt: skip
    """Of sequence b: its first query, queries, and length; the position of the first query, the
    first key that any of them sees, the end of those in the cache, and the tiles of keys a part;
    the parts with keys from the cache, and all parts. More queries than `MIXED` are another
    kernel's, and count as none."""
    length = tl.load(seq_lens + b)
    if BLOCK is None:
        start = tl.load(starts + b)
        queries = tl.load(starts + b + 1) - start
        at = length - queries
        if MIXED is not None:
            queries = tl.where(queries > MIXED, 0, queries)
    else:
        # The last rows of a block may lie behind the longest length, and count as its last.
        start, queries = b * BLOCK, tl.zeros_like(length) + BLOCK
        at = tl.minimum(tl.load(positions + start).to(tl.int32), length)
    first = tl.zeros_like(length)
    if WINDOW is not None:
        first = tl.maximum(at - WINDOW + 1, 0)
    cached = at if FRESH else length
    tiles = tl.cdiv(tl.maximum(cached - block_start(first, SIZE, KEYS), 0), KEYS)
    each = tl.maximum(tl.cdiv(tiles, splits), least)
    used = tl.cdiv(tiles, each)
    count = used + 1 if APART else tl.maximum(used, 1)
    return start, queries, length, at, first, cached, each, used, count


# Numbers that differ from batch to batch must not be compiled in.
@triton.jit(do_not_specialize=["table_stride", "splits", "least", "parts"])
def _split_kernel(
    q, pairs, scales, tables, rows, seq_lens, starts, positions, slots, weight, cos, sin, ssmax,
    sums, stats, sinks, gate, bias, out,
    q_stride, table_stride, half_stride, gate_stride, splits, least, parts, scale, eps,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, C: tl.constexpr, SIZE: tl.constexpr,
    WINDOW: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
    KEYS: tl.constexpr, FRESH: tl.constexpr, APART: tl.constexpr, NEW: tl.constexpr,
    FEW: tl.constexpr, BLOCK: tl.constexpr, MIXED: tl.constexpr, CAUSAL: tl.constexpr,
    TURN: tl.constexpr, ROUND: tl.constexpr, SSMAX: tl.constexpr, WHOLE: tl.constexpr,
    SINKS: tl.constexpr, GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One part of a sequence's keys for queries of one KV head; grid (part and rows, K, B).

    `FEW`: one query of a sequence, of few heads. `WHOLE`: the part holds all keys, and its program
    writes the result.
    """
    HEADS: tl.constexpr = GROUP * KV_HEADS
    dtype: tl.constexpr = q.dtype.element_ty
    FP8: tl.constexpr = pairs.dtype.element_ty == tl.int16
    WIDTH: tl.constexpr = C // 2 if FP8 else C
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    k_scale, v_scale = 1.0, 1.0
    if FP8:
        k_scale, v_scale = tl.load(scales), tl.load(scales + 1)
        scale *= k_scale
    part, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    kv, b = tl.program_id(1).to(tl.int64), tl.program_id(2)
    table = tables + tl.load(rows + b).to(tl.int64) * table_stride
    start, queries, length, first_at, first, cached, each, used, count = _cut(
        seq_lens,
        starts,
        positions,
        b,
        splits,
        least,
        SIZE,
        WINDOW,
        KEYS,
        FRESH,
        APART,
        BLOCK,
        MIXED,
    )
    some = (length > 0) & (tile * ROWS < queries * GROUP)
    old, new = some & (part < used), some & (part == count - 1) & FRESH
    # Who has nothing to do makes room; but the first must not let the grid end too early.
    if (tl.program_id(0) > 0) & ~(old | new | WHOLE):
        return
    begin = block_start(first, SIZE, KEYS) + part * each * KEYS
    end = tl.where(old, tl.minimum(begin + each * KEYS, cached), begin)
    slot_L = locate(table, begin, end, SIZE, KEYS)
    # A row is one of the KV head's query heads in one of the queries.
    r = tile * ROWS + tl.arange(0, ROWS)
    i, head = r // GROUP, kv * GROUP + r % GROUP
    real_R1, t_R = (i < queries)[:, None], (start + i).to(tl.int64)
    c, e = tl.arange(0, C), tl.arange(0, NEW)
    real_E1, t_E = ((e < queries) & new)[:, None], (start + e).to(tl.int64)
    if FRESH:
        slot_E = tl.load(slots + t_E, mask=(e < queries) & new & (tile == 0), other=-1)
        weight_RC, swapped_weight_RC = row_of(weight, ROWS, C), row_of(weight, ROWS, C, SWAP=True)
        weight_EC = row_of(weight + C, NEW, C)
        swapped_weight_EC = row_of(weight + C, NEW, C, SWAP=True)
        k_LC, v_CL = fetch_either(
            pairs, slot_L, kv, begin, first, end, half_stride, KV_HEADS, WIDTH, KEYS, FEW
        )
    if PDL:
        tl.extra.cuda.gdc_wait()
    if FRESH:
        row_E1 = q + t_E[:, None] * q_stride + (HEADS + kv) * C
        v_EC = tl.load(row_E1 + KV_HEADS * C + c, mask=real_E1, other=0.0)
        k_EC, swapped_EC, cos_EC, sin_EC = _raw(row_E1, real_E1, t_E, cos, sin, C, TURN)
    row_R1 = q + t_R[:, None] * q_stride + head[:, None] * C
    q_RC, swapped_RC, cos_RC, sin_RC = _raw(row_R1, real_R1, t_R, cos, sin, C, TURN)
    ssmax_R = tl.full((ROWS,), 1.0, tl.float32)
    if SSMAX:
        ssmax_R = tl.load(ssmax + t_R, mask=i < queries, other=0.0)
    m_R, l_R = tl.full((ROWS,), HIDDEN, tl.float32), tl.zeros((ROWS,), tl.float32)
    if WHOLE and SINKS:
        m_R, l_R = tl.load(sinks + head).to(tl.float32) * LOG2E, l_R + 1.0
    a_CR = empty_sums(ROWS, C, FP8, FEW)
    position_R = first_at + i
    if BLOCK is not None:
        position_R = tl.minimum(position_R, length - 1)
    if FRESH:
        q_RC = prepared(
            q_RC, swapped_RC, weight_RC, swapped_weight_RC, cos_RC, sin_RC,
            ssmax_R, eps, C, TURN, ROUND, SSMAX, dtype,
        )  # fmt: skip
    q_CR = turned(halved(q_RC) if FP8 else q_RC, FP8, FEW)
    if FRESH:
        if new:
            ready_EC = prepared(
                k_EC, swapped_EC, weight_EC, swapped_weight_EC, cos_EC, sin_EC,
                1.0, eps, C, TURN, ROUND, False, dtype,
            )  # fmt: skip
            k_EW = stored(ready_EC, k_scale, pairs.dtype.element_ty)
            v_EW = stored(v_EC, v_scale, pairs.dtype.element_ty)
            to_EW = pairs + kv * half_stride + slot_E[:, None] * WIDTH + tl.arange(0, WIDTH)
            tl.store(to_EW, k_EW, mask=(slot_E >= 0)[:, None])
            tl.store(to_EW + half_stride.to(tl.int64) * KV_HEADS, v_EW, mask=(slot_E >= 0)[:, None])
            if FEW:
                m_R, l_R, a_CR = absorb_own(q_CR, k_EW, v_EW, m_R, l_R, a_CR, scale, FP8)
            else:
                m_R, l_R, a_CR = absorb(
                    q_CR, tl.trans(k_EW), v_EW, cached, length, position_R, m_R, l_R, a_CR, scale,
                    WINDOW, NEW, False, FP8, CAUSAL,
                )  # fmt: skip
    else:
        k_LC, v_CL = fetch_either(
            pairs, slot_L, kv, begin, first, end, half_stride, KV_HEADS, WIDTH, KEYS, FEW
        )
    before_R, l_LR = m_R, empty_totals(l_R, KEYS, FEW)
    if old:
        m_R, l_LR, a_CR = absorb_either(
            q_CR, k_LC, v_CL, begin, end, position_R, m_R, l_LR, a_CR, scale,
            WINDOW, KEYS, FP8, CAUSAL, FEW,
        )  # fmt: skip
        slot_L = locate(table, begin + KEYS, end, SIZE, KEYS)
        for at in tl.range(begin + KEYS, end, KEYS):
            k_LC, v_CL = fetch_either(
                pairs, slot_L, kv, at, first, end, half_stride, KV_HEADS, WIDTH, KEYS, FEW
            )
            # A step ahead, so that keys and values can be copied several ahead.
            slot_L = locate(table, at + KEYS, end, SIZE, KEYS)
            m_R, l_LR, a_CR = absorb_either(
                q_CR, k_LC, v_CL, at, end, position_R, m_R, l_LR, a_CR, scale,
                WINDOW, KEYS, FP8, CAUSAL, FEW,
            )  # fmt: skip
    l_R = totals(l_R, l_LR, before_R, m_R, FEW)
    a_RC = joined(turned(a_CR, FP8, FEW), v_scale, FP8)
    if WHOLE:
        end_with(
            out, a_RC, l_R, t_R[:, None], head, real_R1, gate, bias, gate_stride, HEADS, C, GATE
        )
    else:
        to_R = ((b * QUERIES + i).to(tl.int64) * HEADS + head) * parts + part
        tl.store(sums + to_R[:, None] * C + c, a_RC, mask=real_R1)
        tl.store(stats + to_R * 2, m_R, mask=i < queries)
        tl.store(stats + to_R * 2 + 1, l_R, mask=i < queries)


@triton.jit(do_not_specialize=["splits", "least", "parts"])
def _combine_kernel(
    sums, stats, seq_lens, starts, positions, sinks, gate, bias, out, gate_stride, splits, least,
    parts,
    HEADS: tl.constexpr, C: tl.constexpr, SIZE: tl.constexpr, WINDOW: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, FRESH: tl.constexpr, APART: tl.constexpr,
    BLOCK: tl.constexpr, MIXED: tl.constexpr, SINKS: tl.constexpr, GATE: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some channels of one head of one query; grid (query, head and channels, B)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(1) // (C // BLOCK_C)
    c = tl.program_id(1) % (C // BLOCK_C) * BLOCK_C + tl.arange(0, BLOCK_C)
    top, total, bias_value = HIDDEN + 0.0, 0.0, 0.0
    if SINKS:
        top, total = tl.load(sinks + head).to(tl.float32) * LOG2E, 1.0
    if GATE:
        bias_value = tl.load(bias + head).to(tl.float32)
    i, b = tl.program_id(0), tl.program_id(2)
    start, queries, length, _at, _first, _cached, _each, _used, count = _cut(
        seq_lens,
        starts,
        positions,
        b,
        splits,
        least,
        SIZE,
        WINDOW,
        KEYS,
        FRESH,
        APART,
        BLOCK,
        MIXED,
    )
    if PDL:
        tl.extra.cuda.gdc_wait()
    if i < queries:
        count = tl.where(length > 0, count, 0)
        t = (start + i).to(tl.int64)
        if GATE:
            gate_C = tl.load(gate + t * gate_stride + head * C + c)
        from_ = ((b * QUERIES + i).to(tl.int64) * HEADS + head) * parts
        a_C = tl.zeros((BLOCK_C,), tl.float32)
        for at in tl.range(0, count, BLOCK_P):
            p = at + tl.arange(0, BLOCK_P)
            # First, for the compiler would let it wait for the maximum.
            a_PC = tl.load(
                sums + (from_ + p)[:, None] * C + c, mask=(p < count)[:, None], other=0.0
            )
            m_P = tl.load(stats + (from_ + p) * 2, mask=p < count, other=HIDDEN)
            l_P = tl.load(stats + (from_ + p) * 2 + 1, mask=p < count, other=0.0)
            new = tl.maximum(top, tl.max(m_P, axis=0))
            weight_P, shrink = tl.exp2(m_P - new), tl.exp2(top - new)
            total = total * shrink + tl.sum(weight_P * l_P, axis=0)
            a_C = a_C * shrink + tl.sum(weight_P[:, None] * a_PC, axis=0)
            top = new
        out_C = (a_C / tl.where(total > 0.0, total, 1.0)).to(out.dtype.element_ty)
        if GATE:
            out_C = gated(out_C, gate_C, bias_value)
        tl.store(out + (t * HEADS + head) * C + c, out_C)


@dataclass(frozen=True, slots=True)
class Tile:
    """How keys are cut: keys at once, the most parts, the least tiles of keys in a part.

    `apart`: new tokens are a part of their own; else they make the last part longer.
    """

    keys: int
    splits: int
    least: int
    warps: int = 4
    stages: int = 3
    apart: bool = False


# By the most pairs of a sequence and a KV head: many of them fill a GPU without many parts each,
# and short sequences need few parts, however many their long neighbours are cut into. With the
# part of the new tokens they are a power of two: so many are read at once.
FULL = {
    2: Tile(64, 255, 1, stages=4, apart=True),
    8: Tile(64, 63, 1, stages=4, apart=True),
    64: Tile(64, 31, 2, apart=True),
    256: Tile(64, 32, 8),
    2**31: Tile(64, 8, 8),
}
WINDOW = {
    8: Tile(32, 31, 1, apart=True),
    64: Tile(64, 8, 1),
    256: Tile(32, 4, 2),
    2**31: Tile(32, 1, 1),
}
# Twice the keys of FP8 would be as many bytes at once, but half as many programs fit on a
# multiprocessor, and making FP8 wider takes many of them: more stages instead.
FULL_FP8 = {
    2: Tile(64, 255, 1, stages=4, apart=True),
    8: Tile(64, 127, 1, stages=4, apart=True),
    64: Tile(64, 31, 2, stages=4, apart=True),
    256: Tile(64, 32, 8, stages=4),
    2**31: Tile(64, 8, 8),
}
# Windows of more keys are cut as whole sequences are.
NARROW = 1024
# Rows of queries and heads in a program, at most; with many of them it takes more warps.
MOST_ROWS = 128
SUMS_OF_A_WARP = 2048
# Query heads of all sequences from which parts are taken together eight at a time.
MANY_HEADS = 512


def tile_of(pairs: int, *, window: int | None, fp8: bool) -> Tile:
    """The tile for this many pairs of a sequence and a KV head."""
    narrow = window is not None and window <= NARROW
    tiles = WINDOW if narrow else FULL_FP8 if fp8 else FULL
    return by_size(tiles, pairs)


@dataclass(frozen=True, slots=True)
class Preparation:
    """What makes queries and keys of a projection's rows."""

    weight_2C: torch.Tensor
    heads: Heads
    turn: Rotation | None
    ssmax_T: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Rows:
    """Sequences of as many rows each, of which those at the end may share the last position.

    Not `causal`: a row also sees those behind it, within the window.
    """

    each: int
    positions_T: torch.Tensor
    causal: bool

    def check(self, q_TN: torch.Tensor, few: int) -> None:
        assert self.each <= FEW_QUERIES and self.positions_T.is_contiguous()
        assert len(self.positions_T) == len(q_TN) == few * self.each


@dataclass(frozen=True, slots=True)
class Split:
    """How a launch shares out its work: `few` sequences of up to `queries` each, whose rows of
    queries and heads are cut into `pieces` of `rows`, and whose keys into at most `parts`.

    `apart`: one of them is that of the new tokens. A part has no fewer than `least` tiles of keys.
    """

    tile: Tile
    few: int
    queries: int
    rows: int
    pieces: int
    least: int
    apart: bool

    @classmethod
    def of(
        cls, layout: PagedLayout, tile: Tile | None, blocks: Rows | None,
        *, heads: int, kv_heads: int, fp8: bool, fresh: bool,
    ) -> "Split":  # fmt: skip
        """For the sequences of a layout, or of drafts, in as many query heads and KV heads."""
        most = layout.mixed or layout.max_query if blocks is None else blocks.each
        queries = min(next_power_of_2(most), FEW_QUERIES)
        group, few = heads // kv_heads, layout.few if layout.mixed is None else len(layout.rows_B)
        one = blocks is None and queries == 1 and group <= FEW_HEADS
        rows = FEW_HEADS if one else min(max(16, next_power_of_2(group * queries)), MOST_ROWS)
        tile = tile or tile_of((layout.busy or few) * kv_heads, window=layout.window, fp8=fp8)
        return cls(
            tile, few, queries, rows,
            pieces=cdiv(group * queries, rows),
            # The more queries, the more sums a part leaves behind.
            least=max(tile.least, queries // 2),
            apart=tile.apart and fresh and tile.splits > 1,
        )  # fmt: skip

    @property
    def few_heads(self) -> bool:
        """Whether all rows of a program are heads of one query, and few."""
        return self.rows == FEW_HEADS

    @property
    def whole(self) -> bool:
        """Whether there is one part alone, which leaves no sums behind."""
        return self.tile.splits == 1

    @property
    def parts(self) -> int:
        return self.tile.splits + self.apart

    def sums(self, q_TN: torch.Tensor, heads: int, size: int) -> torch.Tensor | None:
        """Room for FP32 numbers [few * queries, heads, parts, size], if parts are to be summed."""
        if self.whole:
            return None
        shape = self.few * self.queries, heads, self.parts, size
        return torch.empty(shape, dtype=torch.float32, device=q_TN.device)


def launch(
    q_TN: torch.Tensor,
    cache: LayerCache,
    layout: PagedLayout,
    out_THC: torch.Tensor,
    end: End,
    *,
    fresh: Preparation | None,
    scale: float,
    blocks: Rows | None = None,
    tile: Tile | None = None,
) -> None:
    """Attention of the `few` first sequences into `out_THC`, or of those with few queries.

    Rows of `q_TN` are queries [H * C]; or [q | k | v | ...] that are to be prepared. `blocks` tells
    where they stand, instead of the layout's starts, in sequences that are drafts.
    """
    (_, heads, head_dim), kv_heads = out_THC.shape, cache.pairs_2KSC.shape[1]
    check_paging(q_TN, cache, layout, out_THC)
    split = Split.of(
        layout, tile, blocks, heads=heads, kv_heads=kv_heads,
        fp8=cache.scales_2 is not None, fresh=fresh is not None,
    )  # fmt: skip
    sums, stats = (split.sums(q_TN, heads, size) for size in (head_dim, 2))
    weight_2C, turn, ssmax_T, eps = None, None, None, 0.0
    if fresh is not None:
        weight_2C, turn, ssmax_T = fresh.weight_2C, fresh.turn, fresh.ssmax_T
        eps = fresh.heads.eps
        check_preparation(weight_2C, cache, turn, ssmax_T, heads=fresh.heads, tokens=len(out_THC))
    positions_T = None
    if blocks is not None:
        assert fresh is not None
        blocks.check(q_TN, split.few)
        positions_T = blocks.positions_T
    pairs, rounds, tile = kernel_view(cache), rounds_products(turn, q_TN), split.tile
    common: dict[str, object] = {
        "C": head_dim, "SIZE": layout.block_size, "WINDOW": layout.window,
        "QUERIES": split.queries, "KEYS": tile.keys, "FRESH": fresh is not None,
        "APART": split.apart, "BLOCK": None if blocks is None else blocks.each,
        "MIXED": layout.mixed, **end.options, **pdl(q_TN),
    }  # fmt: skip
    _split_kernel[(split.parts * split.pieces, kv_heads, split.few)](
        q_TN, pairs, cache.scales_2, layout.tables_SN, layout.rows_B, layout.seq_lens_B,
        layout.starts_B, positions_T, layout.slots_T, weight_2C, *angles(turn), ssmax_T,
        sums, stats, *end.arguments, out_THC,
        q_TN.stride(0), layout.tables_SN.stride(0), pairs.stride(1), end.gate_stride,
        tile.splits, split.least, split.parts, scale * LOG2E.value, eps,
        GROUP=heads // kv_heads, KV_HEADS=kv_heads, ROWS=split.rows, TILES=split.pieces,
        NEW=1 if split.few_heads else max(16, split.queries), FEW=split.few_heads,
        CAUSAL=blocks is None or blocks.causal, WHOLE=split.whole,
        TURN=turn is not None, ROUND=rounds, SSMAX=ssmax_T is not None,
        num_warps=tile.warps if split.rows < 64 else 8, num_stages=stages(q_TN, tile.stages),
        enable_fp_fusion=not rounds, **common,
    )  # fmt: skip
    if sums is not None and stats is not None:
        _combine(split, sums, stats, layout, positions_T, end, out_THC, common)


def _combine(
    split: Split,
    sums: torch.Tensor,
    stats: torch.Tensor,
    layout: PagedLayout,
    positions_T: torch.Tensor | None,
    end: End,
    out_THC: torch.Tensor,
    common: dict[str, object],
) -> None:
    """The parts of each query head together, with the sinks and the gate."""
    _, heads, head_dim = out_THC.shape
    # All parts at once, as long as they fit in registers; by one warp if possible, which need not
    # wait for others. Of many sequences most have few parts.
    at_once = min(next_power_of_2(split.parts), 256 if split.few * heads <= MANY_HEADS else 8)
    channels = min(head_dim, max(SUMS_OF_A_WARP // at_once, 32))
    _combine_kernel[(split.queries, heads * head_dim // channels, split.few)](
        sums, stats, layout.seq_lens_B, layout.starts_B, positions_T, *end.arguments, out_THC,
        end.gate_stride, split.tile.splits, split.least, split.parts, HEADS=heads,
        BLOCK_P=at_once, BLOCK_C=channels,
        num_warps=max(1, at_once * channels // SUMS_OF_A_WARP), **common,
    )  # fmt: skip
