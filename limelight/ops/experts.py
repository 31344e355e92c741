"""The experts: sum over a token's N experts of weight * down(act(gate_up y)), and a shared one.

Gate and up are rounded to the type of the activations before SwiGLU, which rounds as the model
does (`fp32`, or silu and product apart); each expert's output is rounded, their weighted sum is
FP32 and rounded once. Then come the scale and the shared expert's rounded output, each rounded.

Kernels for a few rows read the chosen experts alone (`chosen.py`); many rows are sorted by expert
first (`grouped.py`).
"""

import torch

from limelight.ops import grouped, invariant, is_batch_invariant, linear, op
from limelight.ops.activation import swiglu, swiglu_fp32
from limelight.ops.chosen import few_moe, most_rows
from limelight.ops.combine import Routed
from limelight.ops.fp4 import FP4, Weight, multiply_reference

# On a CPU, for the few tokens of a decode step, calls cost more than arithmetic: all experts at
# once, in two products, beat a loop over those chosen while they are at most this many times the
# work.
ALL_AT_ONCE_TOKENS = 64
ALL_AT_ONCE_WASTE = 4


def moe_reference(
    y_TD: torch.Tensor,
    gate_up_EGD: Weight,
    down_EDF: Weight,
    weights_TN: torch.Tensor,
    ids_TN: torch.Tensor,
    shared_gate_up_GD: Weight | None,
    shared_down_DF: Weight | None,
    *,
    fp32: bool,
    scale: float = 1.0,
) -> torch.Tensor:
    """[T, D] -> [T, D]; a matrix `gate_up` holds gate above up, G = 2F; `weights_TN` is FP32.

    The shared expert, where there is one, may be of another width."""
    act = swiglu_fp32 if fp32 else swiglu
    experts, count = len(gate_up_EGD), ids_TN.shape[1]
    few = len(y_TD) <= ALL_AT_ONCE_TOKENS and experts <= ALL_AT_ONCE_WASTE * count
    alike = is_batch_invariant()
    if len(y_TD) == 1 and not alike:
        parts = [
            multiply_reference(act(multiply_reference(y_TD, gate_up_EGD[e])), down_EDF[e])
            for e in ids_TN[0].tolist()
        ]
        out_TD = torch.mm(weights_TN, torch.cat(parts).float()).to(y_TD.dtype)
    elif (
        few
        and not alike
        and isinstance(gate_up_EGD, torch.Tensor)
        and isinstance(down_EDF, torch.Tensor)
    ):
        gate_up_ETG = torch.bmm(y_TD.expand(experts, -1, -1), gate_up_EGD.mT)
        out_TED = torch.bmm(act(gate_up_ETG), down_EDF.mT).transpose(0, 1)
        weights_TE = weights_TN.new_zeros(len(y_TD), experts).scatter(1, ids_TN, weights_TN)
        out_TD = _weighted_sum(weights_TE, out_TED)
    else:
        order_P = ids_TN.flatten().argsort(stable=True)
        sizes = torch.bincount(ids_TN.flatten(), minlength=experts).tolist()
        rows_PD = y_TD[order_P // count]
        parts = [
            multiply_reference(act(multiply_reference(part_XD, gate_up_EGD[e])), down_EDF[e])
            for e, part_XD in enumerate(rows_PD.split(sizes))
            if sizes[e]
        ]
        out_PD = torch.cat([rows_PD[:0], *parts])[order_P.argsort()]
        weigh = invariant.weighted_sum if alike else _weighted_sum
        out_TD = weigh(weights_TN, out_PD.unflatten(0, ids_TN.shape))
    if scale != 1.0:
        out_TD = out_TD * scale
    if shared_gate_up_GD is not None and shared_down_DF is not None:
        inner_TF = act(multiply_reference(y_TD, shared_gate_up_GD))
        out_TD = out_TD + multiply_reference(inner_TF, shared_down_DF)
    return out_TD


def _weighted_sum(weights_TN: torch.Tensor, out_TND: torch.Tensor) -> torch.Tensor:
    return torch.bmm(weights_TN[:, None], out_TND.float())[:, 0].to(out_TND.dtype)


def _check(
    y_TD: torch.Tensor,
    gate_up_EGD: Weight,
    down_EDF: Weight,
    shared_gate_up_GD: Weight | None,
    shared_down_DF: Weight | None,
) -> None:
    experts, size, width = down_EDF.shape
    assert y_TD.shape[1] == size and y_TD.stride(1) == 1
    assert gate_up_EGD.shape == (experts, 2 * width, size)
    held = [gate_up_EGD, down_EDF]
    if shared_gate_up_GD is not None and shared_down_DF is not None:
        assert shared_gate_up_GD.shape == (2 * shared_down_DF.shape[1], size)
        assert len(shared_down_DF) == size
        held += [shared_gate_up_GD, shared_down_DF]
    for weight in held:
        if isinstance(weight, FP4):
            weight.check()
        else:
            assert weight.is_contiguous() and weight.dtype == y_TD.dtype


def _launch_moe(
    y_TD: torch.Tensor,
    gate_up_EGD: Weight,
    down_EDF: Weight,
    weights_TN: torch.Tensor,
    ids_TN: torch.Tensor,
    shared_gate_up_GD: Weight | None,
    shared_down_DF: Weight | None,
    *,
    fp32: bool,
    scale: float = 1.0,
) -> torch.Tensor:
    out = _launch_unsummed_moe(
        y_TD, gate_up_EGD, down_EDF, weights_TN, ids_TN, shared_gate_up_GD, shared_down_DF,
        fp32=fp32, scale=scale,
    )  # fmt: skip
    return out.combined() if isinstance(out, Routed) else out


def unsummed_moe_reference(
    y_TD: torch.Tensor,
    gate_up_EGD: Weight,
    down_EDF: Weight,
    weights_TN: torch.Tensor,
    ids_TN: torch.Tensor,
    shared_gate_up_GD: Weight | None,
    shared_down_DF: Weight | None,
    *,
    fp32: bool,
    scale: float = 1.0,
) -> torch.Tensor | Routed:
    """As `moe`; where a kernel of its own would sum the experts' outputs, these as they are."""
    return moe_reference(
        y_TD, gate_up_EGD, down_EDF, weights_TN, ids_TN, shared_gate_up_GD, shared_down_DF,
        fp32=fp32, scale=scale,
    )  # fmt: skip


def _launch_unsummed_moe(
    y_TD: torch.Tensor,
    gate_up_EGD: Weight,
    down_EDF: Weight,
    weights_TN: torch.Tensor,
    ids_TN: torch.Tensor,
    shared_gate_up_GD: Weight | None,
    shared_down_DF: Weight | None,
    *,
    fp32: bool,
    scale: float = 1.0,
) -> torch.Tensor | Routed:
    _check(y_TD, gate_up_EGD, down_EDF, shared_gate_up_GD, shared_down_DF)
    assert weights_TN.shape == ids_TN.shape and len(ids_TN) == len(y_TD)
    assert weights_TN.dtype == torch.float32
    assert weights_TN.is_contiguous() and ids_TN.is_contiguous()
    if not len(y_TD):
        return torch.empty_like(y_TD)
    alike = isinstance(gate_up_EGD, FP4) == isinstance(down_EDF, FP4)
    few = alike and len(y_TD) <= most_rows(y_TD.shape[1], gate_up_EGD)
    added_TD = None
    if shared_gate_up_GD is not None and shared_down_DF is not None:
        kinds = {isinstance(w, FP4) for w in (gate_up_EGD, shared_gate_up_GD, shared_down_DF)}
        if len(kinds) > 1:
            # The kernels take routed and shared weights of one kind.
            inner_TF = linear.swiglu_project.kernel(y_TD, shared_gate_up_GD, fp32=fp32)
            added_TD = linear.project.kernel(inner_TF, shared_down_DF)
            shared_gate_up_GD = shared_down_DF = None
    return (few_moe if few else grouped.unsummed_moe)(
        y_TD, gate_up_EGD, down_EDF, weights_TN, ids_TN, shared_gate_up_GD, shared_down_DF,
        added_TD, fp32=fp32, scale=scale,
    )  # fmt: skip


moe = op(reference=moe_reference, kernel=_launch_moe)
unsummed_moe = op(reference=unsummed_moe_reference, kernel=_launch_unsummed_moe)
