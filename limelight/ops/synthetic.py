"""Drafts that stand at rates that are told, whatever the models say: for benchmarks of speed.

    z_n = a_n + spread * (sqrt(s) g + sqrt(1 - s) h_n)    log odds of draft n of a drafter's pass
    p_n = sigmoid(z_n)                                    its chance to stand if all before it do

g, one number a pass, and h, one a draft, are standard normal, drawn by hash of seed and position:
some passes are easy, as are some drafts within them, so that there is something to choose among.
The a_n are such that over all passes draft n and all before it stand at the rate that is told, and
s is PASS_SHARE. z replaces what the drafter says of its drafts, for what decides to learn from.
"""

import math
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch

from limelight.ops.noise import EASE, PASS, uniform
from limelight.ops.trim import MOST_ODDS

# With this spread z tells drafts that stand from those that do not about as well as a trained
# drafter's own scores do: an area under the ROC curve of 0.86 to 0.87 at 2.7 to 5.5 tokens a step,
# where 0.865 is published.
SPREAD = 2.0
# Of the variance, between passes: a drafter of beam-nano had 0.17 on code, 0.44 on words to sort,
# 0.21 on both at temperature 0.7.
PASS_SHARE = 0.25
Numbers = TypeVar("Numbers", np.ndarray, torch.Tensor)
NODES = 48  # of a normal distribution, as a sum
BISECTIONS = 60


def intercepts(rates: Sequence[float], spread: float) -> list[float]:
    """a_n for rates that do not rise, each of a draft and all before it; infinite at 0 and 1."""
    node_X, weight_X = np.polynomial.hermite_e.hermegauss(NODES)
    weight_X = weight_X / weight_X.sum()
    sway_XX = spread * _mixed(node_X[:, None], node_X)
    alive_X, before, found = weight_X, 1.0, []
    for rate in rates:
        place = _intercept(sway_XX, weight_X, alive_X, rate) if 0 < rate < before else math.inf
        found.append(-math.inf if rate == 0 else place)
        alive_X = alive_X * (_sigmoid(place + sway_XX) @ weight_X)
        before = rate
    return found


def _intercept(
    sway_XX: np.ndarray, weight_X: np.ndarray, alive_X: np.ndarray, rate: float
) -> float:
    """Where `alive_X`, the share of passes by ease that got so far, comes down to `rate`."""
    low, high = -2 * MOST_ODDS, 2 * MOST_ODDS
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        stands = float(alive_X @ (_sigmoid(middle + sway_XX) @ weight_X))
        low, high = (middle, high) if stands < rate else (low, middle)
    return (low + high) / 2


def _mixed(of_pass: Numbers, of_draft: Numbers) -> Numbers:
    return math.sqrt(PASS_SHARE) * of_pass + math.sqrt(1 - PASS_SHARE) * of_draft


def _sigmoid(x_X: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-np.clip(x_X, -700, 700)))


class SyntheticOdds:
    """The log odds of N drafts at told rates."""

    def __init__(self, rates: Sequence[float], *, spread: float, device: torch.device):
        self.spread = spread
        self.intercepts_N = torch.tensor(
            intercepts(rates, spread), dtype=torch.float64, device=device
        )
        self.places_N = torch.arange(len(rates), device=device)

    def __call__(self, seeds_B: torch.Tensor, first_B: torch.Tensor) -> torch.Tensor:
        """z, FP32 [B, N] from -40 to 40, of a pass whose first draft is at `first_B`."""
        seeds_B1, first_B1 = seeds_B[:, None], first_B.long()[:, None]
        pass_B1 = self._normal(uniform(seeds_B1, first_B1, stream=PASS))
        draft_BN = self._normal(uniform(seeds_B1, first_B1, stream=EASE + self.places_N))
        odds_BN = self.intercepts_N + self.spread * _mixed(pass_B1, draft_BN)
        return odds_BN.clamp(-MOST_ODDS, MOST_ODDS).float()

    @staticmethod
    def _normal(uniform_X: torch.Tensor) -> torch.Tensor:
        return torch.special.ndtri(uniform_X + 2.0**-54)
