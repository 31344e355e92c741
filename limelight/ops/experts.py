"""The routed experts: sum over a token's N experts of weight * down(swiglu(gate_up x)).

Each product is rounded to the type of the activations; the weighted sum is FP32, in the order of
the chosen ids, and rounded once, so a token's result does not depend on its batch.
"""

import torch
import torch.nn.functional as F

from limelight.ops.activation import swiglu

# A loop over experts costs a call an expert; one batched product costs its padding. On a CPU the
# product wins for the rows of a decode step, while at most this many times the rows are computed.
PADDING_LIMIT = 4
BATCHED_ROWS = 256



def routed_experts(
    x_TD: torch.Tensor,
    gate_up_EGD: torch.Tensor,
    down_EDF: torch.Tensor,
    weights_TN: torch.Tensor,
    ids_TN: torch.Tensor,
) -> torch.Tensor:
    """[T, D] -> [T, D]; `gate_up_EGD` holds gate above up, G = 2F; `weights_TN` is FP32."""
    count = ids_TN.shape[1]
    rows_RD = x_TD.repeat_interleave(count, dim=0)
    out_RD = _by_expert(rows_RD, gate_up_EGD, down_EDF, ids_TN.flatten())
    out_TND = out_RD.unflatten(0, (-1, count)).float() * weights_TN[..., None]
    return out_TND.sum(dim=1).to(x_TD.dtype)


def _by_expert(
    rows_RD: torch.Tensor, gate_up_EGD: torch.Tensor, down_EDF: torch.Tensor, ids_R: torch.Tensor
) -> torch.Tensor:
    """Row r through expert ids_R[r], by sorting the rows into their experts."""
    counts_E = torch.bincount(ids_R, minlength=gate_up_EGD.shape[0])
    most = int(counts_E.max()) if len(ids_R) else 0
    if most * len(counts_E) <= PADDING_LIMIT * len(ids_R) and len(ids_R) <= BATCHED_ROWS:
        return _batched(rows_RD, gate_up_EGD, down_EDF, ids_R, most)
    order_R = ids_R.argsort(stable=True)
    counts = counts_E.tolist()
    out = [
        F.linear(swiglu(F.linear(part_XD, gate_up_EGD[e])), down_EDF[e])
        for e, part_XD in enumerate(rows_RD[order_R].split(counts))
        if counts[e]
    ]
    return torch.cat([rows_RD[:0], *out])[order_R.argsort()]


def _batched(
    rows_RD: torch.Tensor,
    gate_up_EGD: torch.Tensor,
    down_EDF: torch.Tensor,
    ids_R: torch.Tensor,
    most: int,
) -> torch.Tensor:
    """All experts in one product, each with room for `most` rows: fewer, larger calls."""
    experts = len(gate_up_EGD)
    chosen_RE = F.one_hot(ids_R, experts)
    place_R = ids_R * most + chosen_RE.cumsum(dim=0).gather(1, ids_R[:, None])[:, 0] - 1
    padded_XD = rows_RD.new_zeros(experts * most, rows_RD.shape[1])
    padded_EXD = padded_XD.index_copy(0, place_R, rows_RD).unflatten(0, (experts, most))
    inner_EXF = swiglu(torch.bmm(padded_EXD, gate_up_EGD.transpose(1, 2)))
    return torch.bmm(inner_EXF, down_EDF.transpose(1, 2)).flatten(0, 1)[place_R]
