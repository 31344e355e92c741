"""The next token of rows whose logits lie divided among the ranks, which are not gathered.

A rank's share of the vocabulary is one interval of the cumulated probabilities. The ranks tell each
other the best logit of each row, where it is, and the weight of their share; from these all know
whose share holds the row's number, and that rank finds the token within it. Where cut-offs end is
found by counting in ever smaller bins (`ops/levels.py`).

Of exchanges there are two for a token, and seven more where rows may have cut-offs; on a CPU, where
one may look how far the search is, fewer. None depends on the vocabulary in size: a row has 24
bytes in the first, 2,048 in each of the seven, and 8 in the last.
"""

from dataclasses import dataclass, replace

import torch

from limelight.ops import cdiv
from limelight.ops.levels import (
    MOST_TOKENS,
    SHIFTS,
    Levels,
    Window,
    is_cut,
    is_settled,
    narrow,
    tally,
)
from limelight.ops.pieces import Cuts
from limelight.ops.sample import GREEDY_BELOW, sample
from limelight.ops.shares import Known, holding, mass, meet
from limelight.ops.standing import standing
from limelight.ops.topk import top_tokens
from limelight.parallel.collectives import all_reduce, stacked
from limelight.parallel.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a vocabulary that a rank has, from token `first` on."""

    mesh: Mesh
    first: int
    vocabulary: int

    def __post_init__(self):
        if self.vocabulary >= MOST_TOKENS:
            raise ValueError(
                f"a vocabulary of {self.vocabulary} tokens cannot be divided among ranks (-tp): "
                f"it must have fewer than {MOST_TOKENS}"
            )

    @property
    def size(self) -> int:
        """How many logits each rank has; those behind the vocabulary are ruled out."""
        return cdiv(self.vocabulary, self.mesh.size)


def look(
    logits_RS: torch.Tensor, temperature_R: torch.Tensor, share: Share, *, cuts: Cuts | None = None
) -> Known:
    """Of this rank's FP32 logits, on every rank the same but for what is its own."""
    told_3R = mass(logits_RS, temperature_R, first=share.first)
    known = meet(stacked(told_3R, share.mesh), temperature_R)
    return known if cuts is None else _cut(logits_RS, known, cuts, share)


def _cut(logits_RS: torch.Tensor, known: Known, cuts: Cuts, share: Share) -> Known:
    """What cut-offs leave: top-k and min-p first, and then top-p of what these leave."""
    (ranks, rows), device = known.weight_NR.shape, logits_RS.device
    warmth_R = torch.where(known.temperature_R >= GREEDY_BELOW, known.temperature_R, 1.0).float()
    top_k_R, top_p_R, min_p_R = cuts.arguments
    some_R = is_cut(cuts, share.vocabulary)
    # Below no number there are no levels: nothing is counted of a row without cut-offs.
    levels = Levels(torch.where(some_R, known.best_R, float("nan")), warmth_R)
    whole = Window.whole(ranks, rows, device)
    looks = may_look(logits_RS)
    tally_RB, kept_R = tally(logits_RS, levels, min_p_R, whole.level_R, shift=SHIFTS[0])
    assert kept_R is not None
    first_NRB = stacked(tally_RB, share.mesh)

    def end(most_weight_R: torch.Tensor) -> Window:
        window, tally_NRB, limits = whole, first_NRB, (levels, top_k_R, most_weight_R)
        for shift in SHIFTS:
            if shift != SHIFTS[0]:
                tally_RB, _ = tally(logits_RS, levels, min_p_R, window.level_R, shift=shift)
                tally_NRB = stacked(tally_RB, share.mesh)
            found = narrow(tally_NRB, window, *limits, shift=shift, last=shift == 0)
            if shift and looks and is_settled(tally_NRB, found, shift=shift):
                return narrow(tally_NRB, window, *limits, shift=shift, last=True)
            window = found
        return window

    unbounded_R = torch.full((rows,), float("inf"), dtype=torch.float64, device=device)
    all_R = (top_k_R >= share.vocabulary) & (min_p_R <= 0)
    inside_R, window = known.total_R, whole
    if not (looks and all_R.all()):
        window = end(unbounded_R)
        inside_R = torch.where(all_R, inside_R, window.weight_NR.sum(dim=0))
    if not (looks and (top_p_R >= 1).all()):
        # The best one stays, whatever its share.
        most_R = (top_p_R.double() * inside_R).clamp(min=1e-30)
        window = end(torch.where(top_p_R < 1, most_R, float("inf")))
    # Without cut-offs a row has the sums that it has beside others without.
    weight_NR = torch.where(some_R, window.weight_NR, known.weight_NR)
    count_R = torch.minimum(window.above_NR[share.mesh.rank], kept_R)
    count_R = torch.where(some_R, count_R, logits_RS.shape[1]).to(torch.int32)
    own = Cuts(count_R, torch.ones_like(warmth_R), torch.zeros_like(warmth_R))
    return replace(known, weight_NR=weight_NR, own=own)


