"""Products and attention whose rows do not depend on what else is computed with them.

A library's product of many rows adds in another order than that of one row. Here every product is
one of TILE rows, the last ones padding: then a row's result depends neither on the number of rows
nor on its place. Attention adds by tiles of KEYS keys, counted from the sequence's first token, so
neither its batch nor its chunk matters; tiles that a row does not see add zeros. All but products
is for a CPU: on a GPU `prefill.py`, `grouped.py` and `router.py` keep to one tile.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from limelight.ops.paging import LayerCache, PagedLayout

TILE, QUERIES, KEYS = 16, 8, 64
TILE_ON_GPU = 64
# Products of BF16 add up to so many keys in their order, whatever their number: one product has all
# of a span, and its numbers are those of transformers' products of whole sequences.
SPAN = 16 * KEYS
# Scores that exist at once; a tile of queries is the least.
SCORES_AT_ONCE = 2**22


def linear(x_TF: torch.Tensor, weight_DF: torch.Tensor) -> torch.Tensor:
    """x W^T in the type of both, [T, D]."""
    rows, tile = len(x_TF), TILE if x_TF.device.type == "cpu" else TILE_ON_GPU
    padded_TF = F.pad(x_TF, (0, 0, 0, -rows % tile))
    parts = padded_TF.split(tile) if rows else [x_TF]
    return torch.cat([F.linear(part_XF, weight_DF) for part_XF in parts])[:rows]


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """In the type of x. In FP32 torch's own has another exp for the last few of its numbers."""
    if x.dtype != torch.float32:
        return torch.sigmoid(x)
    return 1.0 / (1.0 + torch.exp(-x))


def silu(x: torch.Tensor) -> torch.Tensor:
    """The same of x * sigmoid(x)."""
    if x.dtype != torch.float32:
        return F.silu(x)
    return x / (1.0 + torch.exp(-x))


def weighted_sum(weights_TN: torch.Tensor, out_TND: torch.Tensor) -> torch.Tensor:
    """The sum over N in FP32, in its order, rounded once: [T, D]."""
    total_TD = weights_TN[:, :1] * out_TND[:, 0]
    for n in range(1, weights_TN.shape[1]):
        total_TD = total_TD + weights_TN[:, n : n + 1] * out_TND[:, n]
    return total_TD.to(out_TND.dtype)


@dataclass(frozen=True, slots=True)
class Queries:
    """J tiles of up to QUERIES queries, each of one sequence; -1 is no query."""

    rows_JQ: torch.Tensor  # in the batch
    positions_JQ: torch.Tensor
    tables_JN: torch.Tensor  # of their sequences
    lowest_J: torch.Tensor  # the first key that one of them sees
    highest_J: torch.Tensor

    def __getitem__(self, part: slice) -> "Queries":
        return Queries(
            self.rows_JQ[part], self.positions_JQ[part], self.tables_JN[part],
            self.lowest_J[part], self.highest_J[part],
        )  # fmt: skip


