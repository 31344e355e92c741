"""Causal attention with windows and sinks, over the paged cache or over packed sequences.

    p_ij = exp(q_i k_j * scale - m) / (sum_j exp(q_i k_j * scale - m) + exp(sink_h - m))
    out_i = sum_j p_ij v_j,   over j <= i, and j > i - window where there is a window

The window counts the current token. A sink only enlarges the denominator. Scores, softmax and
the weighted sum are FP32; the result is rounded once.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

# Prompts are attended this many queries at a time, which bounds the scores and keeps window
# layers from scoring keys that no query of the piece can see.
QUERIES_AT_ONCE = 128


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The cache of one layer, flat over its slots (block * block_size + offset): [K, S, C] each."""

    keys_KSC: torch.Tensor
    values_KSC: torch.Tensor

    def write(self, slots_T: torch.Tensor, k_TKC: torch.Tensor, v_TKC: torch.Tensor) -> None:
        """Put the keys and values of T tokens into their slots, in the cache's type."""
        dtype = self.keys_KSC.dtype
        self.keys_KSC.index_copy_(1, slots_T, k_TKC.to(dtype).transpose(0, 1))
        self.values_KSC.index_copy_(1, slots_T, v_TKC.to(dtype).transpose(0, 1))


@dataclass(frozen=True, slots=True)
class Segment:
    """B neighbours in the batch with Q queries each, and the L keys that these may see."""

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
        keys_BL = firsts_B1 + np.arange((ends_B1 - firsts_B1).max())
        blocks_BL = np.minimum(keys_BL // self.block_size, self.table_BN.shape[1] - 1)
        slots_BL = np.take_along_axis(self.table_BN[members], blocks_BL, axis=1) * self.block_size
        # What lies behind a sequence's end is read from the null block and hidden.
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
    """The equation above for B sequences: FP32 [B, Q, H, C]."""
    kv_heads = k_KBLC.shape[0]
    # The G query heads of one KV head stand side by side and share its keys in one product.
    q_KBXC = q_BQHC.float().unflatten(2, (kv_heads, -1)).permute(2, 0, 3, 1, 4).flatten(2, 3)
    scores_KBXL = torch.matmul(q_KBXC * scale, k_KBLC.float().transpose(2, 3))
    scores_KBGQL = scores_KBXL.unflatten(2, (-1, q_BQHC.shape[1])) + bias_BQL[:, None]
    if sinks_H is not None:
        sinks_KBGQ1 = sinks_H.float().view(kv_heads, 1, -1, 1, 1).expand(*scores_KBGQL.shape[:-1], 1)
        scores_KBGQL = torch.cat((scores_KBGQL, sinks_KBGQ1), dim=-1)
    weights_KBXL = torch.softmax(scores_KBGQL, dim=-1).flatten(2, 3)[..., : k_KBLC.shape[2]]
    out_KBXC = torch.matmul(weights_KBXL, v_KBLC.float())
    return out_KBXC.unflatten(2, (-1, q_BQHC.shape[1])).permute(1, 3, 0, 2, 4).flatten(2, 3)


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
        slots, shape = segment.slots_BL.flatten(), segment.slots_BL.shape
        out_BQHC = _attend(
            q_THC[segment.rows].unflatten(0, (shape[0], -1)),
            cache.keys_KSC.index_select(1, slots).unflatten(1, shape),
            cache.values_KSC.index_select(1, slots).unflatten(1, shape),
            segment.bias_BQL,
            sinks_H=sinks_H,
            scale=scale,
        )
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
        at_L = torch.arange(len(q_LHC), device=q_LHC.device)
        hidden_LL = at_L > at_L[:, None]
        if window is not None:
            hidden_LL |= at_L <= at_L[:, None] - window
        bias_LL = torch.zeros_like(hidden_LL, dtype=torch.float32)
        out_BQHC = _attend(
            q_LHC[None],
            k_LKC.transpose(0, 1)[:, None],
            v_LKC.transpose(0, 1)[:, None],
            bias_LL.masked_fill_(hidden_LL, float("-inf"))[None],
            sinks_H=sinks_H,
            scale=scale,
        )
        outs.append(out_BQHC[0].to(q_LHC.dtype))
    return torch.cat(outs)
