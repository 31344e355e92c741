"""The experts: sum over a token's N experts of weight * down(act(gate_up y)), and a shared one.

Gate and up are rounded to the type of the activations before SwiGLU, which rounds as the model
does (`fp32`, or silu and product apart); each expert's output is rounded, their weighted sum is
FP32 and rounded once. Then come the scale and the shared expert's rounded output, each rounded.

Kernels for a few rows read the chosen experts alone (`chosen.py`); many rows are sorted by expert
first (`grouped.py`). In a step whose rows have adapters beside the routed experts' weights, and
with weights of MXFP8, each product is a kernel of its own (`adapted.py`).
"""

import torch

from limelight.ops import grouped, invariant, is_batch_invariant, linear, op
from limelight.ops.activation import Activation, swiglu, swiglu_fp32
from limelight.ops.adapted import moe_by_products
from limelight.ops.chosen import few_moe, most_rows
from limelight.ops.combine import Unsummed
from limelight.ops.fp4 import FP4, PlainOrFP4
from limelight.ops.lora import Adapted, Matrix, add_lora, needed, without_adapters
from limelight.ops.mxfp8 import MXFP8
from limelight.ops.weight import Stack, Weight, multiply_reference

# On a CPU, for the few tokens of a decode step, calls cost more than arithmetic: all experts at
# once, in two products, beat a loop over those chosen while they are at most this many times the
# work.
ALL_AT_ONCE_TOKENS = 64
ALL_AT_ONCE_WASTE = 4


def moe_reference(
    y_TD: torch.Tensor,
    gate_up_EGD: Matrix,
    down_EDF: Matrix,
    weights_TN: torch.Tensor,
    ids_TN: torch.Tensor,
    shared_gate_up_GD: Matrix | None,
    shared_down_DF: Matrix | None,
    *,
    fp32: bool,
    scale: float = 1.0,
) -> torch.Tensor:
    """[T, D] -> [T, D]; a matrix `gate_up` holds gate above up, G = 2F; `weights_TN` is FP32.

    The shared expert, where there is one, may be of another width."""
    act = swiglu_fp32 if fp32 else swiglu
    gate_up_EGD, down_EDF = needed(gate_up_EGD), needed(down_EDF)
    assert not isinstance(gate_up_EGD, Stack) and not isinstance(down_EDF, Stack)
    experts, alike = len(gate_up_EGD), is_batch_invariant()
    few = len(y_TD) <= ALL_AT_ONCE_TOKENS and experts <= ALL_AT_ONCE_WASTE * ids_TN.shape[1]
    if isinstance(gate_up_EGD, Adapted) or isinstance(down_EDF, Adapted):
        out_TD = _adapted_sum(y_TD, gate_up_EGD, down_EDF, weights_TN, ids_TN, act)
    elif len(y_TD) == 1 and not alike:
        out_TD = _sum_of_one_row(y_TD, gate_up_EGD, down_EDF, weights_TN, ids_TN, act)
    elif (
        few
        and not alike
        and isinstance(gate_up_EGD, torch.Tensor)
        and isinstance(down_EDF, torch.Tensor)
    ):
        out_TD = _sum_of_all(y_TD, gate_up_EGD, down_EDF, weights_TN, ids_TN, act)
    else:
        out_TD = _sum_by_expert(y_TD, gate_up_EGD, down_EDF, weights_TN, ids_TN, act)
    if scale != 1.0:
        out_TD = out_TD * scale
    if shared_gate_up_GD is not None and shared_down_DF is not None:
        inner_TF = linear.swiglu_project.reference(y_TD, shared_gate_up_GD, fp32=fp32)
        out_TD = out_TD + linear.project.reference(inner_TF, shared_down_DF)
    return out_TD


def _sum_of_one_row(
    y_TD: torch.Tensor,
    gate_up_EGD: Weight,
    down_EDF: Weight,
    weights_TN: torch.Tensor,
    ids_TN: torch.Tensor,
    act: Activation,
) -> torch.Tensor:
    """The weighted sum of a single row's experts, one after another."""
    parts = [
        multiply_reference(act(multiply_reference(y_TD, gate_up_EGD[e])), down_EDF[e])
        for e in ids_TN[0].tolist()
    ]
    return torch.mm(weights_TN, torch.cat(parts).float()).to(y_TD.dtype)


