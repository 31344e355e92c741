"""Drafts judged from shares of the vocabulary: kernels against the rule for all logits."""

import pytest
import torch
from ahead import Case, meta

from limelight.ops.judge_shares import Offers, chances, conclude
from limelight.ops.pieces import PIECE, Cuts
from limelight.ops.sample import GREEDY_BELOW
from limelight.ops.shares import Known
from limelight.ops.verify import (
    NOTHING,
    Proposals,
    each_row,
    verify,
    verify_by_odds,
    verify_greedy,
    verify_tokens,
    verify_tokens_by_odds,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BATCH, DRAFTS, CANDIDATES, RANKS = 7, 3, 5, 3

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.parametrize("device", DEVICES),
]


def compile_cases() -> list[Case]:
    def numbers(*shape, dtype=torch.float32):
        return meta(*shape, dtype=dtype)

    batch, drafts, rows, integer, wide = 4, 7, 32, torch.int64, torch.float64
    starts_B, drafts_BN = (
        numbers(batch + 1, dtype=torch.int32),
        numbers(batch, drafts, dtype=integer),
    )
    places = (numbers(batch, dtype=integer), numbers(batch, dtype=integer))
    cuts = Cuts(numbers(batch), numbers(batch), numbers(batch))
    best = (numbers(rows, dtype=integer), numbers(rows))
    options = {"vocabulary": 150_144, "slots_B": numbers(batch, dtype=torch.int32)}

    def offers():
        proposals = Proposals(numbers(batch, drafts, 20, dtype=integer), numbers(batch, drafts, 20))
        slots_B = numbers(batch, dtype=torch.int32)
        return Offers(starts_B, drafts_BN, numbers(batch), *places, proposals, slots_B)

    def judged(cut):
        own = Cuts(numbers(rows, dtype=torch.int32), numbers(rows), numbers(rows)) if cut else None
        known = Known(numbers(rows), numbers(rows), best[0], numbers(2, rows, dtype=wide), own)
        logits, at = numbers(rows, 75_072), {"first": 75_072, "vocabulary": 150_144}
        _, made = chances.kernel(logits, offers(), known, **at)
        told = numbers(2, 2, batch, drafts, dtype=wide)
        conclude.kernel(logits, offers(), known, told, made, rank=1, **at)

    return [
        Case("each row", lambda: each_row.kernel(
            starts_B, numbers(batch), *places, cuts=cuts, rows=rows), decode=True),
        Case("tokens", lambda: verify_tokens.kernel(
            *best, starts_B, drafts_BN, **options), decode=True),
        Case("tokens by odds", lambda: verify_tokens_by_odds.kernel(
            *best, starts_B, drafts_BN, numbers(batch, drafts), *places, **options), decode=True),
        Case("shares", lambda: judged(False)),
        Case("shares cut", lambda: judged(True)),
    ]  # fmt: skip


