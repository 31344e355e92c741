"""What happens to queries and keys between projection and attention, and their way to the cache.

Each head of queries and keys is normalized on its kind's weight (FP32, rounded once); then one of
    rotation     x -> [x1 cos - x2 sin, x2 cos + x1 sin] on the halves of a head  (RoFormer, NeoX)
    SSMax        q -> q * (1 + p / 2048)^0.1, p the position counted from 1  (Scalable-Softmax)
    nothing      (NoPE)
A rotation in the type of the activations rounds its products and their sum, as Flint does; one in
FP32 is rounded once, as the product with SSMax is.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from limelight.ops import op
from limelight.ops.paging import LayerCache


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of an attention layer on this rank: how many of queries and of keys, and the eps
    of their norms."""

    queries: int
    keys: int
    eps: float


@dataclass(frozen=True, slots=True)
class Rotation:
    """[cos, cos] and [-sin, sin] of the angles of the tokens' positions: [T, 1, C].

    FP32, or the type of the activations in a model that rotates in it.
    """

    cos: torch.Tensor
    sin: torch.Tensor


def rotation_reference(
    positions_T: torch.Tensor, *, head_dim: int, theta: float, dtype: torch.dtype
) -> Rotation:
    """The angles p * theta^(-2i / head_dim) of each position, FP32; their sines in `dtype`."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions_T.device)
    inv_freq = 1.0 / (theta ** (exponent / head_dim))
    angles = (positions_T.float()[:, None] * inv_freq)[:, None, :]
    cos, sin = angles.cos(), angles.sin()
    return Rotation(
        cos=torch.cat((cos, cos), dim=-1).to(dtype), sin=torch.cat((-sin, sin), dim=-1).to(dtype)
    )


def ssmax_reference(positions_T: torch.Tensor) -> torch.Tensor:
    """(1 + (position + 1) / 2048)^0.1 of zero-based positions: FP32 [T]."""
    return torch.exp(0.1 * torch.log1p((positions_T.float() + 1.0) / 2048.0))


def _rotate(x_TJC: torch.Tensor, turn: Rotation) -> torch.Tensor:
    """The rotation of every head in `x_TJC`, in the wider type of the two."""
    # Rolling by half a head puts [x2, x1] under [-sin, sin].
    rolled_TJC = x_TJC.roll(x_TJC.shape[-1] // 2, dims=-1)
    return (x_TJC * turn.cos + rolled_TJC * turn.sin).to(x_TJC.dtype)


def split_heads(
    qkv_TN: torch.Tensor,
    weight_2C: torch.Tensor,
    *,
    heads: Heads,
    turn: Rotation | None = None,
    ssmax_T: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries and keys ready for attention, and values, of rows [q | k | v | ...]; differentiable.

    `weight_2C` holds the weight of the queries' norm and of the keys'. Returns q [T, H, C] and
    k and v [T, K, C].
    """
    kinds = (heads.queries, heads.keys)
    rows_TJC = qkv_TN.unflatten(-1, (-1, weight_2C.shape[-1]))
    qk_TJC, v_TKC = rows_TJC[:, : sum(kinds) + heads.keys].split((sum(kinds), heads.keys), dim=1)
    parts = zip(weight_2C, kinds, strict=True)
    weight_JC = torch.cat([weight_C.expand(count, -1) for weight_C, count in parts])
    normed_TJC = F.rms_norm(qk_TJC.float(), weight_JC.shape[-1:], None, heads.eps) * weight_JC
    qk_TJC = normed_TJC.to(qkv_TN.dtype)
    if turn is not None:
        qk_TJC = _rotate(qk_TJC, turn)
    q_THC, k_TKC = qk_TJC.split(kinds, dim=1)
    if ssmax_T is not None:
        q_THC = (q_THC.float() * ssmax_T[:, None, None]).to(q_THC.dtype)
    return q_THC, k_TKC, v_TKC


def prepare_reference(
    qkv_TN: torch.Tensor,
    weight_2C: torch.Tensor,
    cache: LayerCache,
    slots_T: torch.Tensor,
    *,
    heads: Heads,
    turn: Rotation | None = None,
    ssmax_T: torch.Tensor | None = None,
) -> torch.Tensor:
    """Queries ready for attention, [T, H, C]; keys and values go into their slots of the cache.

    A row whose slot is -1 is padding: its key and value go nowhere.
    """
    q_THC, k_TKC, v_TKC = split_heads(qkv_TN, weight_2C, heads=heads, turn=turn, ssmax_T=ssmax_T)
    cache.write(slots_T, k_TKC, v_TKC)
    return q_THC


rotation = op(reference=rotation_reference, kernel=rotation_reference)
ssmax = op(reference=ssmax_reference, kernel=ssmax_reference)
prepare = op(reference=prepare_reference, kernel=prepare_reference)
