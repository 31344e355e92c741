"""How likely drafts are to be accepted, by the drafter's own scores, and which are worth a look.

    f = log(q_max / (1 - q_max))            of a draft's candidates at the request's temperature
    p = sigmoid(slope * f + intercept_n)    S_n = p_0 * ... * p_n

f tells of the distribution that a draft was drawn from, never of the token that was drawn, and S
falls with n. So whether a draft is kept depends on the drafts before it and on other requests, not
on itself or on what follows, and the text keeps its distribution. The budget must come from earlier
passes: one from this pass would let a draft, by the scores that follow it, decide about itself.

N is the drafts of a sequence, K the candidates of a draft.
"""

import torch
import triton
import triton.language as tl

from limelight.ops import cdiv, next_power_of_2, op, pdl
from limelight.ops.sample import GREEDY_BELOW

MOST_ODDS = 40.0


def log_odds_reference(scores_BNK: torch.Tensor, temperature_B: torch.Tensor) -> torch.Tensor:
    """f, FP32 [B, N], from -40 to 40; -40 where no score is finite. Greedy counts as 1."""
    scores_BNK = scores_BNK.masked_fill(~scores_BNK.isfinite(), float("-inf"))
    warmth_B = torch.where(temperature_B >= GREEDY_BELOW, temperature_B, 1.0)
    best_BN1, at_BN1 = scores_BNK.max(dim=-1, keepdim=True)
    # The best one itself is left out by its place, for another may have the same score.
    others_BNK = ((scores_BNK - best_BN1) / warmth_B[:, None, None]).scatter(
        2, at_BN1, float("-inf")
    )
    odds_BN = -others_BNK.logsumexp(dim=-1)
    return torch.nan_to_num(odds_BN, nan=-MOST_ODDS).clamp(-MOST_ODDS, MOST_ODDS)