def _queries(layout: PagedLayout) -> Queries | None:
    """The batch's queries in tiles, without padding."""
    starts, lengths = layout.starts_B.tolist(), layout.seq_lens_B.tolist()
    rows, positions, owners = [], [], []
    for b, (first, end, length) in enumerate(zip(starts[:-1], starts[1:], lengths, strict=True)):
        for at in range(first, end if length else first, QUERIES):
            count = min(QUERIES, end - at)
            nothing = [-1] * (QUERIES - count)
            rows.append([*range(at, at + count), *nothing])
            position = length - end + at
            positions.append([*range(position, position + count), *nothing])
            owners.append(b)
    if not rows:
        return None
    positions_JQ = torch.tensor(positions)
    window = layout.window
    lowest_J = positions_JQ[:, 0] * 0 if window is None else positions_JQ[:, 0] - window + 1
    tables_JN = layout.tables_SN[layout.rows_B[torch.tensor(owners)].long()].long()
    return Queries(
        torch.tensor(rows), positions_JQ, tables_JN, lowest_J.clamp(min=0),
        positions_JQ.max(dim=1).values,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class KeyTile:
    """A tile of keys for each tile of queries: where they lie, and which query sees which."""

    slots_JL: torch.Tensor
    seen_JQL: torch.Tensor


def _key_tiles(queries: Queries, layout: PagedLayout, *, span: int) -> Iterator[KeyTile]:
    """From the beginning of a span on."""
    first_J = queries.lowest_J // span * (span // KEYS)
    last_J = queries.highest_J // KEYS
    size, positions_JQ1 = layout.block_size, queries.positions_JQ[:, :, None]
    for i in range(int((last_J - first_J).max()) + 1):
        at_JL = (first_J + i)[:, None] * KEYS + torch.arange(KEYS)
        used_JL = (at_JL >= queries.lowest_J[:, None]) & (at_JL <= queries.highest_J[:, None])
        block_JL = queries.tables_JN.gather(1, torch.where(used_JL, at_JL, 0) // size)
        # Slot 0 holds zeros; what lies behind a window may be anyone's.
        slots_JL = torch.where(used_JL, block_JL * size + at_JL % size, 0)
        seen_JQL = at_JL[:, None] <= positions_JQ1
        if layout.window is not None:
            seen_JQL &= at_JL[:, None] > positions_JQ1 - layout.window
        yield KeyTile(slots_JL, seen_JQL)


def attend(
    q_THC: torch.Tensor,
    cache: LayerCache,
    layout: PagedLayout,
    *,
    sinks_H: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Attention of this step's queries to their sequences' keys in the cache: [T, H, C].

    Scores and softmax are FP32. With sinks the weights are rounded to the type of the values;
    without, before they are divided by their sum.
    """
    out_THC = torch.zeros_like(q_THC)
    queries = _queries(layout)
    if queries is None:
        return out_THC
    span = SPAN if cache.pairs_2KSC.dtype == torch.bfloat16 else KEYS
    keys = int((queries.highest_J - queries.lowest_J).max()) + span + KEYS
    step = max(1, SCORES_AT_ONCE // (q_THC.shape[1] * QUERIES * keys))
    for first in range(0, len(queries.rows_JQ), step):
        part = queries[first : first + step]
        real_JQ = part.rows_JQ >= 0
        q_JQHC = q_THC[part.rows_JQ.clamp(min=0)]
        tiles = list(_key_tiles(part, layout, span=span))
        if span == SPAN and sinks_H is None:
            out_JQHC = _attend_by_torch(q_JQHC, cache, tiles, scale)
        else:
            out_JQHC = _attend(q_JQHC, cache, tiles, sinks_H, scale)
        out_THC[part.rows_JQ[real_JQ]] = out_JQHC[real_JQ].to(q_THC.dtype)
    return out_THC


def _attend(
    q_JQHC: torch.Tensor,
    cache: LayerCache,
    tiles: list[KeyTile],
    sinks_H: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """[J, Q, H, C] in FP32."""
    count, queries, heads, size = q_JQHC.shape
    kv_heads = cache.pairs_2KSC.shape[1]
    # The G query heads of one KV head stand side by side: Z = K J, X = G Q.
    q_KJGQC = q_JQHC.view(count, queries, kv_heads, -1, size).permute(2, 0, 3, 1, 4)
    q_ZXC = q_KJGQC.reshape(kv_heads * count, -1, size).float()
    scores, values = [], []
    for tile in tiles:
        k_KJLC, v_KJLC = cache.read(tile.slots_JL)
        k_ZLC = k_KJLC.reshape(len(q_ZXC), KEYS, size).float()
        scores_KJGQL = torch.bmm(q_ZXC, k_ZLC.mT).view(*q_KJGQC.shape[:-1], KEYS) * scale
        scores.append(scores_KJGQL.masked_fill(~tile.seen_JQL[:, None], float("-inf")))
        values.append(v_KJLC.reshape(len(q_ZXC), KEYS, size))
    weights, total_KJGQ1 = _weights(scores, sinks_H)
    if sinks_H is not None:
        weights = [one / total_KJGQ1 for one in weights]
    rounded = [one.to(values[0].dtype).view(len(q_ZXC), -1, KEYS) for one in weights]
    out_KJGQC = _sums(rounded, values).view(q_KJGQC.shape)
    if sinks_H is None:
        out_KJGQC = out_KJGQC / total_KJGQ1.clamp(min=torch.finfo(torch.float32).tiny)
    return out_KJGQC.permute(1, 3, 0, 2, 4).reshape(q_JQHC.shape)


def _attend_by_torch(
    q_JQHC: torch.Tensor, cache: LayerCache, tiles: list[KeyTile], scale: float
) -> torch.Tensor:
    """The same in BF16 without sinks, by what transformers calls too."""
    slots_JL = torch.cat([tile.slots_JL for tile in tiles], dim=-1)
    seen_J1QL = torch.cat([tile.seen_JQL for tile in tiles], dim=-1)[:, None]
    k_JKLC, v_JKLC = (x.transpose(0, 1) for x in cache.read(slots_JL))
    out_JHQC = F.scaled_dot_product_attention(
        q_JQHC.transpose(1, 2), k_JKLC, v_JKLC, attn_mask=seen_J1QL, scale=scale, enable_gqa=True
    )
    return out_JHQC.transpose(1, 2)


def _weights(
    scores: list[torch.Tensor], sinks_H: torch.Tensor | None
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """exp(score - best) of tiles [K, J, G, Q, L], and the sum over all of them and the sink."""
    best_KJGQ1 = torch.stack([one.amax(dim=-1) for one in scores]).amax(dim=0)[..., None]
    if sinks_H is not None:
        sink_KJGQ1 = sinks_H.float().view(len(best_KJGQ1), 1, -1, 1, 1)
        best_KJGQ1 = torch.maximum(best_KJGQ1, sink_KJGQ1)
    # A padding query sees nothing.
    best_KJGQ1 = best_KJGQ1.masked_fill(best_KJGQ1 == float("-inf"), 0.0)
    weights = [torch.exp(one - best_KJGQ1) for one in scores]
    total_KJGQ1 = torch.zeros_like(best_KJGQ1)
    for one in weights:
        total_KJGQ1 = total_KJGQ1 + one.sum(dim=-1, keepdim=True)
    if sinks_H is not None:
        total_KJGQ1 = total_KJGQ1 + torch.exp(sink_KJGQ1 - best_KJGQ1)
    return weights, total_KJGQ1


def _sums(weights: list[torch.Tensor], values: list[torch.Tensor]) -> torch.Tensor:
    """The values by their weights, FP32 [Z, X, C]: tile by tile, of BF16 span by span."""
    at_once = SPAN // KEYS if values[0].dtype == torch.bfloat16 else 1
    total_ZXC = torch.zeros(())
    for i in range(0, len(weights), at_once):
        weights_ZXL = torch.cat(weights[i : i + at_once], dim=-1)
        values_ZLC = torch.cat(values[i : i + at_once], dim=1)
        total_ZXC = total_ZXC + torch.bmm(weights_ZXL, values_ZLC).float()
    return total_ZXC