class Steps:
    """Drafts of which some are good, a greedy sequence, and one without rows."""

    def __init__(self, vocabulary: int, device: str, seed: int):
        generator = torch.Generator().manual_seed(seed)
        counts_B = torch.tensor([4, 1, 2, 4, 0, 3, 4])
        self.starts_B = torch.nn.functional.pad(counts_B.cumsum(0), (1, 0)).int()
        rows, shape = int(self.starts_B[-1]) + 1, (BATCH, DRAFTS)
        logits_RV = 2 * torch.randn(rows, vocabulary, generator=generator)
        ids_BNK = torch.stack(
            [torch.randperm(vocabulary, generator=generator)[:CANDIDATES] for _ in range(21)]
        ).view(*shape, CANDIDATES)
        self.drafts_BN = ids_BNK[..., 1].clone()
        self.drafts_BN[6, 2] = NOTHING
        for b in range(BATCH):
            for j in range(int(counts_B[b]) - 1):
                row, draft = int(self.starts_B[b]) + j, int(self.drafts_BN[b, j])
                logits_RV[row, draft] = logits_RV[row].max() + 0.5 * (j != 2)
        logits_RV[-2, : vocabulary // 2] = float("-inf")
        scores_BNK = torch.randn(ids_BNK.shape, generator=generator)
        self.temperature_B = torch.tensor([0.8, 1.0, 1.3, 0.5, 1.0, 0.0, 1.0])
        self.seed_B, self.position_B = torch.arange(BATCH) + 31 * seed, torch.arange(BATCH) * 9
        self.odds_BN = torch.randn(shape, generator=generator)
        self.logits_RV, self.vocabulary = logits_RV, vocabulary
        self.proposals = Proposals(ids_BNK.to(device), scores_BNK.to(device))
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                setattr(self, name, value.to(device))

    @property
    def asked(self) -> tuple[torch.Tensor, ...]:
        drafts = (self.starts_B, self.drafts_BN)
        return (*drafts, self.temperature_B, self.seed_B, self.position_B)

    def known(self, most: int | None) -> list[tuple[torch.Tensor, Known, int]]:
        """Each rank's logits, what it knows, and its first token; with the `most` likeliest left
        that do not lie in the last share."""
        size = -(-self.vocabulary // RANKS)
        padding = (0, size * RANKS - self.vocabulary)
        padded_RV = torch.nn.functional.pad(self.logits_RV, padding, value=float("-inf"))
        temperature_R, _, _ = each_row.reference(
            self.starts_B, self.temperature_B, self.seed_B, self.position_B,
            cuts=None, rows=len(padded_RV),
        )  # fmt: skip
        warmth_R1 = torch.where(temperature_R >= GREEDY_BELOW, temperature_R, 1.0)[:, None]
        best_R, greedy_R = self.logits_RV.max(dim=1)
        weight_RV = ((padded_RV - best_R[:, None]) / warmth_R1).exp().double()
        counts_R = None
        parts = []
        left_RV = torch.ones_like(padded_RV, dtype=torch.bool)
        if most is not None:
            order_RV = padded_RV.argsort(dim=1, descending=True, stable=True)
            left_RV = torch.zeros_like(left_RV).scatter(1, order_RV[:, :most], True)
        weight_NR = torch.stack([
            (weight_RV * left_RV)[:, rank * size :][:, :size].sum(1) for rank in range(RANKS)
        ])  # fmt: skip
        for rank in range(RANKS):
            at, own = slice(rank * size, (rank + 1) * size), None
            if most is not None:
                counts_R = left_RV[:, at].sum(dim=1).int()
                own = Cuts(counts_R, torch.ones_like(best_R), torch.zeros_like(best_R))
            known = Known(temperature_R, best_R, greedy_R, weight_NR, own)
            parts.append((padded_RV[:, at].contiguous(), known, rank * size))
        return parts


@pytest.mark.parametrize(
    ("vocabulary", "most"), [(11, 4), (3 * PIECE + 40, 4), (3 * PIECE + 40, None)]
)
def test_what_shares_add_up_to_is_the_rule_for_all_logits(vocabulary, most, device):
    steps = Steps(vocabulary, device, 1)
    offers = Offers(*steps.asked, steps.proposals)
    cuts = None
    if most is not None:
        one_B = torch.ones(BATCH, device=device)
        cuts = Cuts(one_B * most, one_B, one_B * 0)
    expected = verify.reference(steps.logits_RV, *steps.asked, proposals=steps.proposals, cuts=cuts)
    ranks = steps.known(most)
    told, made = [], []
    for own_RS, known, first in ranks:
        at = {"first": first, "vocabulary": vocabulary}
        mine_2BN, pieces = chances.kernel(own_RS, offers, known, **at)
        theirs_2BN, _ = chances.reference(own_RS, offers, known, **at)
        drawn_B = steps.temperature_B > 0
        judged_BN = torch.arange(DRAFTS, device=device) < steps.starts_B.diff()[:, None] - 1
        judged_BN &= drawn_B[:, None]
        torch.testing.assert_close(
            mine_2BN[:, judged_BN], theirs_2BN[:, judged_BN], rtol=1e-5, atol=1e-7
        )
        told.append(mine_2BN)
        made.append(pieces)
    told_M2BN, sums = torch.stack(told), {"kernel": 0, "reference": 0}
    for rank, (own_RS, known, first) in enumerate(ranks):
        at = {"rank": rank, "first": first, "vocabulary": vocabulary}
        for form in sums:
            found, own_B = getattr(conclude, form)(
                own_RS, offers, known, told_M2BN, made[rank], **at
            )
            sums[form] = sums[form] + own_B
            assert torch.equal(found.accepted_B, expected.accepted_B)
            assert torch.equal(found.best_B, expected.best_B)
            tokens_BQ = found.tokens_BQ.scatter(1, found.accepted_B[:, None], NOTHING)
            theirs_BQ = expected.tokens_BQ.scatter(1, found.accepted_B[:, None], NOTHING)
            assert torch.equal(tokens_BQ, theirs_BQ)
    last_B = expected.tokens_BQ.gather(1, expected.accepted_B[:, None])[:, 0]
    assert torch.equal(sums["kernel"], last_B) and torch.equal(sums["reference"], last_B)


def test_rows_have_their_sequences_settings_and_numbers_of_their_own(device):
    steps = Steps(11, device, 0)
    cuts = Cuts(torch.arange(BATCH, device=device), steps.temperature_B + 1, steps.temperature_B)
    given = (steps.starts_B, steps.temperature_B, steps.seed_B, steps.position_B)
    for own in (None, cuts):
        found, expected = (
            form(*given, cuts=own, rows=20) for form in (each_row.kernel, each_row.reference)
        )
        assert all(map(torch.equal, found[:2], expected[:2]))
        assert (found[2] is None) == (own is None)
        if found[2] is not None and expected[2] is not None:
            assert all(map(torch.equal, found[2].arguments, expected[2].arguments))


def test_drafts_stand_by_the_tokens_and_odds_that_are_known_as_by_logits(device):
    for seed in range(3):
        steps = Steps(PIECE + 3, device, seed)
        best_R, token_R = steps.logits_RV.max(dim=1)
        rows, options = (
            (token_R, best_R, steps.starts_B, steps.drafts_BN),
            {"vocabulary": steps.vocabulary},
        )
        slots_B = torch.randperm(BATCH, device=device).int()
        for slots in ({}, {"slots_B": slots_B}):
            greedy = verify_greedy.reference(
                steps.logits_RV, steps.starts_B, steps.drafts_BN, **slots
            )
            places = (steps.odds_BN, steps.seed_B, steps.position_B)
            by_odds = verify_by_odds.reference(
                steps.logits_RV, steps.starts_B, steps.drafts_BN, *places, **slots
            )
            for form in ("kernel", "reference"):
                found = getattr(verify_tokens, form)(*rows, **options, **slots)
                assert all(torch.equal(getattr(found, n), getattr(greedy, n)) for n in NAMES)
                found = getattr(verify_tokens_by_odds, form)(*rows, *places, **options, **slots)
                assert all(torch.equal(getattr(found, n), getattr(by_odds, n)) for n in NAMES)


NAMES = ("accepted_B", "tokens_BQ", "best_B")
