"""Causal attention with windows and sinks, over the paged cache or over packed sequences.

    p_ij = exp(q_i k_j * scale - m) / (sum_j exp(q_i k_j * scale - m) + exp(sink_h - m))
    out_i = sum_j p_ij v_j,   over j <= i, and j > i - window where there is a window

The window counts the current token. A sink only enlarges the denominator. Scores and softmax are
FP32; the weights p are rounded to the type of the values (in the kernels before their division by
the denominator), their sum once more. Keys and values of an FP8 cache are what it holds times its
scales, this step's too, and FP32 (the kernels scale scores and sums instead, and round p to the
type of the queries). A gate follows, with roundings of its own (`output_gate`).
"""

from itertools import groupby

import torch
import torch.nn.functional as F

from limelight.ops import decode, invariant, is_batch_invariant, op, prefill, rope
from limelight.ops.activation import output_gate
from limelight.ops.far import chosen, far
from limelight.ops.keys import End
from limelight.ops.paging import LayerCache, PagedLayout
from limelight.ops.rope import Heads, Rotation


def attend(
    q_BQHC: torch.Tensor,
    k_KBLC: torch.Tensor,
    v_KBLC: torch.Tensor,
    bias_BQL: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """The equation without sinks, [B, Q, H, C]; `bias_BQL` is 0, or -inf where a key is hidden.

    By torch's own: the same rounding points, and zero for a query that sees no key.
    """
    k_BKLC, v_BKLC = (x.transpose(0, 1).to(q_BQHC.dtype) for x in (k_KBLC, v_KBLC))
    out_BHQC = F.scaled_dot_product_attention(
        q_BQHC.transpose(1, 2), k_BKLC, v_BKLC, scale=scale, enable_gqa=True,
        attn_mask=bias_BQL[:, None].to(q_BQHC.dtype),
    )  # fmt: skip
    return out_BHQC.transpose(1, 2)


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
    if sinks_H is None:
        k_KBLC, v_KBLC, bias_BQL = k_KBLC[:, :, :-1], v_KBLC[:, :, :-1], bias_BQL[..., :-1]
        return attend(q_BQHC, k_KBLC, v_KBLC, bias_BQL, scale=scale)
    (kv_heads, batch, keys, size), queries = k_KBLC.shape, q_BQHC.shape[1]
    # The G query heads of one KV head stand side by side and share its keys in one product.
    q_KBGQC = q_BQHC.float().view(batch, queries, kv_heads, -1, size).permute(2, 0, 3, 1, 4)
    q_ZXC = q_KBGQC.reshape(kv_heads * batch, -1, size)
    k_ZLC, v_ZLC = (x.reshape(len(q_ZXC), keys, size) for x in (k_KBLC.float(), v_KBLC))
    scores_KBGQL = torch.bmm(q_ZXC, k_ZLC.transpose(1, 2)).view(*q_KBGQC.shape[:-1], keys)
    scores_KBGQL = torch.add(bias_BQL[:, None], scores_KBGQL, alpha=scale)
    scores_KBGQL.select(-1, -1).copy_(sinks_H.view(kv_heads, 1, -1, 1))
    weights_KBGQL = torch.softmax(scores_KBGQL, dim=-1).to(v_ZLC.dtype)
    out_ZXC = torch.bmm(weights_KBGQL.view(len(q_ZXC), -1, keys), v_ZLC)
    return out_ZXC.view(q_KBGQC.shape).permute(1, 3, 0, 2, 4).reshape(q_BQHC.shape)


def attend_cached(
    q_THC: torch.Tensor,
    cache: LayerCache,
    layout: PagedLayout,
    *,
    sinks_H: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Attention of this step's queries to their sequences' keys in the cache: [T, H, C]."""
    outs = []
    for segment in layout.on_host:
        rows = segment.rows
        part_THC = q_THC.narrow(0, rows.start, rows.stop - rows.start)
        q_BQHC = part_THC.view(len(segment.slots_BL), -1, *q_THC.shape[1:])
        k_KBLC, v_KBLC = cache.read(segment.slots_BL)
        if cache.scales_2 is not None:
            # FP8 times its scale is more than the queries' type can hold: all is FP32.
            q_BQHC = q_BQHC.float()
        out_BQHC = _attend(q_BQHC, k_KBLC, v_KBLC, segment.bias_BQL, sinks_H=sinks_H, scale=scale)
        outs.append(out_BQHC.flatten(0, 1).to(q_THC.dtype))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def attend_packed(
    q_THC: torch.Tensor,
    k_TKC: torch.Tensor,
    v_TKC: torch.Tensor,
    lengths: list[int],
    *,
    window: int | None,
    sinks_H: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Attention inside each packed sequence, of neighbours of one length at once: [T, H, C]."""
    outs = []
    runs = [(length, len(list(group))) for length, group in groupby(lengths)]
    tokens = [length * count for length, count in runs]
    parts = zip(runs, q_THC.split(tokens), k_TKC.split(tokens), v_TKC.split(tokens), strict=True)
    for (length, count), q_THC, k_TKC, v_TKC in parts:
        q_BQHC, k_BLKC, v_BLKC = (x.unflatten(0, (count, length)) for x in (q_THC, k_TKC, v_TKC))
        at_L = torch.arange(length + 1, device=q_THC.device)
        hidden_QL = at_L > at_L[:-1, None]
        if window is not None:
            hidden_QL |= at_L <= at_L[:-1, None] - window
        bias_QL = torch.zeros(hidden_QL.shape, device=q_THC.device)
        bias_BQL = bias_QL.masked_fill_(hidden_QL, float("-inf")).expand(count, -1, -1)
        # The zero key that stands for the sink comes last.
        k_KBLC, v_KBLC = (
            F.pad(x_BLKC, (0, 0, 0, 0, 0, 1)).permute(2, 0, 1, 3) for x_BLKC in (k_BLKC, v_BLKC)
        )
        out_BQHC = _attend(q_BQHC, k_KBLC, v_KBLC, bias_BQL, sinks_H=sinks_H, scale=scale)
        outs.append(out_BQHC.flatten(0, 1).to(q_THC.dtype))
    return torch.cat(outs)


def packed_attention(
    qkv_TN: torch.Tensor,
    weight_2C: torch.Tensor,
    lengths: list[int],
    *,
    heads: Heads,
    window: int | None,
    scale: float,
    turn: Rotation | None = None,
    ssmax_T: torch.Tensor | None = None,
    sinks_H: torch.Tensor | None = None,
    gate_bias_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """From projection to output, [T, H, C], of whole packed sequences; differentiable.

    Rows are [q | k | v], with a gate's bias [q | k | v | gate]; the rest is as for `split_heads`.
    """
    q_THC, k_TKC, v_TKC = rope.split_heads(
        qkv_TN, weight_2C, heads=heads, turn=turn, ssmax_T=ssmax_T
    )
    out_THC = attend_packed(
        q_THC, k_TKC, v_TKC, lengths, window=window, sinks_H=sinks_H, scale=scale
    )
    if gate_bias_H is None:
        return out_THC
    return output_gate(out_THC, gate_of(qkv_TN, out_THC), gate_bias_H)


def paged_attention_reference(
    qkv_TN: torch.Tensor,
    weight_2C: torch.Tensor,
    cache: LayerCache,
    layout: PagedLayout,
    *,
    heads: Heads,
    scale: float,
    turn: Rotation | None = None,
    ssmax_T: torch.Tensor | None = None,
    sinks_H: torch.Tensor | None = None,
    gate_bias_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same over the paged cache, into which this step's keys and values go: [T, H, C]."""
    q_THC, k_TKC, v_TKC = rope.split_heads(
        qkv_TN, weight_2C, heads=heads, turn=turn, ssmax_T=ssmax_T
    )
    (cache.write if layout.padded else cache.put)(layout.slots_T, k_TKC, v_TKC)
    # Without sinks `attend` has rounding points of its own.
    alike = sinks_H is not None or q_THC.dtype == cache.pairs_2KSC.dtype == torch.float32
    if is_batch_invariant():
        out_THC = invariant.attend(q_THC, cache, layout, sinks_H=sinks_H, scale=scale)
    elif alike and layout.kept is not None and layout.goes_on:
        out_THC = layout.kept.attend(q_THC, k_TKC, v_TKC, cache, sinks_H=sinks_H, scale=scale)
    else:
        out_THC = attend_cached(q_THC, cache, layout, sinks_H=sinks_H, scale=scale)
    if gate_bias_H is None:
        return out_THC
    return output_gate(out_THC, gate_of(qkv_TN, out_THC), gate_bias_H)


def gate_of(qkv_TN: torch.Tensor, out_THC: torch.Tensor) -> torch.Tensor:
    """The gate [T, H, C] at the end of the rows."""
    tokens, heads, size = out_THC.shape
    return qkv_TN[:, -heads * size :].view(tokens, heads, size)


def _launch_paged_attention(
    qkv_TN: torch.Tensor,
    weight_2C: torch.Tensor,
    cache: LayerCache,
    layout: PagedLayout,
    *,
    heads: Heads,
    scale: float,
    turn: Rotation | None = None,
    ssmax_T: torch.Tensor | None = None,
    sinks_H: torch.Tensor | None = None,
    gate_bias_H: torch.Tensor | None = None,
) -> torch.Tensor:
    shape = (len(qkv_TN), heads.queries, weight_2C.shape[1])
    out_THC = torch.empty(shape, dtype=qkv_TN.dtype, device=qkv_TN.device)
    gate_THC = None if gate_bias_H is None else gate_of(qkv_TN, out_THC)
    end = End(sinks_H, gate_THC, gate_bias_H)
    ordered, mixed = is_batch_invariant(), layout.mixed is not None
    if layout.few == len(layout.rows_B) and not mixed and not ordered:
        fresh = decode.Preparation(weight_2C, heads, turn, ssmax_T)
        decode.launch(qkv_TN, cache, layout, out_THC, end, fresh=fresh, scale=scale)
        return out_THC
    q_THC = rope.prepare.kernel(
        qkv_TN, weight_2C, cache, layout.slots_T, heads=heads, turn=turn, ssmax_T=ssmax_T
    )
    if (layout.few or mixed) and not ordered:
        decode.launch(q_THC.flatten(1), cache, layout, out_THC, end, fresh=None, scale=scale)
    prompt = None
    if layout.window is None and not ordered:
        size = layout.block_size
        prompt = chosen(layout.prompts, cache, dtype=q_THC.dtype, block_size=size)
    begun = None if prompt is None else far(q_THC, cache, layout, prompt, scale=scale)
    prefill.launch(
        q_THC.flatten(1), cache, layout, out_THC, end, scale=scale, far=begun, ordered=ordered
    )
    return out_THC


paged_attention = op(reference=paged_attention_reference, kernel=_launch_paged_attention)
