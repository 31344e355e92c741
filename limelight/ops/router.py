"""Which experts a token goes to, and with what weight; FP32 throughout.

    s = sigmoid(y W^T);  choice = s + bias;  the N best by choice;  weight = s / sum of the N

Flint has no bias, and its `norm_route` begins with the residual add and norm that make y, each
rounded to the type of the activations. With groups (DeepSeek-V3), as in Beam, experts compete only
inside the best groups; a group's score is the sum of its two best choices. Of equal choices the
first expert wins.
"""

import torch
import torch.nn.functional as F

from limelight.ops import op
from limelight.ops.norm import rmsnorm


def sigmoid_scores(x_TD: torch.Tensor, router_ED: torch.Tensor) -> torch.Tensor:
    """sigmoid(x W^T), FP32 [T, E], whatever the type of `x_TD`."""
    return torch.sigmoid(F.linear(x_TD.float(), router_ED))


def norm_route_reference(
    h_TD: torch.Tensor,
    x_TD: torch.Tensor,
    norm_D: torch.Tensor,
    router_ED: torch.Tensor,
    *,
    eps: float,
    count: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """h + x, its RMSNorm y, and of y the weights FP32 [T, N] and ids [T, N] of the best experts."""
    h_TD = h_TD + x_TD
    y_TD = rmsnorm(h_TD, norm_D, eps=eps)
    weights_TN, ids_TN = top_experts(sigmoid_scores(y_TD, router_ED), count=count)
    return h_TD, y_TD, weights_TN, ids_TN


def route_reference(
    y_TD: torch.Tensor,
    router_ED: torch.Tensor,
    bias_E: torch.Tensor,
    *,
    count: int,
    groups: int,
    kept_groups: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights FP32 [T, N] and expert ids [T, N], chosen by score + bias in the best groups."""
    return grouped_top_experts(
        sigmoid_scores(y_TD, router_ED), bias_E, count=count, groups=groups, kept_groups=kept_groups
    )


def top_experts(scores_TE: torch.Tensor, *, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights FP32 [T, N] and expert ids [T, N] of the `count` best by score."""
    weights_TN, ids_TN = torch.topk(scores_TE, count, dim=-1)
    return weights_TN / weights_TN.sum(dim=-1, keepdim=True), ids_TN


def grouped_top_experts(
    scores_TE: torch.Tensor, bias_E: torch.Tensor, *, count: int, groups: int, kept_groups: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights FP32 [T, N] and expert ids [T, N], chosen by score + bias in the best groups."""
    choice_TGX = (scores_TE + bias_E).unflatten(-1, (groups, -1))
    best_TG = choice_TGX.topk(2, dim=-1).values.sum(dim=-1)
    kept = torch.zeros_like(best_TG, dtype=torch.bool)
    kept.scatter_(1, best_TG.topk(kept_groups, dim=-1).indices, True)
    choice_TE = choice_TGX.masked_fill(~kept[..., None], float("-inf")).flatten(-2)
    ids_TN = choice_TE.topk(count, dim=-1).indices
    weights_TN = scores_TE.gather(1, ids_TN)
    return weights_TN / (weights_TN.sum(dim=-1, keepdim=True) + 1e-20), ids_TN


# A kernel takes the place of the second.
norm_route = op(reference=norm_route_reference, kernel=norm_route_reference)
route = op(reference=route_reference, kernel=route_reference)
