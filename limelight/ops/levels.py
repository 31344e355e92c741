"""What cut-offs leave of rows of logits that lie divided among ranks: how many of each share.

    level(z) = 2^32 (best - z) / reach,   reach = 104 temperatures

Behind the reach a weight exp((z - best) / temperature) is 0 in FP32. Each rank counts its logits in
256 bins of levels, and adds up their weights; from all ranks' tallies every one finds the bin in
which the cut-offs end, and the next tally has the 256 bins of that one. After four a bin is one
level, whose logits count as equal: they are less than 3e-8 temperatures apart. Of equal ones the
first in the vocabulary are left.

Counts and weights are integers, so no order of adding and no number of ranks changes a sum. What is
left of a share are always its largest logits, so their number tells a rank all.

B is the bins, N here the ranks, S the tokens of a share.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from limelight.ops import cdiv, op, pdl
from limelight.ops.pieces import PIECE, Cuts, logits_at, weight_of

BITS, BINS = 8, 256
# Where the bins of each tally begin in a level of 32 bits.
SHIFTS = (24, 16, 8, 0)
LEVELS = 2.0**32
# A bin holds how many, and behind that the sum of their weights as shares of its first level's.
COUNTED = 44
ONE, WEIGHT = 1 << COUNTED, 2.0**25
MOST_TOKENS = 1 << 19
# In temperatures; more where the last place of the best logit is worth more than that.
REACH, LAST_PLACES = 104.0, 2.0**-20
UNBOUNDED = 2.0**40
_LEVELS, _COUNTED, _ONE, _WEIGHT = (tl.constexpr(x) for x in (LEVELS, COUNTED, ONE, WEIGHT))
_REACH, _LAST_PLACES, _UNBOUNDED = (tl.constexpr(x) for x in (REACH, LAST_PLACES, UNBOUNDED))


@dataclass(frozen=True, slots=True)
class Levels:
    """How the logits of each row become levels; all [R]."""

    best_R: torch.Tensor  # FP32, of all shares
    warmth_R: torch.Tensor  # FP32: temperatures above 0

    @property
    def reach_R(self) -> torch.Tensor:
        """FP64."""
        best_R = torch.where(self.best_R.isfinite(), self.best_R.double().abs(), 0.0)
        return torch.maximum(self.warmth_R.double() * REACH, best_R * LAST_PLACES)


@dataclass(frozen=True, slots=True)
class Window:
    """Where the cut-offs of each row end: in the bin from `level_R` on (int64). What each rank has
    above it: how many logits (int64), with what weight (FP64, the best one's is 1), [N, R]."""

    level_R: torch.Tensor
    above_NR: torch.Tensor
    weight_NR: torch.Tensor

    @classmethod
    def whole(cls, ranks: int, rows: int, device: torch.device) -> "Window":
        return cls(
            torch.zeros(rows, dtype=torch.int64, device=device),
            torch.zeros(ranks, rows, dtype=torch.int64, device=device),
            torch.zeros(ranks, rows, dtype=torch.float64, device=device),
        )


def tally_reference(
    logits_RS: torch.Tensor,
    levels: Levels,
    min_p_R: torch.Tensor,
    level_R: torch.Tensor,
    *,
    shift: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Of FP32 logits in the 256 bins of 2^`shift` levels around `level_R` counts and weights, int64
    [R, B], those below min-p without weight; in the first tally also how many are not, [R]."""
    best_R1, warmth_R1 = levels.best_R[:, None], levels.warmth_R[:, None]
    reach_R1 = levels.reach_R[:, None]
    place_RS = (best_R1.double() - logits_RS.double()) * (LEVELS / reach_R1)
    there_RS = (logits_RS > float("-inf")) & (place_RS < LEVELS)
    level_RS = torch.where(there_RS, place_RS, 0.0).long()
    bin_RS = level_RS >> shift
    inside_RS = there_RS & (bin_RS >> BITS == level_R[:, None] >> (shift + BITS))
    kept_RS = there_RS & (torch.exp((logits_RS - best_R1) / warmth_R1) >= min_p_R[:, None])
    rest_RS = (place_RS - (bin_RS << shift)) * (reach_R1 / LEVELS)
    share_RS = torch.exp(-(rest_RS.float() / warmth_R1)) * WEIGHT
    share_RS = torch.where(inside_RS & kept_RS, share_RS + 0.5, 0.0).long()
    found_RS = torch.where(inside_RS, ONE + share_RS, 0)
    tally_RB = torch.zeros(len(logits_RS), BINS, dtype=torch.int64, device=logits_RS.device)
    tally_RB.scatter_add_(1, bin_RS & (BINS - 1), found_RS)
    return tally_RB, kept_RS.sum(dim=1) if shift == SHIFTS[0] else None


@triton.jit
def _reach(best, warmth):
    size = tl.abs(best.to(tl.float64))
    size = tl.where(size < float("inf"), size, 0.0)
    return tl.maximum(warmth.to(tl.float64) * _REACH, size * _LAST_PLACES)


@triton.jit
def _tally_kernel(
    logits, best_R, warmth_R, min_p, level_R, tally, kept, stride, S,
    SHIFT: tl.constexpr, BITS: tl.constexpr, PIECE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One piece of one row."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, v = tl.program_id(0), tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    best, warmth = tl.load(best_R + row), tl.load(warmth_R + row)
    reach = _reach(best, warmth)
    z_V = logits_at(logits, row, v, stride, S, None)
    place_V = (best.to(tl.float64) - z_V.to(tl.float64)) * (_LEVELS / reach)
    there_V = (z_V > float("-inf")) & (place_V < _LEVELS)
    level_V = tl.where(there_V, place_V, 0.0).to(tl.int64)
    bin_V = level_V >> SHIFT
    inside_V = there_V & ((bin_V >> BITS) == (tl.load(level_R + row) >> (SHIFT + BITS)))
    kept_V = there_V & (weight_of(z_V, best, warmth) >= tl.load(min_p + row).to(tl.float32))
    rest_V = (place_V - (bin_V << SHIFT).to(tl.float64)) * (reach / _LEVELS)
    share_V = tl.exp(-(rest_V.to(tl.float32) / warmth)) * _WEIGHT
    share_V = tl.where(inside_V & kept_V, share_V + 0.5, 0.0).to(tl.int64)
    # Integers, so that the order of adding leaves no trace.
    at_V = tally + row * (1 << BITS) + (bin_V & ((1 << BITS) - 1))
    tl.atomic_add(at_V, share_V + _ONE, mask=inside_V, sem="relaxed")
    if kept is not None:
        tl.atomic_add(kept + row, tl.sum(kept_V.to(tl.int64), axis=0), sem="relaxed")


def _launch_tally(
    logits_RS: torch.Tensor,
    levels: Levels,
    min_p_R: torch.Tensor,
    level_R: torch.Tensor,
    *,
    shift: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    (rows, size), device = logits_RS.shape, logits_RS.device
    assert logits_RS.dtype == torch.float32 and logits_RS.stride(1) == 1
    per_R = (levels.best_R, levels.warmth_R, min_p_R, level_R)
    assert all(x_R.shape == (rows,) and x_R.is_contiguous() for x_R in per_R)
    tally_RB = torch.zeros(rows, BINS, dtype=torch.int64, device=device)
    kept_R = None
    if shift == SHIFTS[0]:
        kept_R = torch.zeros(rows, dtype=torch.int64, device=device)
    if rows:
        _tally_kernel[(rows, cdiv(size, PIECE))](
            logits_RS, *per_R, tally_RB, kept_R, logits_RS.stride(0), size,
            SHIFT=shift, BITS=BITS, PIECE=PIECE, num_warps=4, **pdl(logits_RS),
        )  # fmt: skip
    return tally_RB, kept_R


tally = op(reference=tally_reference, kernel=_launch_tally)


def narrow_reference(
    tally_NRB: torch.Tensor,
    window: Window,
    levels: Levels,
    top_k_R: torch.Tensor,
    most_weight_R: torch.Tensor,
    *,
    shift: int,
    last: bool,
) -> Window:
    """The bin in which the cut-offs end: the last one with fewer than top-k logits above it, and
    less than `most_weight_R` (FP64). Where it is the `last`, its logits count as equal, and those
    of them that are left as above it."""
    count_NRB, share_NRB = tally_NRB >> COUNTED, tally_NRB & (ONE - 1)
    b_B = torch.arange(BINS, device=tally_NRB.device)
    first_RB = window.level_R[:, None] + (b_B << shift)
    distance_RB = first_RB * (levels.reach_R / LEVELS)[:, None]
    each_RB = torch.exp(-(distance_RB / levels.warmth_R[:, None])) / WEIGHT
    weight_NRB = share_NRB * each_RB
    count_RB, weight_RB = count_NRB.sum(dim=0), share_NRB.sum(dim=0) * each_RB
    above_RB = window.above_NR.sum(dim=0)[:, None] + count_RB.cumsum(dim=1) - count_RB
    before_RB = weight_RB.cumsum(dim=1).roll(1, dims=1)
    before_RB[:, 0] = 0.0
    heavier_RB = window.weight_NR.sum(dim=0)[:, None] + before_RB
    room_RB = top_k_R.long().clamp(min=1)[:, None] - above_RB
    within_RB = (room_RB > 0) & (heavier_RB < most_weight_R[:, None])
    at_R1 = (within_RB.sum(dim=1, keepdim=True) - 1).clamp(min=0)
    larger_RB = b_B < at_R1
    above_NR = window.above_NR + (count_NRB * larger_RB).sum(dim=2)
    weight_NR = window.weight_NR + (weight_NRB * larger_RB).sum(dim=2)
    level_R = window.level_R + (at_R1[:, 0] << shift)
    if not last:
        return Window(level_R, above_NR, weight_NR)
    equal_NR = count_NRB.gather(2, at_R1.expand(len(count_NRB), -1, -1))[:, :, 0]
    equal_R = equal_NR.sum(dim=0)
    one_R = weight_RB.gather(1, at_R1)[:, 0] / equal_R
    left_R = most_weight_R - heavier_RB.gather(1, at_R1)[:, 0]
    # Nothing is weighed where there is none, or where all are below min-p.
    heavy_R = torch.where(one_R > 0, left_R / one_R, float("inf"))
    room_R = heavy_R.ceil().clamp(max=UNBOUNDED).long()
    room_R = torch.minimum(room_R, room_RB.gather(1, at_R1)[:, 0])
    before_NR = equal_NR.cumsum(dim=0) - equal_NR
    taken_NR = (room_R - before_NR).clamp(min=0).minimum(equal_NR)
    more_NR = torch.where(taken_NR > 0, taken_NR * one_R, 0.0)
    return Window(level_R, above_NR + taken_NR, weight_NR + more_NR)


@triton.jit(do_not_specialize=["rows"])
def _narrow_kernel(
    tally, level_R, above, weight, best_R, warmth_R, top_k, most_weight,
    level_to, above_to, weight_to, rows, RANKS: tl.constexpr, SHIFT: tl.constexpr,
    BITS: tl.constexpr, LAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, b = tl.program_id(0), tl.arange(0, 1 << BITS)
    warmth = tl.load(warmth_R + row).to(tl.float64)
    reach = _reach(tl.load(best_R + row), tl.load(warmth_R + row))
    level = tl.load(level_R + row)
    distance_B = (level + (b.to(tl.int64) << SHIFT)).to(tl.float64) * (reach / _LEVELS)
    each_B = tl.exp(-(distance_B / warmth)) / _WEIGHT
    # The fields of a sum are the sums of the fields.
    sum_B = tl.zeros((1 << BITS,), tl.int64)
    over, heavier = level * 0, warmth * 0.0
    for rank in range(RANKS):
        sum_B += tl.load(tally + ((rank * rows + row) << BITS) + b)
        over += tl.load(above + rank * rows + row)
        heavier += tl.load(weight + rank * rows + row)
    count_B, weight_B = sum_B >> _COUNTED, (sum_B & (_ONE - 1)).to(tl.float64) * each_B
    above_B = over + tl.cumsum(count_B, axis=0) - count_B
    most = tl.maximum(tl.load(top_k + row).to(tl.int64), 1)
    room_B = most - above_B
    cumulated_B = tl.cumsum(weight_B, axis=0)
    limit = tl.load(most_weight + row)
    # What is before a bin is what its predecessor ends with: a difference could be below zero.
    ends_B = (heavier + cumulated_B < limit) & (room_B - count_B > 0)
    at = tl.minimum(tl.sum(ends_B.to(tl.int32), axis=0), (1 << BITS) - 1)
    here_B = b == at
    equal = tl.sum(tl.where(here_B, count_B, 0), axis=0)
    one = tl.sum(tl.where(here_B, weight_B, 0.0), axis=0) / tl.maximum(equal, 1).to(tl.float64)
    before = heavier + tl.sum(tl.where(b == at - 1, cumulated_B, 0.0), axis=0)
    heavy = tl.where(one > 0, (limit - before) / tl.where(one > 0, one, 1.0), _UNBOUNDED)
    room = tl.ceil(tl.minimum(heavy, _UNBOUNDED)).to(tl.int64)
    room = tl.minimum(room, tl.sum(tl.where(here_B, room_B, 0), axis=0))
    for rank in range(RANKS):
        tally_B = tl.load(tally + ((rank * rows + row) << BITS) + b)
        count_B, weight_B = tally_B >> _COUNTED, (tally_B & (_ONE - 1)).to(tl.float64) * each_B
        to = rank * rows + row
        more = tl.load(above + to) + tl.sum(tl.where(b < at, count_B, 0), axis=0)
        total = tl.load(weight + to) + tl.sum(tl.where(b < at, weight_B, 0.0), axis=0)
        if LAST:
            own = tl.sum(tl.where(here_B, count_B, 0), axis=0)
            taken = tl.minimum(tl.maximum(room, 0), own)
            room -= own
            more += taken
            total += tl.where(taken > 0, taken.to(tl.float64) * one, 0.0)
        tl.store(above_to + to, more)
        tl.store(weight_to + to, total)
    tl.store(level_to + row, level + (at.to(tl.int64) << SHIFT))


def _launch_narrow(
    tally_NRB: torch.Tensor,
    window: Window,
    levels: Levels,
    top_k_R: torch.Tensor,
    most_weight_R: torch.Tensor,
    *,
    shift: int,
    last: bool,
) -> Window:
    ranks, rows, bins = tally_NRB.shape
    assert bins == BINS and tally_NRB.dtype == torch.int64 and tally_NRB.is_contiguous()
    assert most_weight_R.dtype == torch.float64
    own = (window.level_R, window.above_NR, window.weight_NR)
    per_R = (levels.best_R, levels.warmth_R, top_k_R, most_weight_R)
    assert all(x.is_contiguous() and x.shape[-1] == rows for x in (*own, *per_R))
    found = Window(*map(torch.empty_like, own))
    if rows:
        _narrow_kernel[(rows,)](
            tally_NRB, *own, *per_R, found.level_R, found.above_NR, found.weight_NR, rows,
            RANKS=ranks, SHIFT=shift, BITS=BITS, LAST=last, num_warps=4, **pdl(tally_NRB),
        )  # fmt: skip
    return found


narrow = op(reference=narrow_reference, kernel=_launch_narrow)


def is_settled(tally_NRB: torch.Tensor, window: Window, *, shift: int) -> bool:
    """Whether no row has more than one logit in the bin that was found; waits for the answer."""
    at_1R1 = (window.level_R >> shift & (BINS - 1))[None, :, None]
    found_NR1 = tally_NRB.gather(2, at_1R1.expand(len(tally_NRB), -1, -1))
    return bool(((found_NR1 >> COUNTED).sum(dim=0) <= 1).all())


def is_cut(cuts: Cuts, vocabulary: int) -> torch.Tensor:
    """Whether each row has any cut-off that leaves something out."""
    return (cuts.top_k_B < vocabulary) | (cuts.top_p_B < 1) | (cuts.min_p_B > 0)
