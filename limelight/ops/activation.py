"""SwiGLU in two roundings, the output gate of Beam's attention, and the soft cap of its logits."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

Activation = Callable[[torch.Tensor], torch.Tensor]


def swiglu(gate_up_TF: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for a row [gate, up]: [..., 2F] -> [..., F]. Each is rounded, as in Flint."""
    gate_TF, up_TF = gate_up_TF.chunk(2, dim=-1)
    return F.silu(gate_TF) * up_TF


def swiglu_fp32(gate_up_TF: torch.Tensor) -> torch.Tensor:
    """The same in FP32, rounded once, as in Beam."""
    gate_TF, up_TF = gate_up_TF.float().chunk(2, dim=-1)
    return (F.silu(gate_TF) * up_TF).to(gate_up_TF.dtype)


def output_gate(
    out_THC: torch.Tensor, gate_THC: torch.Tensor, bias_H: torch.Tensor
) -> torch.Tensor:
    """out * sigmoid(gate + bias of its head), the sum, the sigmoid and the product rounded."""
    return out_THC * torch.sigmoid(gate_THC + bias_H[:, None])


def softcap(logits_TV: torch.Tensor, *, cap: float) -> torch.Tensor:
    """cap * tanh(logits / cap): FP32 in, FP32 out."""
    return torch.tanh(logits_TV / cap) * cap