def _sum_of_all(
    y_TD: torch.Tensor,
    gate_up_EGD: torch.Tensor,
    down_EDF: torch.Tensor,
    weights_TN: torch.Tensor,
    ids_TN: torch.Tensor,
    act: Activation,
) -> torch.Tensor:
    """The weighted sum from what all experts make of all rows."""
    experts = len(gate_up_EGD)
    gate_up_ETG = torch.bmm(y_TD.expand(experts, -1, -1), gate_up_EGD.mT)
    out_TED = torch.bmm(act(gate_up_ETG), down_EDF.mT).transpose(0, 1)
    weights_TE = weights_TN.new_zeros(len(y_TD), experts).scatter(1, ids_TN, weights_TN)
    return _weighted_sum(weights_TE, out_TED)


def _sum_by_expert(
    y_TD: torch.Tensor,
    gate_up_EGD: Weight,
    down_EDF: Weight,
    weights_TN: torch.Tensor,
    ids_TN: torch.Tensor,
    act: Activation,
) -> torch.Tensor:
    """The weighted sum where each expert takes the rows that chose it."""
    order_P = ids_TN.flatten().argsort(stable=True)
    sizes = torch.bincount(ids_TN.flatten(), minlength=len(gate_up_EGD)).tolist()
    rows_PD = y_TD[order_P // ids_TN.shape[1]]
    parts = [
        multiply_reference(act(multiply_reference(part_XD, gate_up_EGD[e])), down_EDF[e])
        for e, part_XD in enumerate(rows_PD.split(sizes))
        if sizes[e]
    ]
    out_PD = torch.cat([rows_PD[:0], *parts])[order_P.argsort()]
    weigh = invariant.weighted_sum if is_batch_invariant() else _weighted_sum
    return weigh(weights_TN, out_PD.unflatten(0, ids_TN.shape))


def _adapted_sum(
    y_TD: torch.Tensor,
    gate_up_EGD: Matrix,
    down_EDF: Matrix,
    weights_TN: torch.Tensor,
    ids_TN: torch.Tensor,
    act: Activation,
) -> torch.Tensor:
    """The weighted sum where a row's adapter adds to what its experts make."""
    order_P = ids_TN.flatten().argsort(stable=True)
    rows_P = order_P // ids_TN.shape[1]
    sizes = torch.bincount(ids_TN.flatten(), minlength=len(gate_up_EGD)).tolist()
    parts = [
        _product_of(e, act(_product_of(e, y_TD[rows_X], rows_X, gate_up_EGD)), rows_X, down_EDF)
        for e, rows_X in enumerate(rows_P.split(sizes))
        if sizes[e]
    ]
    out_PD = torch.cat([y_TD[:0], *parts])[order_P.argsort()]
    return _weighted_sum(weights_TN, out_PD.unflatten(0, ids_TN.shape))


def _product_of(
    e: int, x_XF: torch.Tensor, rows_X: torch.Tensor, weight_EDF: Matrix
) -> torch.Tensor:
    """That of an expert, for these rows of the step."""
    if not isinstance(weight_EDF, Adapted):
        return multiply_reference(x_XF, without_adapters(weight_EDF)[e])
    own, adapters_T = weight_EDF.expert(e), weight_EDF.step.of_rows_T
    assert adapters_T is not None
    y_XD = multiply_reference(x_XF, own.base)
    return add_lora.reference(
        x_XF, adapters_T[rows_X], own.a, own.b, own.starts, own.sizes, onto=y_XD
    )


def _weighted_sum(weights_TN: torch.Tensor, out_TND: torch.Tensor) -> torch.Tensor:
    return torch.bmm(weights_TN[:, None], out_TND.float())[:, 0].to(out_TND.dtype)


def _check(
    y_TD: torch.Tensor,
    gate_up_EGD: Matrix,
    down_EDF: Matrix,
    shared_gate_up_GD: Matrix | None,
    shared_down_DF: Matrix | None,
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
        alone = weight.base if isinstance(weight, Adapted) else weight
        for part in alone.parts if isinstance(alone, Stack) else (alone,):
            if isinstance(part, torch.Tensor):
                assert part.is_contiguous() and part.dtype == y_TD.dtype
            else:
                part.check()


def _launch_moe(
    y_TD: torch.Tensor,
    gate_up_EGD: Matrix,
    down_EDF: Matrix,
    weights_TN: torch.Tensor,
    ids_TN: torch.Tensor,
    shared_gate_up_GD: Matrix | None,
    shared_down_DF: Matrix | None,
    *,
    fp32: bool,
    scale: float = 1.0,
) -> torch.Tensor:
    out = _launch_unsummed_moe(
        y_TD, gate_up_EGD, down_EDF, weights_TN, ids_TN, shared_gate_up_GD, shared_down_DF,
        fp32=fp32, scale=scale,
    )  # fmt: skip
    return out.combined() if isinstance(out, Unsummed) else out


def unsummed_moe_reference(
    y_TD: torch.Tensor,
    gate_up_EGD: Matrix,
    down_EDF: Matrix,
    weights_TN: torch.Tensor,
    ids_TN: torch.Tensor,
    shared_gate_up_GD: Matrix | None,
    shared_down_DF: Matrix | None,
    *,
    fp32: bool,
    scale: float = 1.0,
) -> torch.Tensor | Unsummed:
    """As `moe`; where a kernel of its own would sum the experts' outputs, these as they are."""
    return moe_reference(
        y_TD, gate_up_EGD, down_EDF, weights_TN, ids_TN, shared_gate_up_GD, shared_down_DF,
        fp32=fp32, scale=scale,
    )  # fmt: skip


def _launch_unsummed_moe(
    y_TD: torch.Tensor,
    gate_up_EGD: Matrix,
    down_EDF: Matrix,
    weights_TN: torch.Tensor,
    ids_TN: torch.Tensor,
    shared_gate_up_GD: Matrix | None,
    shared_down_DF: Matrix | None,
    *,
    fp32: bool,
    scale: float = 1.0,
) -> torch.Tensor | Unsummed:
    _check(y_TD, gate_up_EGD, down_EDF, shared_gate_up_GD, shared_down_DF)
    gate_up_EGD, down_EDF = needed(gate_up_EGD), needed(down_EDF)
    assert weights_TN.shape == ids_TN.shape and len(ids_TN) == len(y_TD)
    assert weights_TN.dtype == torch.float32
    assert weights_TN.is_contiguous() and ids_TN.is_contiguous()
    if not len(y_TD):
        return torch.empty_like(y_TD)
    added_TD, wide_GD, narrow_DF = None, None, None
    if shared_gate_up_GD is not None and shared_down_DF is not None:
        shared = needed(shared_gate_up_GD), needed(shared_down_DF)
        kinds = set(map(_kind, (gate_up_EGD, *shared)))
        if len(kinds) > 1 or kinds & BY_PRODUCTS:
            # The kernels take routed and shared weights of one kind.
            inner_TF = linear.swiglu_project.kernel(y_TD, shared[0], fp32=fp32)
            added_TD = linear.project.kernel(inner_TF, shared[1])
        else:
            wide_GD, narrow_DF = map(_fused, shared)
    if {_kind(gate_up_EGD), _kind(down_EDF)} & BY_PRODUCTS:
        return moe_by_products(
            y_TD, gate_up_EGD, down_EDF, weights_TN, ids_TN, added_TD, fp32=fp32, scale=scale
        )
    gate_up, down = _fused(gate_up_EGD), _fused(down_EDF)
    few = _kind(gate_up) == _kind(down) and len(y_TD) <= most_rows(y_TD.shape[1], gate_up)
    few = few and not is_batch_invariant()
    return (few_moe if few else grouped.unsummed_moe)(
        y_TD, gate_up, down, weights_TN, ids_TN, wide_GD, narrow_DF, added_TD,
        fp32=fp32, scale=scale,
    )  # fmt: skip


def _fused(weight: Matrix) -> PlainOrFP4:
    """A weight that the fused kernels take."""
    assert isinstance(weight, torch.Tensor | FP4)
    return weight


def _kind(weight: Matrix) -> type:
    return torch.Tensor if isinstance(weight, torch.Tensor) else type(weight)


# Weights that the fused kernels do not take.
BY_PRODUCTS = {Adapted, Stack, MXFP8}


moe = op(reference=moe_reference, kernel=_launch_moe)
unsummed_moe = op(reference=unsummed_moe_reference, kernel=_launch_unsummed_moe)
