"""The experts: sum over a token's N experts of weight * down(act(gate_up y)), and a shared one.

Gate and up are rounded to the type of the activations before SwiGLU, which rounds as the model
does (`fp32`, or silu and product apart); each expert's output is rounded, their weighted sum is
FP32 and rounded once. Then come the scale and the shared expert's rounded output, each rounded.
"""

import torch
import torch.nn.functional as F

from limelight.ops import op
from limelight.ops.activation import Activation, swiglu, swiglu_fp32

# For the few tokens of a decode step, calls cost more than arithmetic: all experts at once, in two
# products, beat a loop over those chosen while they are at most this many times the work.
ALL_AT_ONCE_TOKENS = 64
ALL_AT_ONCE_WASTE = 4


def moe_reference(
    y_TD: torch.Tensor,
    gate_up_EGD: torch.Tensor,
    down_EDF: torch.Tensor,
    weights_TN: torch.Tensor,
    ids_TN: torch.Tensor,
    shared_gate_up_GD: torch.Tensor | None,
    shared_down_DF: torch.Tensor | None,
    *,
    fp32: bool,
    scale: float = 1.0,
) -> torch.Tensor:
    """[T, D] -> [T, D]; a matrix `gate_up` holds gate above up, G = 2F; `weights_TN` is FP32.

    The shared expert, where there is one, may be of another width."""
    act = swiglu_fp32 if fp32 else swiglu
    out_TD = routed_experts(y_TD, gate_up_EGD, down_EDF, weights_TN, ids_TN, act=act)
    if scale != 1.0:
        out_TD = out_TD * scale
    if shared_gate_up_GD is not None and shared_down_DF is not None:
        out_TD = out_TD + F.linear(act(F.linear(y_TD, shared_gate_up_GD)), shared_down_DF)
    return out_TD


def routed_experts(
    x_TD: torch.Tensor,
    gate_up_EGD: torch.Tensor,
    down_EDF: torch.Tensor,
    weights_TN: torch.Tensor,
    ids_TN: torch.Tensor,
    *,
    act: Activation,
) -> torch.Tensor:
    """The weighted sum over the chosen experts, [T, D]."""
    experts, count = len(gate_up_EGD), ids_TN.shape[1]
    if len(x_TD) <= ALL_AT_ONCE_TOKENS and experts <= ALL_AT_ONCE_WASTE * count:
        out_TXD = _through_all(x_TD, gate_up_EGD, down_EDF, act)
        weights_TX = weights_TN.new_zeros(len(x_TD), experts).scatter(1, ids_TN, weights_TN)
    else:
        out_TXD = _through_chosen(x_TD, gate_up_EGD, down_EDF, act, ids_TN)
        weights_TX = weights_TN
    return torch.bmm(weights_TX[:, None], out_TXD.float())[:, 0].to(x_TD.dtype)


def _through_all(
    x_TD: torch.Tensor, gate_up_EGD: torch.Tensor, down_EDF: torch.Tensor, act: Activation
) -> torch.Tensor:
    """Every token through every expert: [T, E, D]."""
    gate_up_TG = F.linear(x_TD, gate_up_EGD.flatten(0, 1))
    inner_ETF = act(gate_up_TG.unflatten(1, (len(gate_up_EGD), -1))).transpose(0, 1)
    return torch.bmm(inner_ETF, down_EDF.transpose(1, 2)).transpose(0, 1)


def _through_chosen(
    x_TD: torch.Tensor,
    gate_up_EGD: torch.Tensor,
    down_EDF: torch.Tensor,
    act: Activation,
    ids_TN: torch.Tensor,
) -> torch.Tensor:
    """Every token through its own experts, [T, N, D]: rows sorted by expert, two products each."""
    order_R = ids_TN.flatten().argsort(stable=True)
    sizes = torch.bincount(ids_TN.flatten(), minlength=len(gate_up_EGD)).tolist()
    rows_RD = x_TD[order_R // ids_TN.shape[1]]
    parts = [
        F.linear(act(F.linear(part_XD, gate_up_EGD[e])), down_EDF[e])
        for e, part_XD in enumerate(rows_RD.split(sizes))
        if sizes[e]
    ]
    return torch.cat([rows_RD[:0], *parts])[order_R.argsort()].unflatten(0, ids_TN.shape)


# A kernel takes the place of the second.
moe = op(reference=moe_reference, kernel=moe_reference)
