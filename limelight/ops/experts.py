"""The routed experts: sum over a token's N experts of weight * down(act(gate_up x)).

Each product is rounded to the type of the activations; the weighted sum is FP32, rounded once.
"""

import torch
import torch.nn.functional as F

from limelight.ops.activation import Activation

# For the few tokens of a decode step, calls cost more than arithmetic: all experts at once, in two
# products, beat a loop over those chosen while they are at most this many times the work.
ALL_AT_ONCE_TOKENS = 64
ALL_AT_ONCE_WASTE = 4


def routed_experts(
    x_TD: torch.Tensor,
    gate_up_EGD: torch.Tensor,
    down_EDF: torch.Tensor,
    weights_TN: torch.Tensor,
    ids_TN: torch.Tensor,
    *,
    act: Activation,
) -> torch.Tensor:
    """[T, D] -> [T, D]; `gate_up_EGD` holds gate above up, G = 2F; `weights_TN` is FP32.

    `act` is SwiGLU in the rounding of the model."""
    experts, count = len(gate_up_EGD), ids_TN.shape[1]
    few = len(x_TD) <= ALL_AT_ONCE_TOKENS and experts <= ALL_AT_ONCE_WASTE * count
    compute = _all_experts if few else _chosen_experts
    return compute(x_TD, gate_up_EGD, down_EDF, weights_TN, ids_TN, act=act).to(x_TD.dtype)


def _all_experts(
    x_TD: torch.Tensor,
    gate_up_EGD: torch.Tensor,
    down_EDF: torch.Tensor,
    weights_TN: torch.Tensor,
    ids_TN: torch.Tensor,
    *,
    act: Activation,
) -> torch.Tensor:
    """Every token through every expert, those not chosen with weight 0: FP32 [T, D]."""
    experts = len(gate_up_EGD)
    gate_up_TEG = F.linear(x_TD, gate_up_EGD.flatten(0, 1)).unflatten(1, (experts, -1))
    inner_ETF = act(gate_up_TEG).transpose(0, 1)
    out_ETD = torch.bmm(inner_ETF, down_EDF.transpose(1, 2))
    weights_TE = weights_TN.new_zeros(len(x_TD), experts).scatter(1, ids_TN, weights_TN)
    return torch.bmm(weights_TE[:, None], out_ETD.transpose(0, 1).float())[:, 0]


def _chosen_experts(
    x_TD: torch.Tensor,
    gate_up_EGD: torch.Tensor,
    down_EDF: torch.Tensor,
    weights_TN: torch.Tensor,
    ids_TN: torch.Tensor,
    *,
    act: Activation,
) -> torch.Tensor:
    """Rows sorted by expert, two products for each expert that has rows: FP32 [T, D]."""
    experts, count = len(gate_up_EGD), ids_TN.shape[1]
    order_R = ids_TN.flatten().argsort(stable=True)
    sizes = torch.bincount(ids_TN.flatten(), minlength=experts).tolist()
    rows_RD = x_TD[order_R // count]
    parts = [
        F.linear(act(F.linear(part_XD, gate_up_EGD[e])), down_EDF[e])
        for e, part_XD in enumerate(rows_RD.split(sizes))
        if sizes[e]
    ]
    out_TND = torch.cat([rows_RD[:0], *parts])[order_R.argsort()].unflatten(0, (-1, count))
    return (out_TND.float() * weights_TN[..., None]).sum(dim=1)
