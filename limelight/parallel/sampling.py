"""The next token of rows whose logits lie divided among the ranks, which are not gathered.

A rank's share of the vocabulary is one interval of the cumulated probabilities. The ranks tell each
other the best logit of each row, where it is, and the weight of their share; from these all know
whose share holds the row's number, and that rank finds the token within it.
"""

from dataclasses import dataclass

import torch

from limelight.ops.sample import GREEDY_BELOW, mass, sample
from limelight.ops.standing import standing
from limelight.ops.topk import top_tokens
from limelight.parallel.collectives import all_reduce, stacked
from limelight.parallel.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Share:
    """The part of the vocabulary that a rank has, from token `first` on."""

    mesh: Mesh
    first: int


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


def standing_in_shares(
    logits_RS: torch.Tensor,
    rows_X: torch.Tensor,
    tokens_X: torch.Tensor,
    temperature_X: torch.Tensor,
    share: Share,
) -> torch.Tensor:
    """As `ops.standing.standing` without cut-offs, of tokens in these rows, on every rank."""
    own_X = tokens_X - share.first
    held_X = (own_X >= 0) & (own_X < logits_RS.shape[1])
    logit_X = logits_RS[rows_X, own_X.clamp(0, logits_RS.shape[1] - 1)]
    logit_NX = stacked(torch.where(held_X, logit_X, float("-inf")), share.mesh)
    figures_5X = standing(logits_RS, rows_X, logit_NX.amax(dim=0), temperature_X)
    logit_NX, best_NX, weight_NX, larger_NX, left_NX = stacked(figures_5X, share.mesh).unbind(1)
    best_X = best_NX.amax(dim=0)
    scale_NX = torch.exp((best_NX - best_X) / temperature_X.double())
    # A share without a finite logit has no weight.
    weight_NX = torch.where(best_NX == float("-inf"), 0.0, weight_NX * scale_NX)
    sums = (x_NX.sum(dim=0) for x_NX in (weight_NX, larger_NX, left_NX))
    return torch.stack((logit_NX[0], best_X, *sums))


def top_tokens_of_shares(
    logits_RS: torch.Tensor, rows_X: torch.Tensor, share: Share, *, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `ops.topk.top_tokens` of these rows, on every rank."""
    best_XK, ids_XK = top_tokens(logits_RS, count=min(count, logits_RS.shape[1]), rows_T=rows_X)
    best_NXK, ids_NXK = (stacked(x, share.mesh) for x in (best_XK, ids_XK + share.first))
    # Ranks hold the vocabulary in its order, so the first of equal logits stays first.
    best_XM, ids_XM = (x.transpose(0, 1).flatten(1) for x in (best_NXK, ids_NXK))
    found = best_XM.sort(dim=1, descending=True, stable=True)
    at_XK = found.indices[:, :count]
    return found.values[:, :count].contiguous(), ids_XM.gather(1, at_XK)
