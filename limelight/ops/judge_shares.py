"""Drafts that were drawn, judged by the rule of `verify` where logits lie divided among ranks.

Each rank tells of every draft what its share has of two numbers:

    p(d)                      0 where d is in another share
    sum of max(p - q, 0)      what a token is drawn by if d is refused

From these all know which drafts stand, and whose share holds the token behind them; that rank finds
it. S is the tokens of a share, from token `first` on; its logits are FP32.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from limelight.ops import next_power_of_2, op, pdl, pieces
from limelight.ops.judge import left_of_pieces, number_behind, proposed, shares_of, token_of
from limelight.ops.noise import ACCEPT, PLAIN, RESIDUAL, number_of, uniform
from limelight.ops.pieces import PIECE, Pieces
from limelight.ops.sample import GREEDY_BELOW, invert, probabilities
from limelight.ops.shares import Known, holding, within
from limelight.ops.verify import (
    NOTHING,
    Drafts,
    Proposals,
    Verified,
    at_each,
    candidates_of,
    matches,
    of_slots,
    prefix,
    read_drafts,
    verified,
)

_ACCEPT = tl.constexpr(ACCEPT)


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


def chances_reference(
    logits_RS: torch.Tensor, offers: Offers, known: Known, *, first: int, vocabulary: int
) -> tuple[torch.Tensor, Pieces | None]:
    """This share's part of both numbers of each draft, FP64 [2, B, N]; and what kernels have made
    of the rows, for `conclude`."""
    drafts = offers.read(len(logits_RS), vocabulary)
    ids_BNK, q_BNK = offers.candidates(vocabulary)
    probs_RS = _probs(logits_RS, known)
    at_BN = drafts.ids_BN - first
    held_BN = drafts.real_BN & (at_BN >= 0) & (at_BN < logits_RS.shape[1])
    p_BN = probs_RS[drafts.rows_BQ[:, :-1], at_BN.clamp(0, logits_RS.shape[1] - 1)]
    chances_2BN = torch.stack((torch.where(held_BN, p_BN, 0.0), torch.zeros_like(p_BN)))
    for n in range(at_BN.shape[1]):
        left_BS = _less(probs_RS[drafts.rows_BQ[:, n]], ids_BNK[:, n] - first, q_BNK[:, n])
        chances_2BN[1, :, n] = left_BS.sum(dim=-1)
    return chances_2BN, None


def conclude_reference(
    logits_RS: torch.Tensor,
    offers: Offers,
    known: Known,
    chances_M2BN: torch.Tensor,
    made: Pieces | None,
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
    weight_RB = known.weight_NR[:, last_B]
    weights_BS = _probs(logits_RS, known)[last_B]
    if num_drafts:
        at_B1 = accepted_B.clamp(max=num_drafts - 1)[:, None]
        left_MB = chances_M2BN[:, 1].gather(2, at_B1.expand(len(weight_RB), -1, -1))[:, :, 0]
        # Rounding can leave nothing where p and q are the same.
        less_B = refused_B & (left_MB.sum(dim=0) > 0)
        weight_RB = torch.where(less_B, left_MB, weight_RB)
        at_B1K = at_B1[..., None].expand(-1, -1, ids_BNK.shape[2])
        ids_BK, q_BK = (x_BNK.gather(1, at_B1K)[:, 0] for x_BNK in (ids_BNK, q_BNK))
        residual_BS = _less(weights_BS, ids_BK - first, q_BK)
        weights_BS = torch.where(less_B[:, None], residual_BS, weights_BS)
    holder_B, share_B = holding(weight_RB, number_B, rank=rank)
    token_B = torch.where(greedy_B, known.greedy_R[last_B], first + invert(weights_BS, share_B))
    own_B = torch.where(torch.where(greedy_B, 0, holder_B) == rank, token_B, 0)
    absent_B = starts_B.diff() <= 0
    own_B = torch.where(absent_B, NOTHING if rank == 0 else 0, own_B)
    return verified(drafts, starts_B, accepted_B, own_B, known.best_R[last_B]), own_B


def _probs(logits_RS: torch.Tensor, known: Known) -> torch.Tensor:
    """p of this share's tokens, FP64 [R, S]."""
    temperature_R = known.temperature_R
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


