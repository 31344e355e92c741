"""Causal attention with windows and sinks, over the paged cache or over packed sequences.

    p_ij = exp(q_i k_j * scale - m) / (sum_j exp(q_i k_j * scale - m) + exp(sink_h - m))
    out_i = sum_j p_ij v_j,   over j <= i, and j > i - window where there is a window

The window counts the current token. A sink only enlarges the denominator. Scores, softmax and
the weighted sum are FP32; the result is rounded once.
"""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

# Prompts are attended this many queries at a time, which bounds the scores and keeps window
# layers from scoring keys that no query of the piece can see.
QUERIES_AT_ONCE = 128


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The cache of one layer, flat over its slots (block * block_size + offset): [S, K, C] each."""

    keys_SKC: torch.Tensor
    values_SKC: torch.Tensor

    def write(self, slots_T: torch.Tensor, k_TKC: torch.Tensor, v_TKC: torch.Tensor) -> None:
        """Put the keys and values of T tokens into their slots, in the cache's type."""
        self.keys_SKC.index_copy_(0, slots_T, k_TKC.to(self.keys_SKC.dtype))
        self.values_SKC.index_copy_(0, slots_T, v_TKC.to(self.values_SKC.dtype))


@dataclass(frozen=True, slots=True)
class Segment:
    """Sequences of one batch with the same number of queries: B of them, Q queries, L keys each."""

    rows_BQ: torch.Tensor  # which rows of the batch the queries are
    slots_BL: torch.Tensor  # where the keys lie in the cache
    hidden_BQL: torch.Tensor  # True where a query must not see a key


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
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @cached_property
    def segments(self) -> list[Segment]:
        """The batch cut into segments: decoding sequences together, prompts piece by piece."""
        firsts = np.concatenate(([0], np.cumsum(self.query_lens[:-1]))).astype(np.int64)
        single = [b for b, length in enumerate(self.query_lens) if length == 1]
        cuts = [(single, [self.seq_lens[b] for b in single], 1)] if single else []
        rows = [firsts[single][:, None]] if single else []
        for b, length in enumerate(self.query_lens):
            if length == 1:
                continue
            for start in range(0, length, QUERIES_AT_ONCE):
                stop = min(start + QUERIES_AT_ONCE, length)
                cuts.append(([b], [self.seq_lens[b] - length + stop], stop - start))
                rows.append((firsts[b] + np.arange(start, stop))[None])
        return [self._segment(r, *cut) for r, cut in zip(rows, cuts, strict=True)]

    def _segment(
        self, rows_BQ: np.ndarray, members: list[int], ends: list[int], queries: int
    ) -> Segment:
        """Queries are the last `queries` positions before `ends` of each member."""
        ends_B1 = np.array(ends, dtype=np.int64)[:, None]
        reach = ends_B1 if self.window is None else self.window + queries - 1
        firsts_B1 = np.maximum(ends_B1 - reach, 0)
        keys_BL = firsts_B1 + np.arange((ends_B1 - firsts_B1).max())
        blocks_BL = np.minimum(keys_BL // self.block_size, self.table_BN.shape[1] - 1)
        table = self.table_BN[members]
        slots_BL = np.take_along_axis(table, blocks_BL, axis=1) * self.block_size
        slots_BL = slots_BL + keys_BL % self.block_size
        at_BQ1 = (ends_B1 - queries + np.arange(queries))[..., None]
        hidden_BQL = keys_BL[:, None, :] > at_BQ1
        if self.window is not None:
            hidden_BQL |= keys_BL[:, None, :] <= at_BQ1 - self.window
        tensors = (rows_BQ, np.where(keys_BL < ends_B1, slots_BL, 0), hidden_BQL)
        return Segment(*(torch.from_numpy(t).to(self.device) for t in tensors))


def _attend(
    q_BQHC: torch.Tensor,
    k_BLKC: torch.Tensor,
    v_BLKC: torch.Tensor,
    hidden_BQL: torch.Tensor,
    *,
    sinks_H: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """The equation above for B sequences: FP32 [B, Q, H, C]."""
    kv_heads = k_BLKC.shape[2]
    # Query heads of one KV head stand side by side: G of them share its keys in one product.
    q_BKGQC = q_BQHC.float().unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)
    k_BKCL = k_BLKC.float().permute(0, 2, 3, 1)[:, :, None]
    v_BKLC = v_BLKC.float().permute(0, 2, 1, 3)[:, :, None]
    scores = torch.matmul(q_BKGQC * scale, k_BKCL)
    scores = scores.masked_fill(hidden_BQL[:, None, None], float("-inf"))
    if sinks_H is not None:
        sinks = sinks_H.float().view(1, kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : k_BLKC.shape[1]]
    return torch.matmul(weights, v_BKLC).permute(0, 3, 1, 2, 4).flatten(2, 3)


def paged_attention(
    q_THC: torch.Tensor,
    cache: LayerCache,
    layout: PagedLayout,
    *,
    sinks_H: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Attention of this step's queries to their sequences' keys in the cache: [T, H, C]."""
    out_THC = torch.empty_like(q_THC)
    for segment in layout.segments:
        out_BQHC = _attend(
            q_THC[segment.rows_BQ],
            cache.keys_SKC[segment.slots_BL],
            cache.values_SKC[segment.slots_BL],
            segment.hidden_BQL,
            sinks_H=sinks_H,
            scale=scale,
        )
        out_THC[segment.rows_BQ] = out_BQHC.to(q_THC.dtype)
    return out_THC


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
    for q, k, v in zip(q_THC.split(lengths), k_TKC.split(lengths), v_TKC.split(lengths), strict=True):
        at_L = torch.arange(len(q), device=q.device)
        hidden_QL = at_L > at_L[:, None]
        if window is not None:
            hidden_QL |= at_L <= at_L[:, None] - window
        out_BQHC = _attend(
            q[None], k[None], v[None], hidden_QL[None], sinks_H=sinks_H, scale=scale
        )
        outs.append(out_BQHC[0].to(q.dtype))
    return torch.cat(outs)
