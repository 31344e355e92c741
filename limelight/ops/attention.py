"""Causal attention with windows and sinks, over the paged cache or over packed sequences.

    p_ij = exp(q_i k_j * scale - m) / (sum_j exp(q_i k_j * scale - m) + exp(sink_h - m))
    out_i = sum_j p_ij v_j,   over j <= i, and j > i - window where there is a window

The window counts the current token. A sink only enlarges the denominator. Scores and softmax are
FP32; the weights p are rounded to the type of the values, their sum once more.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F

# Prompts are attended this many queries at a time, which bounds the scores and keeps window
# layers from scoring keys that no query of the piece can see.
QUERIES_AT_ONCE = 128


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The cache of one layer: [2, K, S, C], keys and then values, flat over its slots.

    A slot is block * block_size + offset. Slot 0 is never written and holds zeros: a key that
    scores 0 against every query stands there for the sink.
    """

    pairs_2KSC: torch.Tensor

    def write(self, slots_T: torch.Tensor, k_TKC: torch.Tensor, v_TKC: torch.Tensor) -> None:
        """Put the keys and values of T tokens into their slots, in the cache's type."""
        for half_KSC, new_TKC in zip(self.pairs_2KSC, (k_TKC, v_TKC), strict=True):
            half_KSC.index_copy_(1, slots_T, new_TKC.to(half_KSC.dtype).transpose(0, 1))

    def read(self, slots_BL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of these slots: [K, B, L, C] each."""
        kv_heads = self.pairs_2KSC.shape[1]
        pairs = self.pairs_2KSC.flatten(0, 1).index_select(1, slots_BL.flatten())
        keys, values = pairs.unflatten(1, slots_BL.shape).split(kv_heads)
        return keys, values


@dataclass(frozen=True, slots=True)
class Segment:
    """B neighbours in the batch with Q queries each, and the L keys that these may see.

    The last key is the one of slot 0, which only a sink makes visible.
    """

    rows: slice
    slots_BL: torch.Tensor  # where the keys lie in the cache
    bias_BQL: torch.Tensor  # FP32: 0, or -inf where a query must not see a key


@dataclass(frozen=True)
class PagedLayout:
    """Where the keys of a batch lie, for the layers that share a block table.

    `table_BN` holds block ids, `seq_lens` counts this step's tokens in, `query_lens` counts them
    alone; `slots_T` is where this step's keys and values go. All on the host but `slots_T`.
    """

    table_BN: np.ndarray
    seq_lens: list[int]
    query_lens: list[int]
    slots_T: torch.Tensor
    block_size: int
    window: int | None

    @cached_property
    def segments(self) -> list[Segment]:
        """The batch cut into segments: decoding neighbours together, prompts piece by piece."""
        segments, row, b = [], 0, 0
        while b < len(self.query_lens):
            length = self.query_lens[b]
            singles = 1
            while length == 1 and self.query_lens[b + singles : b + singles + 1] == [1]:
                singles += 1
            for start in range(0, length, QUERIES_AT_ONCE):
                queries = min(QUERIES_AT_ONCE, length - start)
                ends = [end - length + start + queries for end in self.seq_lens[b : b + singles]]
                rows = slice(row + start, row + start + queries * singles)
                segments.append(self._segment(rows, slice(b, b + singles), ends, queries))
            row += length * singles
            b += singles
        return segments

    def _segment(self, rows: slice, members: slice, ends: list[int], queries: int) -> Segment:
        """Queries are the last `queries` positions before `ends` of each member."""
        ends_B1 = np.array(ends)[:, None]
        reach = ends_B1 if self.window is None else self.window + queries - 1
        firsts_B1 = np.maximum(ends_B1 - reach, 0)
        # One more than the longest reach: the last column is slot 0 for everyone.
        keys_BL = firsts_B1 + np.arange((ends_B1 - firsts_B1).max() + 1)
        blocks_BL = np.minimum(keys_BL // self.block_size, self.table_BN.shape[1] - 1)
        slots_BL = np.take_along_axis(self.table_BN[members], blocks_BL, axis=1) * self.block_size
        # What lies behind a sequence's end is read from slot 0 and hidden.
        slots_BL = np.where(keys_BL < ends_B1, slots_BL + keys_BL % self.block_size, 0)
        at_BQ1 = (ends_B1 - queries + np.arange(queries))[..., None]
        hidden_BQL = keys_BL[:, None, :] > at_BQ1
        if self.window is not None:
            hidden_BQL |= keys_BL[:, None, :] <= at_BQ1 - self.window
        bias_BQL = np.where(hidden_BQL, np.float32("-inf"), np.float32(0.0))
        device = self.slots_T.device
        return Segment(
            rows, torch.from_numpy(slots_BL).to(device), torch.from_numpy(bias_BQL).to(device)
        )


def _attend(
    q_BQHC: torch.Tensor,
    k_KBLC: torch.Tensor,
    v_KBLC: torch.Tensor,
    bias_BQL: torch.Tensor,
    *,
    sinks_H: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """The equation above for B sequences, whose last key is zero: [B, Q, H, C]."""
    (kv_heads, batch, keys, size), queries = k_KBLC.shape, q_BQHC.shape[1]
    # The G query heads of one KV head stand side by side and share its keys in one product.
    q_KBGQC = q_BQHC.float().view(batch, queries, kv_heads, -1, size).permute(2, 0, 3, 1, 4)
    q_ZXC = q_KBGQC.reshape(kv_heads * batch, -1, size)
    k_ZLC, v_ZLC = k_KBLC.float().reshape(-1, keys, size), v_KBLC.reshape(-1, keys, size)
    scores_ZXL = torch.bmm(q_ZXC, k_ZLC.transpose(1, 2))
    scores_KBGQL = scores_ZXL.view(kv_heads, batch, -1, queries, keys)
    scores_KBGQL = torch.add(bias_BQL[:, None], scores_KBGQL, alpha=scale)
    if sinks_H is not None:
        scores_KBGQL[..., -1] = sinks_H.float().view(kv_heads, 1, -1, 1)
    weights_ZXL = torch.softmax(scores_KBGQL, dim=-1).view(scores_ZXL.shape).to(v_ZLC.dtype)
    out_KBGQC = torch.bmm(weights_ZXL, v_ZLC).view(kv_heads, batch, -1, queries, size)
    return out_KBGQC.permute(1, 3, 0, 2, 4).reshape(q_BQHC.shape)


def paged_attention(
    q_THC: torch.Tensor,
    cache: LayerCache,
    layout: PagedLayout,
    *,
    sinks_H: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Attention of this step's queries to their sequences' keys in the cache: [T, H, C]."""
    outs = []
    for segment in layout.segments:
        q_BQHC = q_THC[segment.rows].unflatten(0, (len(segment.slots_BL), -1))
        k_KBLC, v_KBLC = cache.read(segment.slots_BL)
        out_BQHC = _attend(q_BQHC, k_KBLC, v_KBLC, segment.bias_BQL, sinks_H=sinks_H, scale=scale)
        outs.append(out_BQHC.flatten(0, 1).to(q_THC.dtype))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def packed_attention(
    q_THC: torch.Tensor,
    k_TKC: torch.Tensor,
    v_TKC: torch.Tensor,
    lengths: list[int],
    *,
    window: int | None,
    sinks_H: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Attention inside each of the packed sequences, without a cache; differentiable: [T, H, C]."""
    outs = []
    parts = zip(q_THC.split(lengths), k_TKC.split(lengths), v_TKC.split(lengths), strict=True)
    for q_LHC, k_LKC, v_LKC in parts:
        at_L = torch.arange(len(q_LHC) + 1, device=q_LHC.device)
        hidden_QL = at_L > at_L[:-1, None]
        if window is not None:
            hidden_QL |= at_L <= at_L[:-1, None] - window
        bias_QL = torch.zeros(hidden_QL.shape, device=q_LHC.device)
        # The zero key that stands for the sink comes last.
        k_KBLC, v_KBLC = (
            F.pad(x, (0, 0, 0, 0, 0, 1)).transpose(0, 1)[:, None] for x in (k_LKC, v_LKC)
        )
        out_BQHC = _attend(
            q_LHC[None], k_KBLC, v_KBLC, bias_QL.masked_fill_(hidden_QL, float("-inf"))[None],
            sinks_H=sinks_H, scale=scale,
        )  # fmt: skip
        outs.append(out_BQHC[0].to(q_LHC.dtype))
    return torch.cat(outs)