@triton.jit
def _log_odds_kernel(
    scores, temperature, odds, size, greedy_below, most, N: tl.constexpr, K: tl.constexpr,
    KB: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    i, k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, KB)
    held_IK = (i < size)[:, None] & (k < K)[None, :]
    z_IK = tl.load(scores + i[:, None] * K + k[None, :], mask=held_IK, other=float("-inf"))
    z_IK = tl.where((z_IK == z_IK) & (z_IK < float("inf")), z_IK, float("-inf"))
    warmth_I = tl.load(temperature + i // N, mask=i < size, other=1.0).to(tl.float32)
    warmth_I = tl.where(warmth_I >= greedy_below, warmth_I, 1.0)
    best_I, at_I = tl.max(z_IK, axis=1, return_indices=True)
    others_IK = (z_IK > float("-inf")) & (k[None, :] != at_I[:, None])
    w_IK = tl.exp((z_IK - best_I[:, None]) / warmth_I[:, None])
    odds_I = -tl.log(tl.sum(tl.where(others_IK, w_IK, 0.0), axis=1))
    odds_I = tl.where(best_I > float("-inf"), odds_I, -most)
    tl.store(odds + i, tl.minimum(tl.maximum(odds_I, -most), most), mask=i < size)


def _launch_log_odds(scores_BNK: torch.Tensor, temperature_B: torch.Tensor) -> torch.Tensor:
    batch, drafts, count = scores_BNK.shape
    assert scores_BNK.dtype == torch.float32 and scores_BNK.is_contiguous()
    assert temperature_B.shape == (batch,) and temperature_B.is_contiguous()
    odds_BN = torch.empty(batch, drafts, dtype=torch.float32, device=scores_BNK.device)
    if size := odds_BN.numel():
        _log_odds_kernel[(cdiv(size, 32),)](
            scores_BNK, temperature_B, odds_BN, size, GREEDY_BELOW, MOST_ODDS,
            N=drafts, K=count, KB=next_power_of_2(count), BLOCK=32, **pdl(scores_BNK),
        )  # fmt: skip
    return odds_BN


log_odds = op(reference=log_odds_reference, kernel=_launch_log_odds)


def survival(
    odds_BN: torch.Tensor, slope: torch.Tensor, intercepts_N: torch.Tensor
) -> torch.Tensor:
    """S, FP32 [B, N]: the chance that a draft and all before it are accepted."""
    return torch.sigmoid(slope * odds_BN + intercepts_N).nan_to_num(nan=0.0).cumprod(dim=-1)


def split(
    survival_BN: torch.Tensor, drafts_B: torch.Tensor, budget: torch.Tensor | int
) -> torch.Tensor:
    """How many of its first drafts each sequence keeps, int64 [B]: the `budget` likeliest of all.

    Sequence b has `drafts_B[b]`. Of equals the earlier in their sequence goes first, so what is
    kept is a prefix, and never more than the budget.
    """
    num_drafts = survival_BN.shape[1]
    at_N = torch.arange(num_drafts, device=survival_BN.device)
    offered_NB = at_N[:, None] < drafts_B
    likely_NB = torch.where(offered_NB, survival_BN.T, -1.0)
    order_X = likely_NB.reshape(-1).sort(descending=True, stable=True).indices
    rank_X = torch.empty_like(order_X)
    rank_X[order_X] = torch.arange(len(order_X), device=order_X.device)
    return (offered_NB & (rank_X.view_as(likely_NB) < budget)).sum(dim=0)


def packed_starts(rows_B: torch.Tensor) -> torch.Tensor:
    """Where each sequence's rows begin, and the end of the last, int32 [B + 1]."""
    return torch.nn.functional.pad(rows_B.cumsum(dim=0), (1, 0)).to(torch.int32)


def keep_reference(
    odds_SN: torch.Tensor,
    rows_B: torch.Tensor,
    offered_B: torch.Tensor,
    trim_M: torch.Tensor,
    budget_1: torch.Tensor,
) -> torch.Tensor:
    """`split` of the drafts that wait in the slots `rows_B`, by their odds and this budget.

    `trim_M` holds the slope and the N intercepts of S.
    """
    survival_BN = survival(odds_SN[rows_B.long()], trim_M[0], trim_M[1:])
    return split(survival_BN, offered_B.long(), budget_1)


@triton.jit
def _stands(odds, trim, row, n, mask):
    """p of draft n of these slots; 0 where it is no number."""
    odds_X = tl.load(odds + row + n, mask=mask, other=0.0)
    z_X = tl.load(trim) * odds_X + tl.load(trim + 1 + n)
    p_X = tl.div_rn(1.0, 1.0 + tl.exp(-z_X))
    return tl.where(p_X == p_X, p_X, 0.0)


@triton.jit(do_not_specialize=["sequences"])
def _keep_kernel(
    odds, rows_of, offered, trim, budget, kept, sequences,
    N: tl.constexpr, NB: tl.constexpr, BLOCK_B: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One sequence: how many of all drafts are ahead of each of its own."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b, i = tl.program_id(0), tl.arange(0, NB)
    row, own = tl.load(rows_of + b).to(tl.int64) * N, tl.load(offered + b)
    # Products go from the first draft on, as all do, so that S falls to the last bit.
    alive, mine_N = 1.0, tl.zeros((NB,), tl.float32)
    for n in tl.static_range(N):
        alive = alive * _stands(odds, trim, row, n, own > n)
        mine_N = tl.where(i == n, alive, mine_N)
    rank_N = tl.zeros((NB,), tl.int32)
    for first in range(0, sequences, BLOCK_B):
        other = first + tl.arange(0, BLOCK_B)
        row_B = tl.load(rows_of + other, mask=other < sequences, other=0).to(tl.int64) * N
        offered_B = tl.load(offered + other, mask=other < sequences, other=0)
        alive_B = tl.full((BLOCK_B,), 1.0, tl.float32)
        for n in tl.static_range(N):
            alive_B = alive_B * _stands(odds, trim, row_B, n, offered_B > n)
            earlier_NB = (n < i)[:, None] | ((i == n)[:, None] & (other < b)[None, :])
            ahead_NB = alive_B[None, :] > mine_N[:, None]
            ahead_NB |= (alive_B[None, :] == mine_N[:, None]) & earlier_NB
            ahead_NB &= (offered_B > n)[None, :]
            rank_N += tl.sum(ahead_NB.to(tl.int32), axis=1)
    kept_N = (i < own) & (rank_N < tl.load(budget))
    tl.store(kept + b, tl.sum(kept_N.to(tl.int64), axis=0))


def _launch_keep(
    odds_SN: torch.Tensor,
    rows_B: torch.Tensor,
    offered_B: torch.Tensor,
    trim_M: torch.Tensor,
    budget_1: torch.Tensor,
) -> torch.Tensor:
    sequences, num_drafts = len(rows_B), odds_SN.shape[1]
    assert odds_SN.dtype == trim_M.dtype == torch.float32 and trim_M.shape == (1 + num_drafts,)
    assert rows_B.dtype == offered_B.dtype == budget_1.dtype == torch.int32
    assert rows_B.shape == offered_B.shape and budget_1.shape == (1,)
    parts = (odds_SN, rows_B, offered_B, trim_M)
    assert all(x.is_contiguous() for x in parts)
    kept_B = torch.empty(sequences, dtype=torch.int64, device=odds_SN.device)
    if sequences:
        # The product and sum of z are rounded apart, as in the reference.
        _keep_kernel[(sequences,)](
            odds_SN, rows_B, offered_B, trim_M, budget_1, kept_B, sequences,
            N=num_drafts, NB=next_power_of_2(num_drafts), BLOCK_B=128, num_warps=4,
            enable_fp_fusion=False, **pdl(odds_SN),
        )  # fmt: skip
    return kept_B


keep = op(reference=keep_reference, kernel=_launch_keep)
