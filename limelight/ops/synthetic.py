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
from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch
import triton
import triton.language as tl

from limelight.ops import cdiv, op, pdl
from limelight.ops.noise import EASE, PASS, number_of, uniform
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


def draw_odds_reference(
    seeds_B: torch.Tensor, first_B: torch.Tensor, intercepts_N: torch.Tensor, *, spread: float
) -> torch.Tensor:
    """z, FP32 [B, N] from -40 to 40, of passes whose first drafts are at `first_B`."""
    seeds_B1, first_B1 = seeds_B[:, None], first_B.long()[:, None]
    places_N = torch.arange(len(intercepts_N), device=seeds_B.device)
    pass_B1 = _normal(uniform(seeds_B1, first_B1, stream=PASS))
    draft_BN = _normal(uniform(seeds_B1, first_B1, stream=EASE + places_N))
    odds_BN = intercepts_N + spread * _mixed(pass_B1, draft_BN)
    return odds_BN.clamp(-MOST_ODDS, MOST_ODDS).float()


def _normal(uniform_X: torch.Tensor) -> torch.Tensor:
    return torch.special.ndtri(uniform_X + 2.0**-54)


# Wichura's AS 241 (1988), the inverse of the normal distribution: quotients of polynomials in the
# middle, in the tails and at their ends, each behind where its variable is counted from.
_WICHURA = [
    [0.180625, 0.0],
    [2509.0809287301226727, 33430.575583588128105, 67265.770927008700853, 45921.953931549871457,
     13731.693765509461125, 1971.5909503065514427, 133.14166789178437745, 3.387132872796366608],
    [5226.495278852854561, 28729.085735721942674, 39307.89580009271061, 21213.794301586595867,
     5394.1960214247511077, 687.1870074920579083, 42.313330701600911252, 1.0],
    [1.6, 0.0],
    [7.7454501427834140764e-4, 0.0227238449892691845833, 0.24178072517745061177,
     1.27045825245236838258, 3.64784832476320460504, 5.7694972214606914055,
     4.6303378461565452959, 1.42343711074968357734],
    [1.05075007164441684324e-9, 5.475938084995344946e-4, 0.0151986665636164571966,
     0.14810397642748007459, 0.68976733498510000455, 1.6763848301838038494,
     2.05319162663775882187, 1.0],
    [5.0, 0.0],
    [2.01033439929228813265e-7, 2.71155556874348757815e-5, 0.0012426609473880784386,
     0.026532189526576123093, 0.29656057182850489123, 1.7848265399172913358,
     5.4637849111641143699, 6.6579046435011037772],
    [2.04426310338993978564e-15, 1.4215117583164458887e-7, 1.8463183175100546818e-5,
     7.868691311456132591e-4, 0.0148753612908506148525, 0.13692988092273580531,
     0.59983220655588793769, 1.0],
]  # fmt: skip
ROOM = tl.constexpr(18)  # numbers of one of the three
_PASS, _EASE = tl.constexpr(PASS), tl.constexpr(EASE)


@lru_cache
def _numbers(spread: float, device: torch.device) -> torch.Tensor:
    """What a kernel needs in FP64, which it would round to FP32 in its code or its arguments."""
    shares = [spread * math.sqrt(PASS_SHARE), spread * math.sqrt(1 - PASS_SHARE)]
    return torch.tensor([*sum(_WICHURA, []), *shares], dtype=torch.float64, device=device)


@triton.jit
def _normal_of(uniform_X, numbers):
    """The normal number below which a share `uniform_X` + 2^-54 of all is, FP64."""
    p_X = uniform_X + 5.551115123125783e-17
    q_X = p_X - 0.5
    root_X = tl.sqrt(-tl.log(tl.maximum(tl.minimum(p_X, 1.0 - p_X), 1e-300)))
    part_X = tl.where(tl.abs(q_X) <= 0.425, 0, tl.where(root_X <= 5.0, 1, 2))
    at_X = numbers + part_X * ROOM
    from_X = tl.load(at_X)
    r_X = tl.where(part_X == 0, from_X - q_X * q_X, root_X - from_X)
    above_X, below_X = r_X * 0.0, r_X * 0.0
    for i in tl.static_range(8):
        above_X = above_X * r_X + tl.load(at_X + 2 + i)
        below_X = below_X * r_X + tl.load(at_X + 10 + i)
    x_X = above_X / below_X
    return tl.where(part_X == 0, q_X * x_X, tl.where(q_X < 0, -x_X, x_X))


@triton.jit
def _draw_odds_kernel(
    seeds, first, intercepts, numbers, odds, size, most,
    N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b, n, held = x // N, x % N, x < size
    seed_X = tl.load(seeds + b, mask=held, other=0)
    first_X = tl.load(first + b, mask=held, other=0).to(tl.int64)
    pass_X = _normal_of(number_of(seed_X, first_X, n * 0 + _PASS), numbers)
    draft_X = _normal_of(number_of(seed_X, first_X, n + _EASE), numbers)
    of_pass, of_draft = tl.load(numbers + 3 * ROOM), tl.load(numbers + 3 * ROOM + 1)
    z_X = tl.load(intercepts + n) + (of_pass * pass_X + of_draft * draft_X)
    z_X = tl.minimum(tl.maximum(z_X, -most), most)
    tl.store(odds + x, z_X.to(tl.float32), mask=held)


def _launch_draw_odds(
    seeds_B: torch.Tensor, first_B: torch.Tensor, intercepts_N: torch.Tensor, *, spread: float
) -> torch.Tensor:
    shape, device = (len(seeds_B), len(intercepts_N)), seeds_B.device
    assert seeds_B.dtype == torch.int64 and first_B.shape == seeds_B.shape
    assert intercepts_N.dtype == torch.float64 and intercepts_N.is_contiguous()
    assert seeds_B.is_contiguous() and first_B.is_contiguous()
    odds_BN = torch.empty(shape, dtype=torch.float32, device=device)
    if size := odds_BN.numel():
        _draw_odds_kernel[(cdiv(size, 32),)](
            seeds_B, first_B, intercepts_N, _numbers(spread, device), odds_BN, size, MOST_ODDS,
            N=shape[1], BLOCK=32, num_warps=1, **pdl(seeds_B),
        )  # fmt: skip
    return odds_BN


draw_odds = op(reference=draw_odds_reference, kernel=_launch_draw_odds)


class SyntheticOdds:
    """The log odds of N drafts at told rates."""

    def __init__(self, rates: Sequence[float], *, spread: float, device: torch.device):
        self.spread = spread
        self.intercepts_N = torch.tensor(
            intercepts(rates, spread), dtype=torch.float64, device=device
        )

    def __call__(self, seeds_B: torch.Tensor, first_B: torch.Tensor) -> torch.Tensor:
        """z, FP32 [B, N] from -40 to 40, of a pass whose first draft is at `first_B`."""
        return draw_odds(seeds_B, first_B, self.intercepts_N, spread=self.spread)
