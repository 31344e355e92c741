"""Drafts that were drawn, judged by the rule of `verify` where logits lie divided among ranks.

Each rank tells of every draft what its share has of two numbers:

    p(d)                      0 where d is in another share
    sum of max(p - q, 0)      what a token is drawn by if d is refused

From these all know which drafts stand, and whose share holds the token behind them; that rank finds
it. S is the tokens of a share, from token `first` on; its logits are FP32.
"""

from dataclasses import dataclass

import torch

from limelight.ops import op
from limelight.ops.noise import ACCEPT, PLAIN, RESIDUAL, uniform
from limelight.ops.pieces import Cuts
from limelight.ops.sample import GREEDY_BELOW, invert, probabilities
from limelight.ops.verify import (
    NOTHING,
    Drafts,
    Proposals,
    Verified,
    at_each,
    candidates_of,
    matches,
    of_slots,
    packed_rows,
    prefix,
    read_drafts,
    verified,
)


@dataclass(frozen=True, slots=True)
class Offers:
    """The drafts of B sequences and what they were drawn from, as `verify` takes them."""

    starts_B: torch.Tensor
    drafts_BN: torch.Tensor
    temperature_B: torch.Tensor
    seed_B: torch.Tensor
    position_B: torch.Tensor
    proposals: Proposals
    slots_B: torch.Tensor | None = None

    def read(self, rows: int, vocabulary: int) -> Drafts:
        drafts_BN = of_slots(self.drafts_BN, self.slots_B)
        return read_drafts(self.starts_B, drafts_BN, rows, vocabulary)

    def candidates(self, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and q of each draft's candidates, [B, N, K]."""
        scored = (self.proposals.ids_BNK, self.proposals.scores_BNK)
        own = Proposals(*(of_slots(x, self.slots_B) for x in scored))
        return candidates_of(own, self.temperature_B, vocabulary)


@dataclass(frozen=True, slots=True)
class Known:
    """What all ranks know of R rows: the best logit FP32, its token int64, and the weight of what
    is left of each of M shares, FP64 [M, R]; of its own one what cut-offs leave it (none: all)."""

    best_R: torch.Tensor
    greedy_R: torch.Tensor
    weight_MR: torch.Tensor
    own: Cuts | None = None

    @property
    def total_R(self) -> torch.Tensor:
        return self.weight_MR.sum(dim=0)


def holding(
    weight_MR: torch.Tensor, number_R: torch.Tensor, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whose weights hold numbers of [0, 1], as shares of all; and which number holds the token
    within this rank's."""
    cumulated_MR = weight_MR.cumsum(dim=0)
    target_R = number_R.double() * cumulated_MR[-1]
    # The first whose end is beyond the number, or else the last with a weight.
    ranks_M1 = torch.arange(len(weight_MR), device=weight_MR.device)[:, None]
    last_R = torch.where(weight_MR > 0, ranks_M1, 0).max(dim=0).values
    holder_R = torch.minimum((cumulated_MR <= target_R).sum(dim=0), last_R)
    before_MR = cumulated_MR.roll(1, dims=0)
    before_MR[0] = 0.0
    left_R = target_R - before_MR[rank]
    return holder_R, torch.nan_to_num(left_R / weight_MR[rank]).clamp(0.0, 1.0)


def chances_reference(
    logits_RS: torch.Tensor, offers: Offers, known: Known, *, first: int, vocabulary: int
) -> torch.Tensor:
    """This share's part of both numbers of each draft, FP64 [2, B, N]."""
    drafts = offers.read(len(logits_RS), vocabulary)
    ids_BNK, q_BNK = offers.candidates(vocabulary)
    probs_RS = _probs(logits_RS, offers, known)
    at_BN = drafts.ids_BN - first
    held_BN = (at_BN >= 0) & (at_BN < logits_RS.shape[1])
    p_BN = probs_RS[drafts.rows_BQ[:, :-1], at_BN.clamp(0, logits_RS.shape[1] - 1)]
    chances_2BN = torch.stack((torch.where(held_BN, p_BN, 0.0), torch.zeros_like(p_BN)))
    for n in range(at_BN.shape[1]):
        left_BS = _less(probs_RS[drafts.rows_BQ[:, n]], ids_BNK[:, n] - first, q_BNK[:, n])
        chances_2BN[1, :, n] = left_BS.sum(dim=-1)
    return chances_2BN


def conclude_reference(
    logits_RS: torch.Tensor,
    offers: Offers,
    known: Known,
    chances_M2BN: torch.Tensor,
    *,
    rank: int,
    first: int,
    vocabulary: int,
) -> tuple[Verified, torch.Tensor]:
    """Which drafts stand, but for the token behind them: the ranks' sum of int64 [B]."""
    drafts = offers.read(len(logits_RS), vocabulary)
    ids_BNK, q_BNK = offers.candidates(vocabulary)
    starts_B, seed_B, num_drafts = offers.starts_B, offers.seed_B, drafts.ids_BN.shape[1]
    at_BQ = offers.position_B.long()[:, None] + torch.arange(num_drafts + 1, device=seed_B.device)
    u_BN = uniform(seed_B[:, None], at_BQ[:, :-1], stream=ACCEPT)
    q_BN = torch.where(ids_BNK == drafts.ids_BN[..., None], q_BNK, 0.0).sum(dim=-1)
    possible_BN = drafts.real_BN & (q_BN > 0)
    greedy_B = offers.temperature_B < GREEDY_BELOW
    stands_BN = possible_BN & (u_BN * q_BN < chances_M2BN[:, 0].sum(dim=0))
    matches_BN = matches(drafts, known.best_R, known.greedy_R)
    accepted_B = prefix(torch.where(greedy_B[:, None], matches_BN, stands_BN))
    last_B = at_each(drafts.rows_BQ, accepted_B)
    refused_B = at_each(torch.nn.functional.pad(possible_BN, (0, 1)), accepted_B)
    residual_B, plain_B = (
        uniform(seed_B, at_each(at_BQ, accepted_B), stream=use) for use in (RESIDUAL, PLAIN)
    )
    number_B = torch.where(refused_B, residual_B, plain_B).float()
    weight_MB = known.weight_MR[:, last_B]
    weights_BS = _probs(logits_RS, offers, known)[last_B]
    if num_drafts:
        at_B1 = accepted_B.clamp(max=num_drafts - 1)[:, None]
        left_MB = chances_M2BN[:, 1].gather(2, at_B1.expand(len(weight_MB), -1, -1))[:, :, 0]
        # Rounding can leave nothing where p and q are the same.
        less_B = refused_B & (left_MB.sum(dim=0) > 0)
        weight_MB = torch.where(less_B, left_MB, weight_MB)
        at_B1K = at_B1[..., None].expand(-1, -1, ids_BNK.shape[2])
        ids_BK, q_BK = (x_BNK.gather(1, at_B1K)[:, 0] for x_BNK in (ids_BNK, q_BNK))
        residual_BS = _less(weights_BS, ids_BK - first, q_BK)
        weights_BS = torch.where(less_B[:, None], residual_BS, weights_BS)
    holder_B, share_B = holding(weight_MB, number_B, rank)
    token_B = torch.where(greedy_B, known.greedy_R[last_B], first + invert(weights_BS, share_B))
    own_B = torch.where(torch.where(greedy_B, 0, holder_B) == rank, token_B, 0)
    absent_B = starts_B.diff() <= 0
    own_B = torch.where(absent_B, NOTHING if rank == 0 else 0, own_B)
    return verified(drafts, starts_B, accepted_B, own_B, known.best_R[last_B]), own_B


def _probs(logits_RS: torch.Tensor, offers: Offers, known: Known) -> torch.Tensor:
    """p of this share's tokens, FP64 [R, S]."""
    sequence_R, _ = packed_rows(offers.starts_B, len(logits_RS))
    temperature_R = offers.temperature_B[sequence_R]
    warmth_R1 = torch.where(temperature_R >= GREEDY_BELOW, temperature_R, 1.0)[:, None]
    weight_RS = torch.exp((logits_RS - known.best_R[:, None]) / warmth_R1).double()
    if (own := known.own) is not None:
        left_RS = probabilities(logits_RS, temperature_R, own) > 0
        weight_RS = weight_RS * (left_RS & (own.top_k_B > 0)[:, None])
    return torch.nan_to_num(weight_RS / known.total_R[:, None])


def _less(probs_BS: torch.Tensor, at_BK: torch.Tensor, q_BK: torch.Tensor) -> torch.Tensor:
    """max(p - q, 0), of candidates at these places of the share or outside."""
    held_BK = (at_BK >= 0) & (at_BK < probs_BS.shape[1])
    q_BK = torch.where(held_BK, q_BK, 0.0)
    at_BK = at_BK.clamp(0, probs_BS.shape[1] - 1)
    return probs_BS.scatter_add(1, at_BK, -q_BK).clamp(min=0)


chances = op(reference=chances_reference, kernel=chances_reference)
conclude = op(reference=conclude_reference, kernel=conclude_reference)