def may_look(logits_RS: torch.Tensor) -> bool:
    """Whether the host may ask for numbers, which saves exchanges; a device is not waited for."""
    return not logits_RS.is_cuda


def best_of_shares(logits_RS: torch.Tensor, share: Share) -> tuple[torch.Tensor, torch.Tensor]:
    """The best logit of each row, FP32 [R], NaN if one is NaN, and the first token that has it."""
    known = look(logits_RS, torch.zeros(len(logits_RS), device=logits_RS.device), share)
    return known.best_R, known.greedy_R


def drawn(
    logits_RS: torch.Tensor,
    known: Known,
    temperature_R: torch.Tensor,
    uniform_R: torch.Tensor,
    share: Share,
) -> torch.Tensor:
    """The token of each row, int64, of what is left of it."""
    holder_R, number_R = holding(known.weight_NR, uniform_R, rank=share.mesh.rank)
    token_R, _ = sample(logits_RS, temperature_R, number_R, cuts=known.own)
    own_R = torch.where(holder_R == share.mesh.rank, share.first + token_R, 0)
    token_R = all_reduce(own_R, share.mesh)
    return torch.where(temperature_R >= GREEDY_BELOW, token_R, known.greedy_R)


def sample_share(
    logits_RS: torch.Tensor,
    temperature_R: torch.Tensor,
    uniform_R: torch.Tensor,
    share: Share | None,
    *,
    cuts: Cuts | None = None,
    into: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `ops.sample.sample`, of this rank's share of the logits, or of all (None).

    Where a number falls within 1e-7 of the border of two tokens, either may be drawn.
    """
    if share is None:
        return sample(logits_RS, temperature_R, uniform_R, cuts=cuts, into=into)
    known = look(logits_RS, temperature_R, share, cuts=cuts)
    token_R = drawn(logits_RS, known, temperature_R, uniform_R, share)
    if into is not None:
        into[0].index_copy_(0, into[1], token_R)
    return token_R, known.best_R


def standing_in_shares(
    logits_RS: torch.Tensor,
    rows_X: torch.Tensor,
    tokens_X: torch.Tensor,
    temperature_X: torch.Tensor,
    share: Share,
    *,
    cuts: Cuts | None = None,
) -> torch.Tensor:
    """As `ops.standing.standing`, of tokens in these rows, on every rank."""
    own_X = tokens_X - share.first
    held_X = (own_X >= 0) & (own_X < logits_RS.shape[1])
    logit_X = logits_RS[rows_X, own_X.clamp(0, logits_RS.shape[1] - 1)]
    logit_NX = stacked(torch.where(held_X, logit_X, float("-inf")), share.mesh)
    own = None
    if cuts is not None:
        own = look(logits_RS[rows_X], temperature_X, share, cuts=cuts).own
    z_X = logit_NX.amax(dim=0)
    figures_5X = standing(logits_RS, rows_X, z_X, temperature_X, cuts=own)
    if own is not None:
        # The operation always leaves one.
        figures_5X[2::2].masked_fill_(own.top_k_B == 0, 0.0)
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
