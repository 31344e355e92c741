"""What became of drafts, and how likely they are to be accepted by that. NumPy, no torch.

    p = sigmoid(slope * f + intercept_n)    S_n = p_0 * ... * p_n

f is the log odds of the distribution that draft n was drawn from (`ops/trim.py`). One slope and an
intercept for each place in the block are fitted to what was accepted by Newton steps of the
logistic likelihood, each of the newest labels' gradient over a curvature that forgets slowly.
"""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from limelight.stats import SpeculationStats

# Typical of drafters before anything is known of this one.
SLOPE, INTERCEPT = 0.5, -0.2
# What is typical counts as so many labels of each place, of log odds of about 2.
PRIOR = 20 * 0.2
PRIOR_SQUARE = 4.0
RIDGE = 1e-3
# A Newton step is due after so many steps of the engine or labels, whichever comes first.
STEPS, LABELS = 25, 64
MEMORY = 3000  # labels after which an e-th of the curvature is left
MOST_MOVE = 2.0  # of a parameter at once, beyond which the likelihood is no parabola


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-np.minimum(np.maximum(x, -60), 60)))


class Counts:
    """What became of drafts since the start."""

    def __init__(self, num_drafts: int):
        self.num_drafts = num_drafts
        self.steps = self.drafted = self.offered = self.verified = self.accepted = 0
        # Verifications of a sequence by how many of its drafts were verified, and how many stood.
        self.verified_of: Counter[int] = Counter()
        self.accepted_of: Counter[int] = Counter()

    def settled(self, verified: Sequence[int], accepted: Sequence[int]) -> None:
        """Of sequences with drafts, how many were verified and how many stood."""
        self.verified_of.update(verified)
        self.accepted_of.update(accepted)
        self.steps += len(verified) - verified.count(0)
        self.verified += sum(verified)
        self.accepted += sum(accepted)

    def stats(self) -> SpeculationStats:
        return SpeculationStats(
            steps=self.steps,
            drafted=self.drafted,
            offered=self.offered,
            verified=self.verified,
            accepted=self.accepted,
            verified_at=self._at(self.verified_of),
            accepted_at=self._at(self.accepted_of),
        )

    def _at(self, each: Counter[int]) -> list[int]:
        """Drafts by place: all who have more than so many have one there."""
        at, above = [0] * self.num_drafts, 0
        for place in reversed(range(self.num_drafts)):
            above += each[place + 1]
            at[place] = above
        return at


class Acceptance:
    """The chance of each draft, and how it is learned; the same labels give the same numbers."""

    def __init__(self, num_drafts: int):
        self.slope, self.intercepts_N = SLOPE, np.full(num_drafts, INTERCEPT)
        self.places_N = np.arange(num_drafts)
        self.curve_slope = PRIOR * PRIOR_SQUARE
        self.curve_cross_N = np.zeros(num_drafts)
        self.curve_N = np.full(num_drafts, PRIOR)
        self.total = 0  # labels since the start
        self._clear()

    def _clear(self) -> None:
        self.steps = self.labels = 0
        self.pull_slope, self.pull_N = 0.0, np.zeros(len(self.places_N))

    def survival(self, odds_XN: np.ndarray) -> np.ndarray:
        """S of drafts with these log odds, [..., N]; 0 from the first that is not a number on."""
        p_XN = _sigmoid(self.slope * odds_XN + self.intercepts_N)
        p_XN[p_XN != p_XN] = 0.0
        return p_XN.cumprod(axis=-1)

    def observe(
        self,
        odds_BN: np.ndarray,
        verified: Sequence[int],
        accepted: Sequence[int],
        *,
        steps: int = 1,
    ) -> None:
        """What became of the drafts of some steps: of each sequence's first `verified`, `accepted`
        stood.

        A draft behind one that was refused has no label.
        """
        verified_B1, accepted_B1 = np.asarray(verified)[:, None], np.asarray(accepted)[:, None]
        seen_BN = (self.places_N < verified_B1) & (self.places_N <= accepted_B1)
        seen_BN &= np.isfinite(odds_BN)
        odds_BN = np.where(seen_BN, odds_BN, 0.0)
        p_BN = _sigmoid(self.slope * odds_BN + self.intercepts_N)
        error_BN = np.where(seen_BN, (self.places_N < accepted_B1) - p_BN, 0.0)
        weight_BN = np.where(seen_BN, p_BN * (1 - p_BN), 0.0)
        self.curve_slope += float((weight_BN * odds_BN**2).sum())
        self.curve_cross_N += (weight_BN * odds_BN).sum(axis=0)
        self.curve_N += weight_BN.sum(axis=0)
        self.pull_slope += float((error_BN * odds_BN).sum())
        self.pull_N += error_BN.sum(axis=0)
        labels = int(seen_BN.sum())
        self.steps += steps
        self.labels += labels
        self.total += labels
        if self.steps >= STEPS or self.labels >= LABELS:
            self.fit()

    def fit(self) -> None:
        """One Newton step; the curvature is an arrow, so the slope is solved for by itself."""
        curve_N = self.curve_N + RIDGE
        cross_N = self.curve_cross_N
        below = self.curve_slope + RIDGE - float((cross_N**2 / curve_N).sum())
        slope = (self.pull_slope - float((cross_N * self.pull_N / curve_N).sum())) / below
        # More confident drafts are not accepted less often.
        if not np.isfinite(slope) or below <= 0 or self.slope + slope < 0:
            slope = 0.0
        slope = float(np.clip(slope, -MOST_MOVE, MOST_MOVE))
        moves_N = np.nan_to_num((self.pull_N - cross_N * slope) / curve_N)
        self.slope += slope
        self.intercepts_N = self.intercepts_N + moves_N.clip(-MOST_MOVE, MOST_MOVE)
        left = math.exp(-self.labels / MEMORY)
        self.curve_slope *= left
        self.curve_cross_N = cross_N * left
        self.curve_N = self.curve_N * left
        self._clear()
