"""What happens to queries and keys between projection and attention.

After the norm of each head, in FP32 and rounded once (Flint: in its own type), one of
    rotation     x -> [x1 cos - x2 sin, x2 cos + x1 sin] on the halves of a head  (RoFormer, NeoX)
    SSMax        q -> q * (1 + p / 2048)^0.1, p the position counted from 1  (Scalable-Softmax)
    nothing      (NoPE)
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Rotation:
    """[cos, cos] and [-sin, sin] of the angles of the tokens' positions: FP32 [T, 1, C]."""

    cos: torch.Tensor
    sin: torch.Tensor

    def to(self, dtype: torch.dtype) -> "Rotation":
        """Rounded, for a model that rotates in the type of its activations."""
        return Rotation(self.cos.to(dtype), self.sin.to(dtype))


def rotation(positions_T: torch.Tensor, *, head_dim: int, theta: float) -> Rotation:
    """The angles p * theta^(-2i / head_dim) of each position, FP32."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions_T.device)
    inv_freq = 1.0 / (theta ** (exponent / head_dim))
    angles = (positions_T.float()[:, None] * inv_freq)[:, None, :]
    cos, sin = angles.cos(), angles.sin()
    return Rotation(cos=torch.cat((cos, cos), dim=-1), sin=torch.cat((-sin, sin), dim=-1))


def ssmax_scale(positions_T: torch.Tensor) -> torch.Tensor:
    """(1 + (position + 1) / 2048)^0.1 of zero-based positions: FP32 [T, 1, 1]."""
    return torch.exp(0.1 * torch.log1p((positions_T.float() + 1.0) / 2048.0))[:, None, None]


def rotate(x_TJC: torch.Tensor, turn: Rotation) -> torch.Tensor:
    """The rotation of every head in `x_TJC`, in the wider type of the two."""
    # Rolling by half a head puts [x2, x1] under [-sin, sin].
    rolled_TJC = x_TJC.roll(x_TJC.shape[-1] // 2, dims=-1)
    return (x_TJC * turn.cos + rolled_TJC * turn.sin).to(x_TJC.dtype)


def scale_queries(q_THC: torch.Tensor, scale_T11: torch.Tensor) -> torch.Tensor:
    """Queries times a factor of their position, the product in FP32."""
    return (q_THC.float() * scale_T11).to(q_THC.dtype)
