"""How a drafter chooses a run of tokens out of its candidates for each place.

    score_j[u, c] = unary_j[c] + < P[u] * g_j, S[c] >

u is a candidate for the place before (before the first place, the anchor), c one for place j, P and
S the codebooks of what precedes and what follows, g_j a projection of the hidden state. The walk
goes left to right: place j is drawn from

    q_j = softmax(score_j[chosen before, :] / temperature)

or is the best where the temperature counts as 0: `verify.draft_probs`, by which drafts are judged
too. Scores are FP32; a token outside the candidates has q = 0.
"""

import torch
import triton
import triton.language as tl

from limelight.ops import next_power_of_2, op, pdl
from limelight.ops.judge import candidate_probs
from limelight.ops.pieces import inverted
from limelight.ops.sample import GREEDY_BELOW, invert
from limelight.ops.verify import draft_probs


def score_table(
    unary_BNK: torch.Tensor,
    gate_BNR: torch.Tensor,
    before_BNKR: torch.Tensor,
    after_BNKR: torch.Tensor,
) -> torch.Tensor:
    """Scores [B, N, K before, K] of K candidates in N places, by their rows of the codebooks."""
    left_BNKR = before_BNKR.float() * gate_BNR.float()[:, :, None]
    pair_BNKK = left_BNKR @ after_BNKR.float().mT
    return pair_BNKK + unary_BNK[:, :, None]


def walk(
    scores_BNKK: torch.Tensor, temperature_B: torch.Tensor, uniform_BN: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The candidate chosen in each place, int64 [B, N], and the scores it was chosen by [B, N, K].

    `uniform_BN` holds numbers of [0, 1), which a temperature of 0 ignores.
    """
    batch, places, _, count = scores_BNKK.shape
    at_B = torch.zeros(batch, dtype=torch.int64, device=scores_BNKK.device)
    chosen, rows = [], []
    for j in range(places):
        at_B11 = at_B[:, None, None].expand(-1, 1, count)
        row_BK = scores_BNKK[:, j].gather(1, at_B11)[:, 0]
        at_B = invert(draft_probs(row_BK, temperature_B), uniform_BN[:, j])
        chosen.append(at_B)
        rows.append(row_BK)
    return torch.stack(chosen, dim=1), torch.stack(rows, dim=1)


def choose_reference(
    unary_BNK: torch.Tensor,
    ids_BNK: torch.Tensor,
    gate_BNR: torch.Tensor,
    anchors_B: torch.Tensor,
    before_VR: torch.Tensor,
    after_VR: torch.Tensor,
    temperature_B: torch.Tensor,
    uniform_BN: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The walk behind each anchor: tokens, int64 [B, N], and the scores they were chosen by.

    `unary_BNK` is FP32 and `ids_BNK` int64, of tokens; `before_VR` and `after_VR` are the
    codebooks. Sums of products are FP32.
    """
    anchors_B1K = anchors_B[:, None, None].expand(-1, 1, ids_BNK.shape[2])
    before_BNK = torch.cat([anchors_B1K, ids_BNK[:, :-1]], dim=1)
    scores_BNKK = score_table(unary_BNK, gate_BNR, before_VR[before_BNK], after_VR[ids_BNK])
    chosen_BN, scores_BNK = walk(scores_BNKK, temperature_B, uniform_BN)
    return ids_BNK.gather(2, chosen_BN[..., None])[..., 0], scores_BNK


@triton.jit
def _choose_kernel(
    unary, ids, gate, anchors, before, after, temperature, uniform, tokens, scores,
    greedy_below, N: tl.constexpr, K: tl.constexpr, KB: tl.constexpr, R: tl.constexpr,
    RB: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One sequence; only the rows of the score table that the walk comes to."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b, k, r = tl.program_id(0), tl.arange(0, KB), tl.arange(0, RB)
    warmth = tl.load(temperature + b).to(tl.float32)
    token = tl.load(anchors + b)
    inside_KR = (k < K)[:, None] & (r < R)[None, :]
    for j in tl.static_range(N):
        at = b * N + j
        id_K = tl.load(ids + at * K + k, mask=k < K, other=0)
        after_KR = tl.load(after + id_K[:, None] * R + r[None, :], mask=inside_KR, other=0.0)
        gate_R = tl.load(gate + at * R + r, mask=r < R, other=0.0).to(tl.float32)
        left_R = tl.load(before + token * R + r, mask=r < R, other=0.0).to(tl.float32) * gate_R
        score_K = tl.sum(left_R[None, :] * after_KR.to(tl.float32), axis=1)
        score_K += tl.load(unary + at * K + k, mask=k < K, other=0.0)
        tl.store(scores + at * K + k, score_K, mask=k < K)
        q_K = candidate_probs(score_K, k, K, warmth, greedy_below, 0).to(tl.float64)
        target = tl.load(uniform + at).to(tl.float64) * tl.sum(q_K, axis=0)
        token = tl.sum(tl.where(k == inverted(q_K, target)[0], id_K, 0), axis=0)
        tl.store(tokens + at, token)


def _launch_choose(
    unary_BNK: torch.Tensor,
    ids_BNK: torch.Tensor,
    gate_BNR: torch.Tensor,
    anchors_B: torch.Tensor,
    before_VR: torch.Tensor,
    after_VR: torch.Tensor,
    temperature_B: torch.Tensor,
    uniform_BN: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    (batch, drafts, count), rank = ids_BNK.shape, before_VR.shape[1]
    assert unary_BNK.dtype == torch.float32 and ids_BNK.dtype == anchors_B.dtype == torch.int64
    assert unary_BNK.shape == ids_BNK.shape and uniform_BN.shape == (batch, drafts)
    assert gate_BNR.shape == (batch, drafts, rank) and anchors_B.shape == (batch,)
    parts = (unary_BNK, ids_BNK, gate_BNR, anchors_B, before_VR, after_VR, uniform_BN)
    assert all(x.is_contiguous() for x in parts) and temperature_B.is_contiguous()
    tokens_BN = torch.empty(batch, drafts, dtype=torch.int64, device=ids_BNK.device)
    scores_BNK = torch.empty(ids_BNK.shape, dtype=torch.float32, device=ids_BNK.device)
    if batch:
        _choose_kernel[(batch,)](
            unary_BNK, ids_BNK, gate_BNR, anchors_B, before_VR, after_VR, temperature_B,
            uniform_BN, tokens_BN, scores_BNK, GREEDY_BELOW,
            N=drafts, K=count, KB=next_power_of_2(count), R=rank,
            RB=next_power_of_2(rank), num_warps=4, **pdl(unary_BNK),
        )  # fmt: skip
    return tokens_BN, scores_BNK


choose = op(reference=choose_reference, kernel=_launch_choose)
