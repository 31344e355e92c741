"""Routed experts for training: every expert on every token, weighted by zero where not chosen.

For experts this small two dense products cost less than sorting tokens, and all shapes are fixed.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from limelight.models.beam import Beam
from limelight.models.flint import Flint
from limelight.models.layers import Experts, SwiGLU
from limelight.ops import router
from limelight.ops.activation import swiglu, swiglu_fp32


class DenseExperts(nn.Module):
    """Stands in for `Experts` with the same weights; keeps figures on how tokens are spread.

    After a forward `load_E` has each expert's share of the choices, and `imbalance` is 1 where
    both choices and scores are spread evenly and more where not (Switch Transformers, eq. 4).
    """

    def __init__(self, experts: Experts, router_ED: nn.Parameter):
        super().__init__()
        assert isinstance(experts.gate_up, nn.Parameter) and isinstance(experts.down, nn.Parameter)
        self.gate_up, self.down, self.router_ED = experts.gate_up, experts.down, router_ED
        self.act = swiglu_fp32 if experts.fp32 else swiglu
        self.scale = experts.scale
        self.load_E = self.imbalance = torch.empty(0)

    def forward(
        self,
        x_TD: torch.Tensor,
        weights_TN: torch.Tensor,
        ids_TN: torch.Tensor,
        shared: SwiGLU | None = None,
    ) -> torch.Tensor:
        count, _, inner = self.down.shape
        weights_TE = x_TD.new_zeros(len(x_TD), count, dtype=torch.float32)
        weights_TE = weights_TE.scatter(1, ids_TN, weights_TN)
        gate_up_TEG = F.linear(x_TD, self.gate_up.flatten(0, 1)).unflatten(-1, (count, 2 * inner))
        inner_TEF = self.act(gate_up_TEG)
        inner_TEF = (inner_TEF.float() * weights_TE[..., None]).to(x_TD.dtype)
        out_TD = F.linear(inner_TEF.flatten(1), self.down.transpose(0, 1).flatten(1))

        chosen_TE = torch.zeros_like(weights_TE).scatter(1, ids_TN, 1.0)
        self.load_E = chosen_TE.mean(dim=0) / ids_TN.shape[1]
        scores_TE = router.sigmoid_scores(x_TD, self.router_ED)
        spread_E = (scores_TE / scores_TE.sum(dim=-1, keepdim=True)).mean(dim=0)
        self.imbalance = count * (self.load_E * spread_E).sum()
        out_TD = out_TD * self.scale
        return out_TD if shared is None else out_TD + shared(x_TD)


def replace_experts(model: Flint | Beam) -> list[Any]:
    """Put `DenseExperts` into a Flint or Beam; returns its sparse feed-forwards."""
    sparse: list[Any] = [
        layer.feed_forward for layer in model.layers if hasattr(layer.feed_forward, "experts")
    ]
    for feed_forward in sparse:
        feed_forward.experts = DenseExperts(feed_forward.experts, feed_forward.router_ED)
    return sparse
