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

from limelight.ops.sample import invert
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
