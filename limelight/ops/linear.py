"""Products with a weight, alone or with the norm before and the SwiGLU after them.

    project         y = x W^T
    norm_project    h = h + x;  y = rmsnorm(h) W^T
    norm_swiglu     the same, and silu(gate) * up of y = [gate, up]
    swiglu_project  y = x W^T, and silu(gate) * up of it
    lm_head         y = x W^T in FP32

Products accumulate in FP32 and are rounded once; h and its norm are rounded before the product,
which is rounded before SwiGLU. `fp32` chooses SwiGLU rounded once (Beam), else each of silu and
the product is (Flint). The logits of `lm_head` are not rounded.

One row and a few go through kernels of our own (`thin.py`), one row with norm and SwiGLU within.
More rows, and more columns than registers hold, torch multiplies; NVFP4 weights `fp4.product`.
MXFP8 weights have a kernel for any number of rows, which are quantized too (`mxfp8.product`).

Where a weight has adapters beside it and a row has one, what it adds to y follows the product;
norm and SwiGLU are then kernels of their own.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from limelight.ops import fp4, invariant, is_batch_invariant, mxfp8, op, thin
from limelight.ops.activation import swiglu, swiglu_fp32
from limelight.ops.boundary import Partial, Summand, sum_add_rmsnorm, whole
from limelight.ops.fp4 import FP4
from limelight.ops.lora import Adapted, Matrix, add_lora, needed
from limelight.ops.mxfp8 import MXFP8
from limelight.ops.norm import add_rmsnorm, add_rmsnorm_reference, rmsnorm, rmsnorm_reference
from limelight.ops.weight import Stack, Weight, multiply_reference


def project_reference(x_TF: torch.Tensor, weight_DF: Matrix) -> torch.Tensor:
    """x W^T: [T, D]."""
    weight_DF = needed(weight_DF)
    if not isinstance(weight_DF, Adapted):
        return multiply_reference(x_TF, weight_DF)
    return _adapt(x_TF, weight_DF, multiply_reference(x_TF, weight_DF.base), add_lora.reference)


def _adapt(
    x_TF: torch.Tensor,
    weight: Adapted,
    y_TD: torch.Tensor,
    add: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """y, and what the adapters of its rows add."""
    adapters_T = weight.step.of_rows_T
    return add(
        x_TF, adapters_T, weight.a, weight.b, weight.starts, weight.sizes, onto=y_TD
    )  # fmt: skip


def _normed(
    h_TD: torch.Tensor, x_TD: Summand | None, norm_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if x_TD is None:
        return h_TD, rmsnorm_reference(h_TD, norm_D, eps=eps)
    return add_rmsnorm_reference(h_TD, whole(x_TD), norm_D, eps=eps)


def norm_project_reference(
    h_TD: torch.Tensor,
    x_TD: Summand | None,
    norm_D: torch.Tensor,
    weight_ND: Matrix,
    *,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """h + x (without x: h itself), and the product [T, N] of its norm."""
    h_TD, y_TD = _normed(h_TD, x_TD, norm_D, eps)
    return h_TD, project_reference(y_TD, weight_ND)


def norm_swiglu_reference(
    h_TD: torch.Tensor,
    x_TD: Summand | None,
    norm_D: torch.Tensor,
    gate_up_GD: Matrix,
    *,
    eps: float,
    fp32: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """h + x (without x: h itself), and SwiGLU [T, F] of the product of its norm."""
    h_TD, y_TD = _normed(h_TD, x_TD, norm_D, eps)
    return h_TD, swiglu_project_reference(y_TD, gate_up_GD, fp32=fp32)


def swiglu_project_reference(x_TD: torch.Tensor, gate_up_GD: Matrix, *, fp32: bool) -> torch.Tensor:
    """SwiGLU [T, F] of x W^T; the rows of W are the gate's and then up's."""
    act = swiglu_fp32 if fp32 else swiglu
    return act(project_reference(x_TD, gate_up_GD))


def lm_head_reference(x_TD: torch.Tensor, weight_VD: Weight) -> torch.Tensor:
    """x W^T: FP32 [T, V] of operands in their own types; where rows must not depend on their number
    it is rounded to that of x, as a trainer's is."""
    if isinstance(weight_VD, torch.Tensor):
        weight_VD = weight_VD.float()
    logits_TV = multiply_reference(x_TD.float(), weight_VD)
    return logits_TV.to(x_TD.dtype).float() if is_batch_invariant() else logits_TV


