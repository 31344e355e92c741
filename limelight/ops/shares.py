"""What ranks tell each other of rows of logits that lie divided among them, and what it says.

Each tells of its share of a row the best logit z, the token that has it, and the weight

    sum of exp((z_v - z) / temperature)

A share of the vocabulary is one interval of the cumulated probabilities, so from the weights all
know whose holds a number. N is the ranks, S the tokens of a share.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from limelight.ops import cdiv, next_power_of_2, op, pdl, pieces
from limelight.ops.pieces import Cuts, best_of
from limelight.ops.sample import GREEDY_BELOW

BLOCK_R = 32


@dataclass(frozen=True, slots=True)
class Known:
    """What all ranks know of R rows: the temperature, the best logit FP32, its token int64, and the
    weight of what is left of each share, in multiples of the best one's, FP64 [N, R]. Of its own
    share each knows what is left as cut-offs of it (none: all), where top-k 0 is nothing."""

    temperature_R: torch.Tensor
    best_R: torch.Tensor
    greedy_R: torch.Tensor
    weight_NR: torch.Tensor
    own: Cuts | None = None

    @property
    def total_R(self) -> torch.Tensor:
        return self.weight_NR.sum(dim=0)


def mass_reference(
    logits_RS: torch.Tensor, temperature_R: torch.Tensor, *, first: int
) -> torch.Tensor:
    """Of this share of FP32 logits, which begins with token `first`: FP64 [3, R]

        the largest logit, NaN if one is NaN; the first token that has it; the weight

    which is 0 without a finite logit. A temperature that counts as 0 is 1 here.
    """
    best_R, at_R = logits_RS.max(dim=-1)
    warmth_R1 = torch.where(temperature_R >= GREEDY_BELOW, temperature_R, 1.0)[:, None]
    weight_RS = torch.exp((logits_RS - best_R[:, None]) / warmth_R1)
    weight_R = weight_RS.double().sum(dim=-1)
    weight_R = torch.where(best_R == float("-inf"), 0.0, weight_R)
    return torch.stack((best_R.double(), (first + at_R).double(), weight_R))


@triton.jit(do_not_specialize=["first", "rows"])
def _mass_kernel(
    temperature, piece_best, piece_at, piece_sum, told, first, rows, pieces, greedy_below,
    PIECES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, p = tl.program_id(0), tl.arange(0, PIECES)
    held, at_P = p < pieces, row * pieces + p
    best_P = tl.load(piece_best + at_P, mask=held, other=float("-inf"))
    best, piece = best_of(best_P, 0)
    token = first + tl.load(piece_at + row * pieces + piece)
    warmth = tl.load(temperature + row).to(tl.float32)
    sum_P = tl.load(piece_sum + at_P, mask=held, other=0.0)
    scale_P = tl.exp((best_P - best) / warmth).to(tl.float64)
    # A piece without a finite logit has no weight.
    weight = tl.sum(tl.where(best_P > float("-inf"), sum_P * scale_P, 0.0), axis=0)
    tl.store(told + row, best.to(tl.float64))
    tl.store(told + rows + row, token.to(tl.float64))
    # A greedy row has no sums, and no use for them.
    tl.store(told + 2 * rows + row, tl.where(warmth >= greedy_below, weight, 0.0))


def _launch_mass(
    logits_RS: torch.Tensor, temperature_R: torch.Tensor, *, first: int
) -> torch.Tensor:
    made = pieces.launch(logits_RS, temperature_R, greedy_below=GREEDY_BELOW)
    rows, count = made.best_RP.shape
    told_3R = torch.empty(3, rows, dtype=torch.float64, device=logits_RS.device)
    if rows:
        _mass_kernel[(rows,)](
            temperature_R, made.best_RP, made.at_RP, made.sum_RP, told_3R, first, rows, count,
            GREEDY_BELOW, PIECES=next_power_of_2(count), num_warps=1, **pdl(logits_RS),
        )  # fmt: skip
    return told_3R


mass = op(reference=mass_reference, kernel=_launch_mass)


def meet_reference(told_N3R: torch.Tensor, temperature_R: torch.Tensor) -> Known:
    """What all ranks' `mass` says; equal logits lie in the order of the ranks."""
    best_NR, token_NR, weight_NR = told_N3R.unbind(1)
    top_R, rank_R = best_NR.max(dim=0)
    greedy_R = token_NR.gather(0, rank_R[None])[0].long()
    warmth_R = torch.where(temperature_R >= GREEDY_BELOW, temperature_R, 1.0).float()
    scale_NR = torch.exp((best_NR - top_R) / warmth_R)
    weight_NR = torch.where(weight_NR > 0, weight_NR * scale_NR, 0.0)
    return Known(temperature_R, top_R.float(), greedy_R, weight_NR)


