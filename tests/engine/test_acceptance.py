"""The chance of a draft becomes what it really is, from labels of all that was looked at."""

import numpy as np
import pytest

from limelight.engine.acceptance import INTERCEPT, SLOPE, Acceptance


def follow(acceptance: Acceptance, slope, intercepts, *, steps, batch, seed=0, trim=False):
    """Steps of drafts that are accepted with the given parameters' chance."""
    rng = np.random.default_rng(seed)
    intercepts = np.asarray(intercepts)
    for _ in range(steps):
        odds_BN = rng.normal(1.0, 2.0, (batch, len(intercepts)))
        chance_BN = 1 / (1 + np.exp(-(slope * odds_BN + intercepts)))
        stands_BN = rng.random(odds_BN.shape) < chance_BN
        verified_B = np.full(batch, len(intercepts))
        if trim:
            verified_B = (acceptance.survival(odds_BN) > 0.3).sum(axis=1)
        accepted_B = np.minimum(stands_BN.cumprod(axis=1).sum(axis=1), verified_B)
        acceptance.observe(odds_BN, verified_B.tolist(), accepted_B.tolist())


@pytest.mark.parametrize("trim", [False, True], ids=["whole", "trimmed"])
@pytest.mark.parametrize("truth", [(0.9, [0.4, 0.1, -0.3, -0.8]), (0.15, [1.5, 1.0, 0.5, 0.3])])
def test_rates_converge_to_the_true_ones(truth, trim):
    slope, intercepts = truth
    acceptance = Acceptance(4)
    follow(acceptance, slope, intercepts, steps=600, batch=32, trim=trim)
    assert acceptance.slope == pytest.approx(slope, abs=0.12)
    odds_XN = np.tile(np.linspace(-2, 4, 13)[:, None], 4)
    got = acceptance.survival(odds_XN)[:, 0], acceptance.survival(odds_XN)[:, :2].min(axis=1)
    p = 1 / (1 + np.exp(-(slope * odds_XN + np.asarray(intercepts))))
    assert np.abs(got[0] - p[:, 0]).max() < 0.06
    assert np.abs(got[1] - p[:, 0] * p[:, 1]).max() < 0.07


def test_a_change_of_the_workload_is_followed():
    acceptance = Acceptance(3)
    follow(acceptance, 0.9, [1.0, 0.8, 0.6], steps=300, batch=16)
    follow(acceptance, 0.9, [-1.0, -1.2, -1.5], steps=900, batch=16, seed=1)
    assert acceptance.intercepts_N[0] == pytest.approx(-1.0, abs=0.3)


def test_the_same_labels_give_the_same_numbers():
    one, two = Acceptance(5), Acceptance(5)
    for acceptance in (one, two):
        follow(acceptance, 0.7, [0.1] * 5, steps=90, batch=7)
    assert one.slope == two.slope and (one.intercepts_N == two.intercepts_N).all()
    assert one.slope != SLOPE and (one.intercepts_N != INTERCEPT).all()


def test_what_was_not_looked_at_teaches_nothing():
    """Behind a refusal, behind the trimmed end, and where the odds are not a number."""
    one, two = Acceptance(4), Acceptance(4)
    odds_BN = np.array([[1.0, 2.0, 3.0, 4.0], [0.5, 0.4, 0.3, 0.2]])
    one.observe(odds_BN, [4, 2], [1, 2])
    odds_BN[0, 2:], odds_BN[1, 2:] = -30, np.nan
    two.observe(odds_BN, [2, 2], [1, 2])
    for acceptance in (one, two):
        acceptance.fit()
    assert one.slope == two.slope and (one.intercepts_N == two.intercepts_N).all()
    # The fourth place has no label; it follows the slope alone.
    assert one.intercepts_N[3] == INTERCEPT


def test_no_labels_make_the_slope_negative_or_a_parameter_infinite():
    acceptance = Acceptance(2)
    rng = np.random.default_rng(0)
    for _ in range(400):
        odds_BN = rng.normal(0, 20, (16, 2))
        accepted = (odds_BN < 0).cumprod(axis=1).sum(axis=1)
        acceptance.observe(odds_BN, [2] * 16, accepted.tolist())
    assert acceptance.slope >= 0 and np.isfinite(acceptance.intercepts_N).all()
    survival = acceptance.survival(np.array([[np.nan, 40.0], [40.0, -40.0], [40.0, np.nan]]))
    assert (survival[0] == 0).all() and survival[2, 1] == 0
    assert (np.diff(survival, axis=-1) <= 0).all()
