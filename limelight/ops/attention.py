"""Causal attention with windows and sinks, over the paged cache or over packed sequences.

    p_ij = exp(q_i k_j * scale - m) / (sum_j exp(q_i k_j * scale - m) + exp(sink_h - m))
    out_i = sum_j p_ij v_j,   over j <= i, and j > i - window where there is a window

The window counts the current token. A sink only enlarges the denominator. Scores and softmax are
FP32; the weights p are rounded to the type of the values (in the kernels before their division by
the denominator), their sum once more. A gate follows, with roundings of its own (`output_gate`).
"""

import torch
import torch.nn.functional as F

from limelight.ops import op
from limelight.ops.activation import output_gate
from limelight.ops.paging import LayerCache, PagedLayout


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
        # Torch's own attention has the same rounding points, and no sinks.
        k_BKLC, v_BKLC = k_KBLC.transpose(0, 1), v_KBLC.transpose(0, 1)
        bias_B1QL = bias_BQL[:, None].to(q_BQHC.dtype)
        out_BHQC = F.scaled_dot_product_attention(
            q_BQHC.transpose(1, 2), k_BKLC.to(q_BQHC.dtype), v_BKLC.to(q_BQHC.dtype),
            attn_mask=bias_B1QL, scale=scale, enable_gqa=True,
        )  # fmt: skip
        return out_BHQC.transpose(1, 2)
    (kv_heads, batch, keys, size), queries = k_KBLC.shape, q_BQHC.shape[1]
    # The G query heads of one KV head stand side by side and share its keys in one product.
    q_KBGQC = q_BQHC.float().view(batch, queries, kv_heads, -1, size).permute(2, 0, 3, 1, 4)
    q_ZXC = q_KBGQC.reshape(kv_heads * batch, -1, size)
    k_ZLC, v_ZLC = k_KBLC.float().reshape(-1, keys, size), v_KBLC.reshape(-1, keys, size)
    scores_ZXL = torch.bmm(q_ZXC, k_ZLC.transpose(1, 2))
    scores_KBGQL = scores_ZXL.view(kv_heads, batch, -1, queries, keys)
    scores_KBGQL = torch.add(bias_BQL[:, None], scores_KBGQL, alpha=scale)
    scores_KBGQL[..., -1] = sinks_H.float().view(kv_heads, 1, -1, 1)
    weights_ZXL = torch.softmax(scores_KBGQL, dim=-1).view(scores_ZXL.shape).to(v_ZLC.dtype)
    out_KBGQC = torch.bmm(weights_ZXL, v_ZLC).view(kv_heads, batch, -1, queries, size)
    return out_KBGQC.permute(1, 3, 0, 2, 4).reshape(q_BQHC.shape)


def paged_attention_reference(
    q_THC: torch.Tensor,
    cache: LayerCache,
    layout: PagedLayout,
    *,
    sinks_H: torch.Tensor | None,
    scale: float,
    gate_THC: torch.Tensor | None = None,
    gate_bias_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of this step's queries to their sequences' keys in the cache: [T, H, C].

    With a gate its heads are multiplied by sigmoid(gate + bias).
    """
    outs = []
    for segment in layout.segments:
        q_BQHC = q_THC[segment.rows].unflatten(0, (len(segment.slots_BL), -1))
        k_KBLC, v_KBLC = cache.read(segment.slots_BL)
        out_BQHC = _attend(q_BQHC, k_KBLC, v_KBLC, segment.bias_BQL, sinks_H=sinks_H, scale=scale)
        outs.append(out_BQHC.flatten(0, 1).to(q_THC.dtype))
    out_THC = outs[0] if len(outs) == 1 else torch.cat(outs)
    if gate_THC is None or gate_bias_H is None:
        return out_THC
    return output_gate(out_THC, gate_THC, gate_bias_H)


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


paged_attention = op(reference=paged_attention_reference, kernel=paged_attention_reference)