def _product(
    x_TF: torch.Tensor,
    weight_DF: Matrix,
    *,
    fp32: bool | None = None,
) -> torch.Tensor:
    """x W^T; `fp32` not None means SwiGLU follows."""
    weight_DF = needed(weight_DF)
    if isinstance(weight_DF, Adapted):
        y_TD = _adapt(x_TF, weight_DF, _product(x_TF, weight_DF.base), add_lora.kernel)
        return y_TD if fp32 is None else thin.swiglu_rows(y_TD, fp32=fp32)
    if isinstance(weight_DF, Stack):
        y_TD = torch.cat([_product(x_TF, part) for part in weight_DF.parts], dim=1)
        return y_TD if fp32 is None else thin.swiglu_rows(y_TD, fp32=fp32)
    if isinstance(weight_DF, MXFP8):
        return mxfp8.product(x_TF, weight_DF, fp32=fp32)
    if is_batch_invariant():
        y_TD = invariant.linear(x_TF, _unpacked(weight_DF))
        return y_TD if fp32 is None else thin.swiglu_rows(y_TD, fp32=fp32)
    if len(x_TF) == 1 and x_TF.shape[1] <= thin.MOST_COLUMNS:
        return thin.one_row(None, x_TF, None, weight_DF, fp32=fp32)[1]
    if thin.few_tile(len(x_TF), weight_DF) is not None:
        return thin.few_rows(x_TF, weight_DF, fp32=fp32)
    if isinstance(weight_DF, FP4):
        return fp4.product(x_TF, weight_DF, fp32=fp32)
    y_TD = F.linear(x_TF, weight_DF)
    return y_TD if fp32 is None else thin.swiglu_rows(y_TD, fp32=fp32)


def _launch_project(x_TF: torch.Tensor, weight_DF: Matrix) -> torch.Tensor:
    return _product(x_TF, weight_DF)


def _launch_norm(
    h_TD: torch.Tensor, x_TD: Summand | None, norm_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if x_TD is None:
        return h_TD, rmsnorm.kernel(h_TD, norm_D, eps=eps)
    if isinstance(x_TD, Partial):
        return sum_add_rmsnorm.kernel(h_TD, x_TD, norm_D, eps=eps)
    return add_rmsnorm.kernel(h_TD, x_TD, norm_D, eps=eps)


def _norm_product(
    h_TD: torch.Tensor,
    x_TD: Summand | None,
    norm_D: torch.Tensor,
    weight_ND: Matrix,
    *,
    eps: float,
    fp32: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    weight_ND = needed(weight_ND)
    one = len(h_TD) == 1 and h_TD.shape[1] <= thin.MOST_COLUMNS and not is_batch_invariant()
    if one and not isinstance(x_TD, Partial) and isinstance(weight_ND, torch.Tensor | FP4):
        sum_TD, y_TN = thin.one_row(h_TD, x_TD, norm_D, weight_ND, eps=eps, fp32=fp32)
        return h_TD if sum_TD is None else sum_TD, y_TN
    h_TD, y_TD = _launch_norm(h_TD, x_TD, norm_D, eps)
    return h_TD, _product(y_TD, weight_ND, fp32=fp32)


def _launch_norm_project(
    h_TD: torch.Tensor,
    x_TD: Summand | None,
    norm_D: torch.Tensor,
    weight_ND: Matrix,
    *,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _norm_product(h_TD, x_TD, norm_D, weight_ND, eps=eps)


def _launch_norm_swiglu(
    h_TD: torch.Tensor,
    x_TD: Summand | None,
    norm_D: torch.Tensor,
    gate_up_GD: Matrix,
    *,
    eps: float,
    fp32: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _norm_product(h_TD, x_TD, norm_D, gate_up_GD, eps=eps, fp32=fp32)


def _launch_swiglu_project(x_TD: torch.Tensor, gate_up_GD: Matrix, *, fp32: bool) -> torch.Tensor:
    return _product(x_TD, gate_up_GD, fp32=fp32)


def _unpacked(weight: Weight) -> torch.Tensor:
    """A weight where rows must not depend on their number: the start has seen to it."""
    assert isinstance(weight, torch.Tensor), "products of NVFP4 weights depend on the rows"
    return weight


def _launch_lm_head(x_TD: torch.Tensor, weight_VD: Weight) -> torch.Tensor:
    assert not isinstance(weight_VD, MXFP8), "the LM head is not of MXFP8"
    if is_batch_invariant():
        return invariant.linear(x_TD, _unpacked(weight_VD)).float()
    if isinstance(weight_VD, FP4):
        # The matrix units, which leave more of the time to decoding, win where rows are many.
        if thin.few_tile(len(x_TD), weight_VD) is not None:
            return thin.few_rows(x_TD, weight_VD, dtype=torch.float32)
        return fp4.product(x_TD, weight_VD, dtype=torch.float32)
    if len(x_TD) == 1 and x_TD.shape[1] <= thin.MOST_COLUMNS:
        return thin.one_row(None, x_TD, None, weight_VD, dtype=torch.float32)[1]
    # As fast for a few rows as a kernel of our own.
    return torch.mm(x_TD, weight_VD.T, out_dtype=torch.float32)


project = op(reference=project_reference, kernel=_launch_project)
norm_project = op(reference=norm_project_reference, kernel=_launch_norm_project)
norm_swiglu = op(reference=norm_swiglu_reference, kernel=_launch_norm_swiglu)
swiglu_project = op(reference=swiglu_project_reference, kernel=_launch_swiglu_project)
lm_head = op(reference=lm_head_reference, kernel=_launch_lm_head)
