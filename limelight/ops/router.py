"""Which experts a token goes to, and with what weight; FP32 throughout.

    s = sigmoid(x W^T);  choice = s + bias;  the N best by choice;  weight = s / sum of the N

With groups (DeepSeek-V3), experts compete only inside the best groups; a group's score is the sum
of its two best choices.
"""

import torch
import torch.nn.functional as F


def sigmoid_scores(x_TD: torch.Tensor, router_ED: torch.Tensor) -> torch.Tensor:
    """sigmoid(x W^T), FP32 [T, E], whatever the type of `x_TD`."""
    return torch.sigmoid(F.linear(x_TD.float(), router_ED))


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
