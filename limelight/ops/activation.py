"""SwiGLU in two roundings, the output gate of Beam's attention, and the soft cap of its logits."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from limelight.ops import cdiv, invariant, is_batch_invariant, op, pdl

Activation = Callable[[torch.Tensor], torch.Tensor]


def swiglu(gate_up_TF: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for a row [gate, up]: [..., 2F] -> [..., F]. Each is rounded, as in Flint."""
    gate_TF, up_TF = gate_up_TF.chunk(2, dim=-1)
    return _silu(gate_TF) * up_TF


def _silu(x_TF: torch.Tensor) -> torch.Tensor:
    return invariant.silu(x_TF) if is_batch_invariant() else F.silu(x_TF)


def swiglu_fp32(gate_up_TF: torch.Tensor) -> torch.Tensor:
    """The same in FP32, rounded once, as in Beam."""
    gate_TF, up_TF = gate_up_TF.float().chunk(2, dim=-1)
    return (_silu(gate_TF) * up_TF).to(gate_up_TF.dtype)


@triton.jit
def rounded_swiglu(gate, up, FP32: tl.constexpr, dtype: tl.constexpr):
    """For kernels: `swiglu_fp32` or `swiglu` of FP32 products, which are rounded first."""
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    silu = gate / (1.0 + tl.exp(-gate))
    if not FP32:
        silu = silu.to(dtype).to(tl.float32)
    return (silu * up).to(dtype)


def output_gate(
    out_THC: torch.Tensor, gate_THC: torch.Tensor, bias_H: torch.Tensor
) -> torch.Tensor:
    """out * sigmoid(gate + bias of its head), the sum, the sigmoid and the product rounded."""
    sigmoid = invariant.sigmoid if is_batch_invariant() else torch.sigmoid
    return out_THC * sigmoid(gate_THC + bias_H[:, None])


@triton.jit
def gated(out, gate, bias):
    """For kernels: `output_gate` of rounded results; the bias is FP32."""
    dtype: tl.constexpr = out.dtype
    gate = (gate.to(tl.float32) + bias).to(dtype).to(tl.float32)
    open_ = (1.0 / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    return (out.to(tl.float32) * open_).to(dtype)


def softcap_reference(logits_TV: torch.Tensor, *, cap: float) -> torch.Tensor:
    """cap * tanh(logits / cap): FP32 in, FP32 out."""
    return torch.tanh(logits_TV / cap) * cap


@triton.jit
def _softcap_kernel(logits, out, size, cap, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + at, mask=at < size, other=0.0)
    # tanh of the magnitude; exp cannot overflow.
    shrunk = tl.exp(-2.0 * tl.abs(x / cap))
    y = cap * (1.0 - shrunk) / (1.0 + shrunk)
    tl.store(out + at, tl.where(x < 0, -y, y), mask=at < size)


def _launch_softcap(logits_TV: torch.Tensor, *, cap: float) -> torch.Tensor:
    logits_TV = logits_TV.contiguous()
    assert logits_TV.dtype == torch.float32
    out_TV = torch.empty_like(logits_TV)
    if size := logits_TV.numel():
        _softcap_kernel[(cdiv(size, 1024),)](
            logits_TV, out_TV, size, cap, BLOCK=1024, **pdl(logits_TV)
        )
    return out_TV


softcap = op(reference=softcap_reference, kernel=_launch_softcap)
