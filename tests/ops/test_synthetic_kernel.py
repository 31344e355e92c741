"""Odds that are told, and drafts that stand by them, against the references."""

import pytest
import torch
from ahead import Case, meta

from limelight.ops.pieces import PIECE
from limelight.ops.synthetic import SPREAD, draw_odds, intercepts
from limelight.ops.verify import NOTHING, verify_by_odds

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
RATES = [0.9, 0.7, 0.55, 0.4, 0.3, 0.0, 0.0]

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.parametrize("device", DEVICES),
]


def compile_cases() -> list[Case]:
    def integer(*shape, dtype=torch.int64):
        return meta(*shape, dtype=dtype)

    def draw(batch):
        first, told = integer(batch, dtype=torch.int32), meta(7, dtype=torch.float64)
        return draw_odds.kernel(integer(batch), first, told, spread=SPREAD)

    def judge(batch, slots):
        return verify_by_odds.kernel(
            meta(8 * batch, 150_144, dtype=torch.float32), integer(batch + 1, dtype=torch.int32),
            integer(slots, 7), meta(slots, 7, dtype=torch.float32), integer(batch),
            integer(batch, dtype=torch.int32), slots_B=integer(batch, dtype=torch.int32),
        )  # fmt: skip

    return [Case("draw", lambda: draw(9), decode=True), Case("judge", lambda: judge(9, 257))]


@pytest.mark.parametrize("spread", [0.0, SPREAD, 5.0])
def test_the_odds_are_those_of_the_reference(spread, device):
    generator = torch.Generator().manual_seed(0)
    seeds_B = torch.randint(-(2**62), 2**62, (301,), generator=generator).to(device)
    first_B = torch.randint(0, 5000, (301,), generator=generator, dtype=torch.int32).to(device)
    told_N = torch.tensor(intercepts(RATES, spread), dtype=torch.float64, device=device)
    mine_BN = draw_odds.kernel(seeds_B, first_B, told_N, spread=spread)
    theirs_BN = draw_odds.reference(seeds_B, first_B, told_N, spread=spread)
    assert theirs_BN[:, 0].std() >= 0.9 * spread
    torch.testing.assert_close(mine_BN, theirs_BN, rtol=2e-7, atol=2e-7)
    assert (mine_BN == theirs_BN).float().mean() > 0.99


@pytest.mark.parametrize("slotted", [False, True], ids=["packed", "of slots"])
@pytest.mark.parametrize("vocabulary", [97, 4 * PIECE + 3])
def test_drafts_stand_by_their_odds_as_in_the_reference(vocabulary, slotted, device):
    generator = torch.Generator().manual_seed(vocabulary)

    def integer(least, most, *size):
        return torch.randint(least, most, size, generator=generator).to(device)

    batch, drafts, count = 11, 7, 23
    rows_B = integer(0, drafts + 2, batch)
    starts_B = torch.nn.functional.pad(rows_B.cumsum(0), (1, 0)).int()
    logits_RV = torch.randn(int(starts_B[-1]) + 3, vocabulary, generator=generator).round()
    drafts_SN = integer(0, vocabulary, count, drafts)
    drafts_SN[::4, 2] = NOTHING
    odds_SN = 3 + torch.randn(count, drafts, generator=generator)
    slots_B = torch.randperm(count, generator=generator)[:batch].int().to(device)
    drafted = (drafts_SN, odds_SN.to(device))
    if not slotted:
        drafted, slots_B = tuple(x[slots_B.long()] for x in drafted), None
    arguments = (logits_RV.to(device), starts_B, *drafted, integer(0, 999, batch), rows_B * 31)
    mine, theirs = (
        form(*arguments, slots_B=slots_B)
        for form in (verify_by_odds.kernel, verify_by_odds.reference)
    )
    assert theirs.accepted_B.sum() > 0
    assert torch.equal(mine.accepted_B, theirs.accepted_B)
    assert torch.equal(mine.tokens_BQ, theirs.tokens_BQ)
    assert torch.equal(mine.best_B, theirs.best_B)