@triton.jit(do_not_specialize=["rows"])
def _meet_kernel(
    told, temperature, best_R, greedy_R, weight_NR, rows, greedy_below,
    RANKS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = row < rows
    top = tl.load(told + row, mask=there, other=0.0)
    token = tl.load(told + rows + row, mask=there, other=0.0)
    for rank in range(1, RANKS):
        own = told + 3 * rank * rows + row
        best = tl.load(own, mask=there, other=0.0)
        # A number that is none is above all others.
        better = (best > top) | ((best != best) & (top == top))
        token = tl.where(better, tl.load(own + rows, mask=there, other=0.0), token)
        top = tl.where(better, best, top)
    tl.store(best_R + row, top.to(tl.float32), mask=there)
    tl.store(greedy_R + row, token.to(tl.int64), mask=there)
    warmth = tl.load(temperature + row, mask=there, other=1.0).to(tl.float32)
    warmth = tl.where(warmth >= greedy_below, warmth, 1.0).to(tl.float64)
    for rank in range(RANKS):
        own = told + 3 * rank * rows + row
        best = tl.load(own, mask=there, other=0.0)
        weight = tl.load(own + 2 * rows, mask=there, other=0.0)
        weight = tl.where(weight > 0, weight * tl.exp((best - top) / warmth), 0.0)
        tl.store(weight_NR + rank * rows + row, weight, mask=there)


def _launch_meet(told_N3R: torch.Tensor, temperature_R: torch.Tensor) -> Known:
    ranks, _, rows = told_N3R.shape
    device = told_N3R.device
    assert told_N3R.is_contiguous() and temperature_R.is_contiguous()
    best_R = torch.empty(rows, dtype=torch.float32, device=device)
    greedy_R = torch.empty(rows, dtype=torch.int64, device=device)
    weight_NR = torch.empty(ranks, rows, dtype=torch.float64, device=device)
    if rows:
        _meet_kernel[(cdiv(rows, BLOCK_R),)](
            told_N3R, temperature_R, best_R, greedy_R, weight_NR, rows, GREEDY_BELOW,
            RANKS=ranks, BLOCK=BLOCK_R, num_warps=1, **pdl(told_N3R),
        )  # fmt: skip
    return Known(temperature_R, best_R, greedy_R, weight_NR)


meet = op(reference=meet_reference, kernel=_launch_meet)


def holding_reference(
    weight_NR: torch.Tensor, number_R: torch.Tensor, *, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whose weights hold numbers of [0, 1], as shares of all, int64 [R]; and which number holds the
    token within this rank's, FP64 [R]."""
    cumulated_NR = weight_NR.cumsum(dim=0)
    target_R = number_R.double() * cumulated_NR[-1]
    # The first whose end is beyond the number, or else the last with a weight.
    ranks_N1 = torch.arange(len(weight_NR), device=weight_NR.device)[:, None]
    last_R = torch.where(weight_NR > 0, ranks_N1, 0).max(dim=0).values
    holder_R = torch.minimum((cumulated_NR <= target_R).sum(dim=0), last_R)
    before_NR = cumulated_NR.roll(1, dims=0)
    before_NR[0] = 0.0
    left_R = target_R - before_NR[rank]
    return holder_R, torch.nan_to_num(left_R / weight_NR[rank]).clamp(0.0, 1.0)


@triton.jit
def within(target, before, own):
    """For kernels: the number of [0, 1] that stands for the target within `own` behind `before`."""
    return tl.where(own > 0, tl.minimum(tl.maximum((target - before) / own, 0.0), 1.0), 0.0)


@triton.jit(do_not_specialize=["rows", "rank"])
def _holding_kernel(
    weight_NR, number_R, holder_R, within_R, rows, rank,
    RANKS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = row < rows
    total = tl.zeros((BLOCK,), tl.float64)
    for other in range(RANKS):
        total += tl.load(weight_NR + other * rows + row, mask=there, other=0.0)
    target = tl.load(number_R + row, mask=there, other=0.0).to(tl.float64) * total
    passed, last = tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.int64)
    before, own, sum_ = total * 0.0, total * 0.0, total * 0.0
    for other in range(RANKS):
        weight = tl.load(weight_NR + other * rows + row, mask=there, other=0.0)
        before = tl.where(rank == other, sum_, before)
        own = tl.where(rank == other, weight, own)
        sum_ += weight
        passed += (sum_ <= target).to(tl.int64)
        last = tl.where(weight > 0, other, last)
    tl.store(holder_R + row, tl.minimum(passed, last), mask=there)
    tl.store(within_R + row, within(target, before, own), mask=there)


def _launch_holding(
    weight_NR: torch.Tensor, number_R: torch.Tensor, *, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    (ranks, rows), device = weight_NR.shape, weight_NR.device
    assert weight_NR.is_contiguous() and number_R.is_contiguous()
    holder_R = torch.empty(rows, dtype=torch.int64, device=device)
    within_R = torch.empty(rows, dtype=torch.float64, device=device)
    if rows:
        _holding_kernel[(cdiv(rows, BLOCK_R),)](
            weight_NR, number_R, holder_R, within_R, rows, rank,
            RANKS=ranks, BLOCK=BLOCK_R, num_warps=1, **pdl(weight_NR),
        )  # fmt: skip
    return holder_R, within_R


holding = op(reference=holding_reference, kernel=_launch_holding)
