"""Drafts stand at the rates that were told, and their log odds say how likely each is to."""

import math

import pytest
import torch

from limelight.ops.synthetic import PASS_SHARE, SPREAD, SyntheticOdds, intercepts
from limelight.ops.verify import NOTHING, verify_by_odds

RATES = [0.82, 0.66, 0.53, 0.42, 0.34, 0.28, 0.22]
PASSES = 20_000


def make_odds(rates=RATES, spread=SPREAD, passes=PASSES):
    odds = SyntheticOdds(rates, spread=spread, device=torch.device("cpu"))
    return odds(torch.arange(passes), torch.full((passes,), 40, dtype=torch.int32))


def judged(odds_BN: torch.Tensor) -> torch.Tensor:
    """How many drafts of each pass stand, where the target would refuse every one."""
    passes, num_drafts = odds_BN.shape
    logits_RV = torch.zeros(passes * (num_drafts + 1), 3)
    logits_RV[:, 2] = 1.0
    starts_B = torch.arange(passes + 1) * (num_drafts + 1)
    drafts_BN = torch.ones(passes, num_drafts, dtype=torch.int64)
    position_B = torch.full((passes,), 40)
    verified = verify_by_odds(
        logits_RV, starts_B, drafts_BN, odds_BN, torch.arange(passes), position_B
    )
    at_Q = torch.arange(num_drafts + 1)
    expected_BQ = torch.where(at_Q < verified.accepted_B[:, None], 1, NOTHING)
    expected_BQ = torch.where(at_Q == verified.accepted_B[:, None], 2, expected_BQ)
    assert verified.tokens_BQ.equal(expected_BQ) and verified.best_B.eq(1.0).all()
    return verified.accepted_B


def near(rates: torch.Tensor, told: list[float]) -> bool:
    error_N = 4 * (torch.tensor(told) * (1 - torch.tensor(told)) / PASSES).sqrt()
    return bool(((rates - torch.tensor(told)).abs() <= error_N + 1e-6).all())


@pytest.mark.parametrize("spread", [0.0, SPREAD, 4.0], ids="spread{}".format)
@pytest.mark.parametrize(
    "told", [RATES, [1.0, 1.0, 0.5, 0.5, 0.0], [0.03], [1.0] * 15, [0.0] * 3], ids=str
)
def test_drafts_stand_at_the_rates_that_were_told(told, spread):
    accepted_B = judged(make_odds(told, spread))
    stood_N = (accepted_B[:, None] > torch.arange(len(told))).float().mean(dim=0)
    assert near(stood_N, told), stood_N


def test_the_odds_are_those_of_what_comes_of_the_drafts():
    odds_BN = make_odds()
    accepted_B = judged(odds_BN)[:, None]
    reached_BN = torch.arange(len(RATES)) <= accepted_B
    stood_BN = torch.arange(len(RATES)) < accepted_B
    for low, high in ((-9, -1), (-1, 0), (0, 1), (1, 2), (2, 3), (3, 5)):
        these_BN = reached_BN & (odds_BN >= low) & (odds_BN < high)
        chance_X, stood_X = torch.sigmoid(odds_BN[these_BN]), stood_BN[these_BN].float()
        error = 4 * (chance_X * (1 - chance_X)).sum().sqrt() / len(chance_X)
        assert abs(float(chance_X.mean() - stood_X.mean())) < error


def test_passes_differ_and_drafts_of_one_pass_differ_more():
    odds_BN = make_odds().double() - torch.tensor(intercepts(RATES, SPREAD))
    within = float(odds_BN.var(dim=1).mean())
    between = float(odds_BN.mean(dim=1).var()) - within / len(RATES)
    assert between == pytest.approx(SPREAD**2 * PASS_SHARE, rel=0.05)
    assert within == pytest.approx(SPREAD**2 * (1 - PASS_SHARE), rel=0.05)
    alike_BN = make_odds(spread=0.0, passes=5)
    assert alike_BN.eq(alike_BN[0]).all()


def test_odds_depend_on_seed_and_position_alone():
    odds = SyntheticOdds(RATES, spread=SPREAD, device=torch.device("cpu"))
    seeds_B, first_B = torch.tensor([3, 4, 3, 3]), torch.tensor([9, 9, 10, 9])
    odds_BN = odds(seeds_B, first_B)
    assert odds_BN[0].equal(odds_BN[3])
    assert not odds_BN[0].eq(odds_BN[1]).any() and not odds_BN[0].eq(odds_BN[2]).any()
    assert odds(seeds_B[2:3], first_B[2:3]).equal(odds_BN[2:3])


def test_scores_tell_drafts_apart_about_as_well_as_a_trained_drafter_does():
    """What `SPREAD` was chosen by: the area under the ROC curve at usual rates."""
    odds_BN = make_odds()
    accepted_B = judged(odds_BN)[:, None]
    reached_BN = torch.arange(len(RATES)) <= accepted_B
    odds_X = odds_BN[reached_BN]
    stood_X = (torch.arange(len(RATES)) < accepted_B)[reached_BN]
    rank_X = torch.empty(len(odds_X), dtype=torch.float64)
    rank_X[odds_X.argsort()] = torch.arange(len(odds_X), dtype=torch.float64)
    stood, fell = int(stood_X.sum()), int((~stood_X).sum())
    area = (float(rank_X[stood_X].sum()) - stood * (stood - 1) / 2) / (stood * fell)
    assert area == pytest.approx(0.865, abs=0.01)


def test_certain_places_have_no_finite_intercept():
    assert intercepts([1.0, 0.4, 0.4, 0.0], 0.0) == [
        math.inf, pytest.approx(math.log(0.4 / 0.6), abs=1e-9), math.inf, -math.inf,
    ]  # fmt: skip
