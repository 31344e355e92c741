"""Many sequences at once over a vocabulary of three, drafted and verified until they are long."""

from dataclasses import dataclass, replace

import torch

from limelight.ops.noise import DRAFT, uniform
from limelight.ops.sample import invert
from limelight.ops.trim import log_odds, packed_starts, split, survival
from limelight.ops.verify import Proposals, Verified, draft_probs, packed_rows, verify_by

# Chi-square above which a thousandth of samples lies, by degrees of freedom.
CRITICAL = {2: 13.82, 6: 22.46, 8: 26.12, 10: 29.59}
# What follows each token, by the target and by the drafter; the last two rows begin.
TARGET = torch.tensor(
    [[0.5, 0.2, 0.3], [0.25, 0.7, 0.05], [0.3, 0.3, 0.4], [0.1, 0.6, 0.3], [0.1, 0.6, 0.3]]
)
DRAFTER = torch.tensor(
    [[0.3, 0.6, 0.1], [0.6, 0.3, 0.1], [0.05, 0.15, 0.8], [0.3, 0.3, 0.4], [0.8, 0.1, 0.1]]
)
BEGIN, BEGIN_BADLY = 3, 4


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Of counts against probabilities, along the last dimension and summed over the others."""
    expected = expected.double() * counts.sum(dim=-1, keepdim=True)
    return float(((counts - expected) ** 2 / expected).sum())


def counted(tokens: torch.Tensor, size: int) -> torch.Tensor:
    return torch.bincount(tokens, minlength=size).double()


@dataclass
class Walk:
    """How sequences are drafted: `sampled` or by the best, and trimmed to a share or not.

    One that `peeks` is verified only where its first draft is a 1.
    """

    temperature: float
    sampled: bool
    kept: float | None = None
    num_drafts: int = 3
    peeks: bool = False

    def drafts(
        self, last_B: torch.Tensor, seed_B: torch.Tensor, position_B: torch.Tensor
    ) -> tuple[torch.Tensor, Proposals]:
        """Left to right, as a drafter walks; candidates in an order of their own."""
        temperature_B = torch.full(last_B.shape, self.temperature)
        ids_K = torch.tensor([2, 0, 1])
        drafts, scores = [], []
        for j in range(self.num_drafts):
            scores_BK = DRAFTER.log()[last_B][:, ids_K] * self.temperature
            index_B = scores_BK.argmax(dim=-1)
            if self.sampled:
                number_B = uniform(seed_B, position_B + j, stream=DRAFT + j).float()
                index_B = invert(draft_probs(scores_BK, temperature_B), number_B)
            last_B = ids_K[index_B]
            drafts.append(last_B)
            scores.append(scores_BK)
        ids_BNK = ids_K.expand(len(last_B), self.num_drafts, 3)
        return torch.stack(drafts, dim=1), Proposals(ids_BNK, torch.stack(scores, dim=1))

    def step(
        self, last_B: torch.Tensor, seed_B: torch.Tensor, position_B: torch.Tensor
    ) -> Verified:
        drafts_BN, proposals = self.drafts(last_B, seed_B, position_B)
        temperature_B = torch.full(last_B.shape, self.temperature)
        kept_B = torch.full_like(last_B, self.num_drafts)
        if self.kept is not None:
            odds_BN = log_odds(proposals.scores_BNK, temperature_B)
            survival_BN = survival(odds_BN, torch.tensor(0.5), torch.tensor([-0.2] * 3))
            budget = int(self.kept * len(last_B) * self.num_drafts)
            kept_B = split(survival_BN, kept_B, budget)
        if self.peeks:
            kept_B = torch.where(drafts_BN[:, 0] == 1, kept_B, 0)
        starts_B = packed_starts(kept_B + 1)
        sequence_R, at_R = packed_rows(starts_B, int(starts_B[-1]))
        before_BQ = torch.cat([last_B[:, None], drafts_BN], dim=1)
        logits_RV = TARGET.log()[before_BQ[sequence_R, at_R]] * self.temperature
        return verify_by(
            proposals if self.sampled else None,
            logits_RV, starts_B, drafts_BN, temperature_B, seed_B, position_B, cuts=None,
        )  # fmt: skip

    def pairs(self, first: Verified, seed_B: torch.Tensor, position_B: torch.Tensor):
        """The first two tokens of each sequence, by a second step where the first gave one."""
        tokens_B2 = first.tokens_BQ[:, :2].clone()
        short = (first.accepted_B == 0).nonzero()[:, 0]
        second = replace(self, num_drafts=1, kept=None).step(
            tokens_B2[short, 0], seed_B[short], position_B[short] + 1
        )
        tokens_B2[short, 1] = second.tokens_BQ[:, 0]
        return tokens_B2
