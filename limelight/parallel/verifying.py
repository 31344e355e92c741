"""Which drafts stand where logits lie divided among the ranks, which are not gathered.

As `ops/verify.py` rules, on every rank alike. Beside what sampling exchanges (`sampling.py`), two
numbers of each draft where drafts were drawn; greedy drafts need the first exchange alone.
"""

import torch

from limelight.ops.judge_shares import Offers, chances, conclude
from limelight.ops.pieces import Cuts
from limelight.ops.verify import (
    Proposals,
    Verified,
    each_row,
    verify_by,
    verify_by_odds,
    verify_greedy,
    verify_tokens,
    verify_tokens_by_odds,
)
from limelight.parallel.collectives import all_reduce, stacked
from limelight.parallel.sampling import Share, best_of_shares, drawn, look


def judge_greedy(
    logits_RS: torch.Tensor,
    starts_B: torch.Tensor,
    drafts_BN: torch.Tensor,
    share: Share | None,
    *,
    slots_B: torch.Tensor | None = None,
) -> Verified:
    """As `verify_greedy`, of this rank's share of the logits, or of all (None)."""
    if share is None:
        return verify_greedy(logits_RS, starts_B, drafts_BN, slots_B=slots_B)
    best_R, token_R = best_of_shares(logits_RS, share)
    return verify_tokens(
        token_R, best_R, starts_B, drafts_BN, vocabulary=share.vocabulary, slots_B=slots_B
    )


def judge_by_odds(
    logits_RS: torch.Tensor,
    starts_B: torch.Tensor,
    drafts_BN: torch.Tensor,
    odds_BN: torch.Tensor,
    seed_B: torch.Tensor,
    position_B: torch.Tensor,
    share: Share | None,
    *,
    slots_B: torch.Tensor | None = None,
) -> Verified:
    """As `verify_by_odds`, of this rank's share of the logits, or of all (None)."""
    if share is None:
        return verify_by_odds(
            logits_RS, starts_B, drafts_BN, odds_BN, seed_B, position_B, slots_B=slots_B
        )
    best_R, token_R = best_of_shares(logits_RS, share)
    return verify_tokens_by_odds(
        token_R, best_R, starts_B, drafts_BN, odds_BN, seed_B, position_B,
        vocabulary=share.vocabulary, slots_B=slots_B,
    )  # fmt: skip


def judge_by(
    proposals: Proposals | None,
    logits_RS: torch.Tensor,
    starts_B: torch.Tensor,
    drafts_BN: torch.Tensor,
    temperature_B: torch.Tensor,
    seed_B: torch.Tensor,
    position_B: torch.Tensor,
    share: Share | None,
    *,
    cuts: Cuts | None,
    slots_B: torch.Tensor | None = None,
) -> Verified:
    """As `verify_by`, of this rank's share of the logits, or of all (None)."""
    if share is None:
        return verify_by(
            proposals, logits_RS, starts_B, drafts_BN, temperature_B, seed_B, position_B,
            cuts=cuts, slots_B=slots_B,
        )  # fmt: skip
    temperature_R, uniform_R, cuts_R = each_row(
        starts_B, temperature_B, seed_B, position_B, cuts=cuts, rows=len(logits_RS)
    )
    known = look(logits_RS, temperature_R, share, cuts=cuts_R)
    if proposals is None:
        token_R = drawn(logits_RS, known, temperature_R, uniform_R, share)
        return verify_tokens(
            token_R, known.best_R, starts_B, drafts_BN,
            vocabulary=share.vocabulary, slots_B=slots_B,
        )  # fmt: skip
    offers = Offers(starts_B, drafts_BN, temperature_B, seed_B, position_B, proposals, slots_B)
    places = {"first": share.first, "vocabulary": share.vocabulary}
    chances_2BN, made = chances(logits_RS, offers, known, **places)
    chances_M2BN = stacked(chances_2BN, share.mesh)
    verified, own_B = conclude(
        logits_RS, offers, known, chances_M2BN, made, rank=share.mesh.rank, **places
    )
    last_B1 = all_reduce(own_B, share.mesh)[:, None]
    verified.tokens_BQ.scatter_(1, verified.accepted_B[:, None], last_B1)
    return verified
