"""Products with a weight, alone or with the norm before and the SwiGLU after them.

    project         y = x W^T
    norm_project    h = h + x;  y = rmsnorm(h) W^T
    norm_swiglu     the same, and silu(gate) * up of y = [gate, up]
    swiglu_project  y = x W^T, and silu(gate) * up of it
    lm_head         y = x W^T in FP32

Products accumulate in FP32 and are rounded once; h and its norm are rounded before the product,
which is rounded before SwiGLU. `fp32` chooses SwiGLU rounded once (Beam), else each of silu and
the product is (Flint). The logits of `lm_head` are not rounded.
"""

import torch
import torch.nn.functional as F

from limelight.ops import op
from limelight.ops.activation import swiglu, swiglu_fp32
from limelight.ops.norm import add_rmsnorm_reference, rmsnorm_reference


def project_reference(x_TF: torch.Tensor, weight_DF: torch.Tensor) -> torch.Tensor:
    """x W^T: [T, D]."""
    return F.linear(x_TF, weight_DF)


def _normed(
    h_TD: torch.Tensor, x_TD: torch.Tensor | None, norm_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if x_TD is None:
        return h_TD, rmsnorm_reference(h_TD, norm_D, eps=eps)
    return add_rmsnorm_reference(h_TD, x_TD, norm_D, eps=eps)


def norm_project_reference(
    h_TD: torch.Tensor,
    x_TD: torch.Tensor | None,
    norm_D: torch.Tensor,
    weight_ND: torch.Tensor,
    *,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """h + x (without x: h itself), and the product [T, N] of its norm."""
    h_TD, y_TD = _normed(h_TD, x_TD, norm_D, eps)
    return h_TD, F.linear(y_TD, weight_ND)


def norm_swiglu_reference(
    h_TD: torch.Tensor,
    x_TD: torch.Tensor | None,
    norm_D: torch.Tensor,
    gate_up_GD: torch.Tensor,
    *,
    eps: float,
    fp32: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """h + x (without x: h itself), and SwiGLU [T, F] of the product of its norm."""
    h_TD, y_TD = _normed(h_TD, x_TD, norm_D, eps)
    return h_TD, swiglu_project_reference(y_TD, gate_up_GD, fp32=fp32)


def swiglu_project_reference(
    x_TD: torch.Tensor, gate_up_GD: torch.Tensor, *, fp32: bool
) -> torch.Tensor:
    """SwiGLU [T, F] of x W^T; the rows of W are the gate's and then up's."""
    act = swiglu_fp32 if fp32 else swiglu
    return act(F.linear(x_TD, gate_up_GD))


def lm_head_reference(x_TD: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    """x W^T: FP32 [T, V] of operands in their own types."""
    return F.linear(x_TD.float(), weight_VD.float())


project = op(reference=project_reference, kernel=project_reference)
norm_project = op(reference=norm_project_reference, kernel=norm_project_reference)
norm_swiglu = op(reference=norm_swiglu_reference, kernel=norm_swiglu_reference)
swiglu_project = op(reference=swiglu_project_reference, kernel=swiglu_project_reference)
lm_head = op(reference=lm_head_reference, kernel=lm_head_reference)