# Ranks must not compile kernels of their own.
@triton.jit(do_not_specialize=["first", "num_rows"])
def _chances_kernel(
    logits, starts, drafts, slots, temperature, ids, scores, best_R, weight_NR, top_k_R,
    piece_best, piece_at, piece_sum, cut_R, last_R, chances,
    stride, S, first, V, pieces, num_rows, greedy_below, RANKS: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, KB: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One draft."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b, i = tl.program_id(0), tl.program_id(1)
    start = tl.load(starts + b).to(tl.int32)
    row, slot = start + i, b
    if slots is not None:
        slot = tl.load(slots + b)
    warmth = tl.load(temperature + b).to(tl.float32)
    chance, left = warmth.to(tl.float64) * 0.0, warmth.to(tl.float64) * 0.0
    judged = (i < tl.load(starts + b + 1).to(tl.int32) - start - 1) & (warmth >= greedy_below)
    if top_k_R is not None:
        judged = judged & (tl.load(top_k_R + row, mask=judged, other=0) > 0)
    if judged:
        draft = tl.load(drafts + slot * N + i)
        best, total = tl.load(best_R + row), _total(weight_NR, row, num_rows, RANKS)
        id_1K, q_1K = proposed(ids, scores, slot * N + i, V, warmth, greedy_below, 1, K, 1, KB)
        id_K, q_K = tl.sum(id_1K, axis=0), tl.sum(q_1K, axis=0)
        own_K = tl.where((id_K >= first) & (id_K < tl.minimum(first + S, V)), id_K - first, -1)
        q_K = tl.where(own_K >= 0, q_K, 0.0)
        p = tl.arange(0, PIECES)
        held = p < pieces
        best_P = tl.load(piece_best + row * pieces + p, mask=held, other=float("-inf"))
        sum_P = tl.load(piece_sum + row * pieces + p, mask=held, other=0.0)
        # A piece without a finite logit has the sum 0.
        scale_P = tl.exp((best_P - best) / warmth).to(tl.float64) / total
        scale_P = tl.where(sum_P > 0, scale_P, 0.0)
        w_K, p_K = shares_of(
            logits, piece_best, cut_R, last_R, row + tl.zeros(own_K.shape, tl.int32), own_K,
            own_K >= 0, best, total, warmth, 0.0, stride, S, pieces, PIECE,
        )  # fmt: skip
        left_P = left_of_pieces(own_K, q_K, w_K, p_K, sum_P, scale_P, KB, PIECE)
        left = tl.sum(left_P, axis=0)
        # What is no candidate is not asked for.
        chance = tl.max(tl.where((own_K >= 0) & (id_K == draft), p_K, 0.0), axis=0)
    to = b * N + i
    tl.store(chances + to, chance)
    tl.store(chances + tl.num_programs(0) * N + to, left)


@triton.jit
def _total(weight_NR, row_X, num_rows, RANKS: tl.constexpr):
    """The weight that is left of rows in all shares."""
    total_X = tl.load(weight_NR + row_X)
    for rank in range(1, RANKS):
        total_X += tl.load(weight_NR + rank * num_rows + row_X)
    return total_X


def _launch_chances(
    logits_RS: torch.Tensor, offers: Offers, known: Known, *, first: int, vocabulary: int
) -> tuple[torch.Tensor, Pieces | None]:
    made = pieces.launch(logits_RS, known.temperature_R, greedy_below=GREEDY_BELOW, cuts=known.own)
    (rows, size), sequences = logits_RS.shape, len(offers.starts_B) - 1
    drafts, candidates = offers.proposals.ids_BNK.shape[1:]
    chances_2BN = torch.empty(2, sequences, drafts, dtype=torch.float64, device=logits_RS.device)
    if sequences and drafts:
        count = pieces.count_of(size)
        _chances_kernel[(sequences, drafts)](
            logits_RS, *_drafts_of(offers), offers.temperature_B, *_proposals_of(offers),
            known.best_R, known.weight_NR, None if known.own is None else known.own.top_k_B,
            *made.arguments, chances_2BN,
            logits_RS.stride(0), size, first, vocabulary, count, rows, GREEDY_BELOW,
            RANKS=len(known.weight_NR), N=drafts, K=candidates, KB=next_power_of_2(candidates),
            PIECES=next_power_of_2(count), PIECE=PIECE, num_warps=4, **pdl(logits_RS),
        )  # fmt: skip
    return chances_2BN, made


def _drafts_of(
    offers: Offers,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    starts_B, drafts_BN, slots_B = offers.starts_B, offers.drafts_BN, offers.slots_B
    assert drafts_BN.dtype == torch.int64 and drafts_BN.is_contiguous()
    assert starts_B.is_contiguous() and (slots_B is None or slots_B.is_contiguous())
    assert all(x.is_contiguous() for x in (offers.temperature_B, offers.seed_B, offers.position_B))
    return starts_B, drafts_BN, slots_B


def _proposals_of(offers: Offers) -> tuple[torch.Tensor, torch.Tensor]:
    ids_BNK, scores_BNK = offers.proposals.ids_BNK, offers.proposals.scores_BNK
    assert ids_BNK.dtype == torch.int64 and scores_BNK.dtype == torch.float32
    return ids_BNK.contiguous(), scores_BNK.contiguous()


@triton.jit(do_not_specialize=["first", "num_rows", "rank"])
def _conclude_kernel(
    logits, starts, drafts, slots, temperature, seeds, positions, ids, scores, best_R, greedy_R,
    weight_NR, chances, piece_best, piece_at, piece_sum, cut_R, last_R,
    accepted, tokens, best_B, own_B, stride, S, first, V, pieces, num_rows, greedy_below, rank,
    RANKS: tl.constexpr, N: tl.constexpr, K: tl.constexpr, QB: tl.constexpr, KB: tl.constexpr,
    PIECES: tl.constexpr, PIECE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One sequence."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b, i = tl.program_id(0), tl.arange(0, QB)
    batch = tl.num_programs(0)
    start = tl.load(starts + b).to(tl.int32)
    rows = tl.load(starts + b + 1).to(tl.int32) - start
    warmth = tl.load(temperature + b).to(tl.float32)
    slot = b
    if slots is not None:
        slot = tl.load(slots + b)
    d_Q = tl.load(drafts + slot * N + i, mask=i < tl.minimum(N, rows - 1), other=-1)
    real_Q = (d_Q >= 0) & (d_Q < V)
    # A sequence without rows reads those of another, and says nothing of them.
    row_Q = tl.where(rows > 0, start + tl.minimum(i, rows - 1), 0)
    best_Q, greedy_Q = tl.load(best_R + row_Q), tl.load(greedy_R + row_Q)
    seed, position = tl.load(seeds + b), tl.load(positions + b).to(tl.int64)
    id_QK, q_QK = proposed(ids, scores, slot * N, V, warmth, greedy_below, N, K, QB, KB)
    q_Q = tl.sum(tl.where(id_QK == d_Q[:, None], q_QK, 0.0), axis=1)
    p_Q = tl.zeros((QB,), tl.float64)
    for other in range(RANKS):
        p_Q += tl.load(chances + (2 * other * batch + b) * N + i, mask=i < N, other=0.0)
    u_Q = number_of(seed, position + i, i * 0 + _ACCEPT)
    possible_Q = real_Q & (q_Q > 0)
    matches_Q = real_Q & (best_Q > float("-inf")) & (greedy_Q == d_Q)
    stands_Q = tl.where(warmth >= greedy_below, possible_Q & (u_Q * q_Q < p_Q), matches_Q)
    count = tl.min(tl.where(stands_Q, QB, i), axis=0)
    here_Q = i == count
    best = tl.sum(tl.where(here_Q, best_Q, 0.0), axis=0)
    final = tl.where(rank == 0, tl.sum(tl.where(here_Q, greedy_Q, 0), axis=0), 0)
    if (rows > 0) & (warmth >= greedy_below):
        row = start + count
        refused = tl.max(tl.where(here_Q, possible_Q.to(tl.int32), 0), axis=0) > 0
        all_left = warmth.to(tl.float64) * 0.0
        for other in range(RANKS):
            at = chances + ((2 * other + 1) * batch + b) * N + count
            all_left += tl.load(at, mask=refused, other=0.0)
        # Rounding can leave nothing where p and q are the same.
        less = refused & (all_left > 0)
        total = _total(weight_NR, row, num_rows, RANKS)
        number = number_behind(seed, position + count, refused)
        target = number * tl.where(less, all_left, total)
        # Whose weights hold the target: the first that ends beyond it, or the last with any.
        passed, last = count * 0, count * 0
        before, own, sum_ = total * 0.0, total * 0.0, total * 0.0
        for other in range(RANKS):
            at = chances + ((2 * other + 1) * batch + b) * N + count
            weight = tl.load(weight_NR + other * num_rows + row)
            weight = tl.where(less, tl.load(at, mask=less, other=0.0), weight)
            before = tl.where(rank == other, sum_, before)
            own = tl.where(rank == other, weight, own)
            sum_ += weight
            passed += (sum_ <= target).to(tl.int32)
            last = tl.where(weight > 0, other, last)
        final = final * 0
        if tl.minimum(passed, last) == rank:
            number = within(target, before, own)
            id_K = tl.sum(tl.where(here_Q[:, None], id_QK, 0), axis=0)
            q_K = tl.sum(tl.where(here_Q[:, None], q_QK, 0.0), axis=0)
            id_K = tl.where((id_K >= first) & (id_K < tl.minimum(first + S, V)), id_K - first, -1)
            q_K = tl.where(id_K >= 0, q_K, 0.0)
            token = token_of(
                logits, piece_best, piece_sum, cut_R, last_R, row, id_K, q_K, less, number, best,
                final, total, warmth, 0.0, stride, S, pieces, K, KB, PIECES, PIECE,
            )  # fmt: skip
            final = first + token.to(tl.int64)
    final = tl.where(rows > 0, final, tl.where(rank == 0, -1, 0))
    token_Q = tl.where(i < count, d_Q, -1)
    tl.store(tokens + b * (N + 1) + i, token_Q.to(tl.int64), mask=i <= N)
    tl.store(own_B + b, final.to(tl.int64))
    tl.store(accepted + b, count.to(tl.int64))
    tl.store(best_B + b, tl.where(rows > 0, best, 0.0))


def _launch_conclude(
    logits_RS: torch.Tensor,
    offers: Offers,
    known: Known,
    chances_M2BN: torch.Tensor,
    made: Pieces | None,
    *,
    rank: int,
    first: int,
    vocabulary: int,
) -> tuple[Verified, torch.Tensor]:
    assert made is not None and chances_M2BN.is_contiguous() and known.weight_NR.is_contiguous()
    (rows, size), device = logits_RS.shape, logits_RS.device
    ranks, _, sequences, drafts = chances_M2BN.shape
    candidates = offers.proposals.ids_BNK.shape[2]
    accepted_B, own_B = (torch.empty(sequences, dtype=torch.int64, device=device) for _ in range(2))
    tokens_BQ = torch.empty(sequences, drafts + 1, dtype=torch.int64, device=device)
    best_B = torch.empty(sequences, dtype=torch.float32, device=device)
    if sequences:
        count = pieces.count_of(size)
        _conclude_kernel[(sequences,)](
            logits_RS, *_drafts_of(offers), offers.temperature_B, offers.seed_B,
            offers.position_B, *_proposals_of(offers), known.best_R, known.greedy_R,
            known.weight_NR, chances_M2BN, *made.arguments, accepted_B, tokens_BQ, best_B, own_B,
            logits_RS.stride(0), size, first, vocabulary, count, rows, GREEDY_BELOW, rank,
            RANKS=ranks, N=drafts, K=candidates, QB=next_power_of_2(drafts + 1),
            KB=next_power_of_2(candidates), PIECES=next_power_of_2(count), PIECE=PIECE,
            num_warps=8, **pdl(logits_RS),
        )  # fmt: skip
    return Verified(accepted_B, tokens_BQ, best_B), own_B


chances = op(reference=chances_reference, kernel=_launch_chances)
conclude = op(reference=conclude_reference, kernel=_launch_conclude)
