"""The routed experts: sum over a token's N experts of weight * down(swiglu(gate_up x)).

Each product is rounded to the type of the activations; the weighted sum is FP32, in the order of
the chosen ids, and rounded once, so a token's result does not depend on its batch.
"""

import torch
import torch.nn.functional as F

from limelight.ops.activation import swiglu



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
    """Row r through expert ids_R[r]: rows sorted by expert, one product an expert with rows."""
    order_R = ids_R.argsort(stable=True)
    counts = torch.bincount(ids_R, minlength=gate_up_EGD.shape[0]).tolist()
    parts = rows_RD[order_R].split(counts)
    out = [
        F.linear(swiglu(F.linear(part, gate_up_EGD[expert])), down_EDF[expert])
        for expert, part in enumerate(parts)
        if counts[expert]
    ]
    sorted_RD = torch.cat(out) if out else rows_RD[:0]
    return sorted_RD[order_R.argsort()]
