"""RMSNorm, and Beam's residual that is scaled by depth.

    rmsnorm(x) = x / sqrt(mean(x^2) + eps) * weight      (Zhang and Sennrich, 2019)

All in FP32, rounded once at the end.
"""

import math

import torch
import torch.nn.functional as F


def rmsnorm(x_TD: torch.Tensor, weight_D: torch.Tensor, *, eps: float) -> torch.Tensor:
    """Normalize the last dimension; any leading shape. The result has the type of `x_TD`."""
    y_TD = F.rms_norm(x_TD.float(), x_TD.shape[-1:], weight_D.float(), eps)
    return y_TD.to(x_TD.dtype)


def rmsnorm_by_head(x_TJC: torch.Tensor, weight_JC: torch.Tensor, *, eps: float) -> torch.Tensor:
    """Normalize each head on a weight of its own."""
    y_TJC = F.rms_norm(x_TJC.float(), x_TJC.shape[-1:], None, eps) * weight_JC
    return y_TJC.to(x_TJC.dtype)


def depth_scaled_add(h_TD: torch.Tensor, x_TD: torch.Tensor, *, n: int) -> torch.Tensor:
    """The n-th residual add of a network whose stream keeps its variance.

    h <- sqrt((n - 1) / n) * h + x / sqrt(n), each product and the sum rounded, as trained.
    """
    return x_TD * (1.0 / math.sqrt(n)) + h_TD * math.sqrt((n - 1) / n)
