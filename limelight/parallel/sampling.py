"""The next token of rows whose logits lie divided among the ranks, which are not gathered.

A rank's share of the vocabulary is one interval of the cumulated probabilities. The ranks tell each
other the best logit of each row, where it is, and the weight of their share; from these all know
whose share holds the row's number, and that rank finds the token within it.
"""

import torch

from limelight.ops.sample import GREEDY_BELOW, mass, sample
from limelight.parallel.collectives import all_reduce, stacked
from limelight.parallel.mesh import Mesh


def sample_shares(
    logits_RS: torch.Tensor,
    temperature_R: torch.Tensor,
    uniform_R: torch.Tensor,
    mesh: Mesh,
    *,
    first: int,
    into: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `ops.sample.sample` without cut-offs, of the logits from token `first` on.

    Where a number falls within 1e-7 of the border of two tokens, either may be drawn.
    """
    best_R, at_R, weight_R = mass(logits_RS, temperature_R)
    own_3R = torch.stack((best_R.double(), (first + at_R).double(), weight_R))
    best_NR, at_NR, weight_NR = stacked(own_3R, mesh).unbind(1)
    top_R, rank_R = best_NR.max(dim=0)
    greedy_R = at_NR.gather(0, rank_R[None])[0].long()
    warmth_R = torch.where(temperature_R >= GREEDY_BELOW, temperature_R, 1.0)
    weight_NR = torch.where(weight_NR > 0, weight_NR * torch.exp((best_NR - top_R) / warmth_R), 0.0)
    cumulated_NR = weight_NR.cumsum(dim=0)
    target_R = uniform_R.double() * cumulated_NR[-1]
    # The first whose end is beyond the number, or else the last with a weight.
    ranks_N1 = torch.arange(mesh.size, device=logits_RS.device)[:, None]
    last_R = torch.where(weight_NR > 0, ranks_N1, 0).max(dim=0).values
    holder_R = torch.minimum((cumulated_NR <= target_R).sum(dim=0), last_R)
    left_R = target_R - (cumulated_NR - weight_NR)[mesh.rank]
    share_R = torch.nan_to_num(left_R / weight_NR[mesh.rank]).clamp(0.0, 1.0)
    token_R, _ = sample(logits_RS, temperature_R, share_R)
    drawn_R = all_reduce(torch.where(holder_R == mesh.rank, first + token_R, 0), mesh)
    token_R = torch.where(temperature_R >= GREEDY_BELOW, drawn_R, greedy_R)
    into[0].index_copy_(0, into[1], token_R)
    return token_R, top_R.float()
