"""RMSNorm, alone and with the residual adds before it; Beam's residual is scaled by depth.

    rmsnorm(x) = x / sqrt(mean(x^2) + eps) * weight      (Zhang and Sennrich, 2019)

Norms are FP32 inside and rounded once at the end; every residual add is rounded.
"""

import math
from functools import cache as remember

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from limelight.ops import next_power_of_2, op, pdl


@remember
def _numbers(size: int, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`eps` and `size` as tensors for a CPU, where making them takes longer than their use."""
    with torch.inference_mode(False):
        return torch.tensor(eps, device="cpu"), torch.tensor(float(size), device="cpu")


def unit_rms(x_TD: torch.Tensor, *, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension, of FP32.

    On a CPU torch's own takes twice as many calls, and twice the time, for the same numbers.
    """
    size = x_TD.shape[-1]
    if x_TD.device.type != "cpu":
        return F.rms_norm(x_TD, (size,), None, eps)
    eps_, size_ = _numbers(size, eps)
    squares_T1 = (x_TD * x_TD).sum(-1, keepdim=True)
    return torch.addcdiv(eps_, squares_T1, size_).rsqrt() * x_TD


def rmsnorm_reference(x_TD: torch.Tensor, weight_D: torch.Tensor, *, eps: float) -> torch.Tensor:
    """Normalize the last dimension; any leading shape. The result has the type of `x_TD`."""
    if x_TD.device.type != "cpu":
        y_TD = F.rms_norm(x_TD.float(), x_TD.shape[-1:], weight_D.float(), eps)
    else:
        y_TD = unit_rms(x_TD.float(), eps=eps) * weight_D
    return y_TD.to(x_TD.dtype)


def add_rmsnorm_reference(
    h_TD: torch.Tensor, x_TD: torch.Tensor, weight_D: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """h + x, and its norm."""
    h_TD = h_TD + x_TD
    return h_TD, rmsnorm_reference(h_TD, weight_D, eps=eps)


def depth_factors(n: int) -> tuple[float, float]:
    """Of the stream and of what is added to it, at the n-th residual add."""
    return math.sqrt((n - 1) / n), 1.0 / math.sqrt(n)


def depth_scaled_add(h_TD: torch.Tensor, x_TD: torch.Tensor, *, n: int) -> torch.Tensor:
    """The n-th residual add of a network whose stream keeps its variance.

    h <- sqrt((n - 1) / n) * h + x / sqrt(n), each product and the sum rounded, as trained.
    """
    keep, add = depth_factors(n)
    return x_TD * add + h_TD * keep


def sandwich_reference(
    h_TD: torch.Tensor,
    x_TD: torch.Tensor,
    post_D: torch.Tensor,
    pre_D: torch.Tensor,
    *,
    n: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The n-th add of norm(x) to h, and the norm before the next layer: new h, its norm."""
    h_TD = depth_scaled_add(h_TD, rmsnorm_reference(x_TD, post_D, eps=eps), n=n)
    return h_TD, rmsnorm_reference(h_TD, pre_D, eps=eps)


@triton.jit
def normalized(x_D, weight_D, size, eps):
    """For kernels: the norm of one row, all FP32."""
    return x_D * tl.rsqrt(tl.sum(x_D * x_D, axis=0) / size + eps) * weight_D


@triton.jit
def added(h_D, x_D, weight_D, size, eps, dtype: tl.constexpr):
    """For kernels: h + x rounded, and the norm of that in FP32."""
    sum_D = (h_D + x_D).to(dtype)
    return sum_D, normalized(sum_D.to(tl.float32), weight_D, size, eps)


@triton.jit
def sandwiched(h_D, x_D, post_D, pre_D, keep, add, size, eps, dtype: tl.constexpr):
    """For kernels: h with norm(x), each step rounded, and the norm of that in FP32.

    `keep` and `add` are the factors of h and of norm(x).
    """
    z_D = normalized(x_D, post_D, size, eps).to(dtype).to(tl.float32)
    sum_D = (z_D * add).to(dtype).to(tl.float32) + (h_D * keep).to(dtype).to(tl.float32)
    sum_D = sum_D.to(dtype)
    return sum_D, normalized(sum_D.to(tl.float32), pre_D, size, eps)


@triton.jit
def _norm_kernel(
    h, x, weight, out_h, out_y, stride_h, stride_x, size, eps,
    BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row a program; without x only the norm of h."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    inside = d < size
    weight_D = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    h_D = tl.load(h + t * stride_h + d, mask=inside, other=0.0).to(tl.float32)
    if x is None:
        y_D = normalized(h_D, weight_D, size, eps)
    else:
        x_D = tl.load(x + t * stride_x + d, mask=inside, other=0.0).to(tl.float32)
        sum_D, y_D = added(h_D, x_D, weight_D, size, eps, out_h.dtype.element_ty)
        tl.store(out_h + t * size + d, sum_D, mask=inside)
    tl.store(out_y + t * size + d, y_D.to(out_y.dtype.element_ty), mask=inside)


@triton.jit
def _sandwich_kernel(
    h, x, post, pre, out_h, out_y, stride_h, stride_x, size, keep, add, eps,
    BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row a program."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    inside = d < size
    dtype: tl.constexpr = out_h.dtype.element_ty
    post_D = tl.load(post + d, mask=inside, other=0.0).to(tl.float32)
    pre_D = tl.load(pre + d, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x_D = tl.load(x + t * stride_x + d, mask=inside, other=0.0).to(tl.float32)
    h_D = tl.load(h + t * stride_h + d, mask=inside, other=0.0).to(tl.float32)
    sum_D, y_D = sandwiched(h_D, x_D, post_D, pre_D, keep, add, size, eps, dtype)
    tl.store(out_h + t * size + d, sum_D, mask=inside)
    tl.store(out_y + t * size + d, y_D.to(dtype), mask=inside)


def whole_row(size: int) -> dict[str, int]:
    """The whole row, with 16 elements a thread."""
    block = next_power_of_2(size)
    return {"BLOCK_D": block, "num_warps": min(max(block // 512, 1), 16)}


def check_rows(*rows_TD: torch.Tensor) -> None:
    """Rows may lie apart, their elements may not; all have one shape and type."""
    first = rows_TD[0]
    for x_TD in rows_TD:
        assert x_TD.shape == first.shape and x_TD.dtype == first.dtype
        assert x_TD.stride(-1) == 1


def check_weights(size: int, *weights_D: torch.Tensor) -> None:
    for weight_D in weights_D:
        assert weight_D.shape == (size,) and weight_D.is_contiguous()


def _launch_rmsnorm(x_TD: torch.Tensor, weight_D: torch.Tensor, *, eps: float) -> torch.Tensor:
    rows_TD = x_TD.reshape(-1, x_TD.shape[-1])
    rows, size = rows_TD.shape
    check_rows(rows_TD)
    check_weights(size, weight_D)
    y_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    if rows:
        _norm_kernel[(rows,)](
            rows_TD, None, weight_D, None, y_TD, rows_TD.stride(0), 0, size, eps,
            **whole_row(size), **pdl(x_TD),
        )  # fmt: skip
    return y_TD


def _launch_add_rmsnorm(
    h_TD: torch.Tensor, x_TD: torch.Tensor, weight_D: torch.Tensor, *, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, size = h_TD.shape
    check_rows(h_TD, x_TD)
    check_weights(size, weight_D)
    out_TD, y_TD = (torch.empty_like(h_TD, memory_format=torch.contiguous_format) for _ in "hy")
    if rows:
        _norm_kernel[(rows,)](
            h_TD, x_TD, weight_D, out_TD, y_TD, h_TD.stride(0), x_TD.stride(0), size, eps,
            **whole_row(size), **pdl(h_TD),
        )  # fmt: skip
    return out_TD, y_TD


def _launch_sandwich(
    h_TD: torch.Tensor,
    x_TD: torch.Tensor,
    post_D: torch.Tensor,
    pre_D: torch.Tensor,
    *,
    n: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, size = h_TD.shape
    check_rows(h_TD, x_TD)
    check_weights(size, post_D, pre_D)
    out_TD, y_TD = (torch.empty_like(h_TD, memory_format=torch.contiguous_format) for _ in "hy")
    if rows:
        _sandwich_kernel[(rows,)](
            h_TD, x_TD, post_D, pre_D, out_TD, y_TD, h_TD.stride(0), x_TD.stride(0), size,
            *depth_factors(n), eps,
            **whole_row(size), **pdl(h_TD),
        )  # fmt: skip
    return out_TD, y_TD


rmsnorm = op(reference=rmsnorm_reference, kernel=_launch_rmsnorm)
add_rmsnorm = op(reference=add_rmsnorm_reference, kernel=_launch_add_rmsnorm)
sandwich = op(reference=sandwich_reference, kernel=_launch_sandwich)
