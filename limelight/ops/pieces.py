"""Kernels with which sampling and verifying drafts begin: rows of logits, cut into pieces.

Of each piece of a row they make its best logit, where that is, and

    sum of exp((z - best) / temperature)

A row with cut-offs keeps the tokens v with z_v > cut, or z_v = cut and v <= last, as long as their
share of the best one's probability is at least min-p; the sums are then of those alone. `cut` is
found without sorting. How many logits are above a threshold, and with what weight in all, falls as
it rises, so the lowest one with

    fewer than top-k above it, and less weight than top-p of what top-k and min-p leave

is the last logit that is kept. Each pass over the row counts at three thresholds and leaves a
quarter of the interval; a piece whose best is below all of them is not read. It ends where one
logit is left in the interval, or equal ones.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from limelight.ops import cdiv, next_power_of_2, pdl

PIECE = 2048
# What a pass over a row takes at once: several pieces, added up in columns.
TILE_ROWS, TILE_COLUMNS = 8, 1024
LOG2E = tl.constexpr(1.4426950408889634)
# A weight exp(-104) is 0 in FP32; most of what cut-offs leave is within exp(-16) of the best.
NEAR, FAR = tl.constexpr(16.0), tl.constexpr(104.0)


@dataclass(frozen=True, slots=True)
class Cuts:
    """Cut-offs of a distribution by sequence; off: the vocabulary's size, 1 and 0."""

    top_k_B: torch.Tensor
    top_p_B: torch.Tensor
    min_p_B: torch.Tensor

    @property
    def arguments(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.top_k_B, self.top_p_B, self.min_p_B


@dataclass(frozen=True, slots=True)
class Pieces:
    """What the kernels make of R rows in P pieces; the last two only of rows with cut-offs."""

    best_RP: torch.Tensor  # FP32
    at_RP: torch.Tensor  # int32, counted from the row's first
    sum_RP: torch.Tensor  # FP64
    cut_R: torch.Tensor | None
    last_R: torch.Tensor | None

    @property
    def arguments(self) -> tuple[torch.Tensor | None, ...]:
        return self.best_RP, self.at_RP, self.sum_RP, self.cut_R, self.last_R


@triton.jit
def logits_at(logits, row, v_X, stride, V, cap):
    """Logits of a row, under their cap; -inf behind the end."""
    z_X = tl.load(logits + row.to(tl.int64) * stride + v_X, mask=v_X < V, other=float("-inf"))
    if cap is not None:
        shrunk_X = tl.exp(-2.0 * tl.abs(z_X / cap))
        tanh_X = (1.0 - shrunk_X) / (1.0 + shrunk_X)
        z_X = tl.where(v_X < V, tl.where(z_X < 0, -cap, cap) * tanh_X, float("-inf"))
    return z_X


@triton.jit
def picked(logits, rows, at, stride):
    """For kernels: logits whose row `at` is the one in `rows[at]`; and whether there is any."""
    there = at >= 0
    if rows is not None:
        row = tl.load(rows + at)
        there = row >= 0
        logits += (row - at) * stride
    return logits, there


@triton.jit
def best_of(z_V, axis: tl.constexpr):
    """The largest number, NaN if one is NaN, and its first index."""
    bad_V = z_V != z_V
    best, at = tl.max(tl.where(bad_V, float("-inf"), z_V), axis=axis, return_indices=True)
    return tl.where(tl.max(bad_V.to(tl.int32), axis=axis) > 0, float("nan"), best), at


@triton.jit
def weight_of(z_X, best, warmth):
    """exp((z - best) / temperature), FP32; 0 for what is ruled out."""
    return tl.where(z_X == float("-inf"), 0.0, tl.exp((z_X - best) / warmth))


@triton.jit
def kept(z_X, v_X, best, warmth, cut, last, least):
    """Whether cut-offs leave these logits; `least` is min-p, and `best` the row's."""
    inside_X = (z_X > cut) | ((z_X == cut) & (v_X <= last))
    return inside_X & (weight_of(z_X, best, warmth) >= least)


@triton.jit
def inverted(weight_V, target):
    """The first index whose cumulated weight passes the target, or else the last with a weight.

    Also the weight before it.
    """
    v = tl.arange(0, weight_V.shape[0])
    cumulated_V = tl.cumsum(weight_V, axis=0)
    passed = tl.sum((cumulated_V <= target).to(tl.int32), axis=0)
    chosen = tl.maximum(tl.minimum(passed, tl.max(tl.where(weight_V > 0, v, 0), axis=0)), 0)
    return chosen, tl.sum(tl.where(v < chosen, weight_V, 0.0), axis=0)


@triton.jit
def sequence_of(starts, row, sequences, SEQUENCES: tl.constexpr):
    """For kernels: the sequence of a packed row; as many as there are for a row behind the last."""
    sequence = row
    if starts is not None:
        b = tl.arange(0, SEQUENCES)
        end_B = tl.load(starts + 1 + b, mask=b < sequences, other=0)
        sequence = tl.sum(((b < sequences) & (end_B <= row)).to(tl.int32), axis=0)
    return sequence


@triton.jit
def _pieces_kernel(
    logits, rows, temperature, starts, piece_best, piece_at, piece_sum, stride, V, cap,
    greedy_below, sequences, PIECE: tl.constexpr, SEQUENCES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One piece of one row; a greedy row has no use for the sum."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, piece = tl.program_id(0), tl.program_id(1)
    b = sequence_of(starts, row, sequences, SEQUENCES)
    logits, there = picked(logits, rows, row, stride)
    if (b >= sequences) | ~there:
        return
    z_V = logits_at(logits, row, piece * PIECE + tl.arange(0, PIECE), stride, V, cap)
    best, at = best_of(z_V, 0)
    to = row * tl.num_programs(1) + piece
    tl.store(piece_best + to, best)
    tl.store(piece_at + to, piece * PIECE + at)
    if temperature is not None:
        warmth = tl.load(temperature + b).to(tl.float32)
        if warmth >= greedy_below:
            p_V = weight_of(z_V, best, warmth).to(tl.float64)
            tl.store(piece_sum + to, tl.sum(p_V, axis=0))


@triton.jit
def _above(
    logits, piece_best, row, low, middle, high, best, warmth, least, stride, V, cap, pieces,
    PIECE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """How many logits of a row are above each of three rising thresholds, and their weight."""
    AT_ONCE: tl.constexpr = ROWS * COLUMNS // PIECE
    v_RX = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    none_X = tl.zeros((COLUMNS,), tl.int32)
    n1_X, n2_X, n3_X = none_X, none_X, none_X
    nothing_X = tl.zeros((COLUMNS,), tl.float32)
    w1_X, w2_X, w3_X = nothing_X, nothing_X, nothing_X
    for first in range(0, pieces, AT_ONCE):
        p = first + tl.arange(0, AT_ONCE)
        best_P = tl.load(piece_best + row * pieces + p, mask=p < pieces, other=float("-inf"))
        if tl.max(best_P, axis=0) > low:
            z_RX = logits_at(logits, row, first * PIECE + v_RX, stride, V, cap)
            w_RX = tl.exp2((z_RX - best) * (LOG2E / warmth))
            w_RX = tl.where(w_RX >= least, w_RX, 0.0)
            n1_X += tl.sum((z_RX > low).to(tl.int32), axis=0)
            n2_X += tl.sum((z_RX > middle).to(tl.int32), axis=0)
            n3_X += tl.sum((z_RX > high).to(tl.int32), axis=0)
            w1_X += tl.sum(tl.where(z_RX > low, w_RX, 0.0), axis=0)
            w2_X += tl.sum(tl.where(z_RX > middle, w_RX, 0.0), axis=0)
            w3_X += tl.sum(tl.where(z_RX > high, w_RX, 0.0), axis=0)
    n1, n2, n3 = tl.sum(n1_X, axis=0), tl.sum(n2_X, axis=0), tl.sum(n3_X, axis=0)
    w1, w2 = tl.sum(w1_X.to(tl.float64), axis=0), tl.sum(w2_X.to(tl.float64), axis=0)
    return n1, n2, n3, w1, w2, tl.sum(w3_X.to(tl.float64), axis=0)


@triton.jit
def _pick(first, second, third, x1, x2, x3, other):
    """The x of the first condition that holds."""
    return tl.where(first, x1, tl.where(second, x2, tl.where(third, x3, other)))


@triton.jit
def _search(
    logits, piece_best, row, lo, n_lo, most, share, best, warmth, least, stride, V, cap, pieces,
    PIECE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The cut with fewer than `most` logits and less weight than `share` above it.

    `lo` is known to be below it, with `n_lo` logits above, or -inf. Returns that and their weight
    anew; the cut, and how many of the logits that equal it are left (none: all above it are), and
    the weight of what is left.
    """
    hi, n_hi = best, n_lo * 0
    w_lo, w_hi = n_hi.to(tl.float64), n_hi.to(tl.float64)
    limit = tl.where(least > 0, tl.minimum(0.001 - tl.log(tl.maximum(least, 1e-37)), FAR), FAR)
    reach = tl.minimum(NEAR, limit)
    going = hi > float("-inf")
    while going:
        known = lo > float("-inf")
        # Below the best also where its last place is worth more than the temperature.
        down = tl.maximum(reach * warmth, tl.abs(best) * 1e-6)
        bottom = tl.where(known, lo, best - down)
        width = hi - bottom
        low = bottom + tl.where(known, 0.25, 0.0) * width
        middle = bottom + tl.where(known, 0.5, 0.625) * width
        high = bottom + tl.where(known, 0.75, 0.875) * width
        n1, n2, n3, w1, w2, w3 = _above(
            logits, piece_best, row, low, middle, high, best, warmth, least, stride, V, cap, pieces,
            PIECE, ROWS, COLUMNS,
        )  # fmt: skip
        f1, f2, f3 = n1 < most, n2 < most, n3 < most
        f1, f2, f3 = f1 & (w1 < share), f2 & (w2 < share), f3 & (w3 < share)
        hi, n_hi = _pick(f1, f2, f3, low, middle, high, hi), _pick(f1, f2, f3, n1, n2, n3, n_hi)
        w_hi = _pick(f1, f2, f3, w1, w2, w3, w_hi)
        lo, n_lo = _pick(f1, f2, f3, lo, low, middle, high), _pick(f1, f2, f3, n_lo, n1, n2, n3)
        w_lo = _pick(f1, f2, f3, w_lo, w1, w2, w3)
        known = lo > float("-inf")
        half = lo + 0.5 * (hi - lo)
        # One logit is left between, or none fits between; or all there are stay.
        found = known & ((n_lo - n_hi <= 1) | ~((half > lo) & (half < hi)))
        going = ~(found | (~known & (reach >= limit)))
        reach = limit
    each = tl.exp2((hi - best) * (LOG2E / warmth)).to(tl.float64)
    room = tl.minimum((most - n_hi).to(tl.float64), tl.ceil((share - w_hi) / each))
    some = (lo > float("-inf")) & (room < n_lo - n_hi)
    cut, ties = tl.where(some, hi, lo), tl.where(some, room, 0.0).to(tl.int32)
    weight = tl.where(some, w_hi + room * each, tl.where(lo > float("-inf"), w_lo, w_hi))
    return lo, n_lo, cut, ties, weight


@triton.jit
def _keep(
    logits, piece_best, piece_sum, row, cut, ties, best, warmth, least, stride, V, cap, pieces,
    PIECE: tl.constexpr,
):  # fmt: skip
    """Sum the pieces anew over what is left; the index of the last that is left of equal logits."""
    last, seen = ties * 0 - 1, ties * 0
    for piece in range(0, pieces):
        piece_top = tl.load(piece_best + row * pieces + piece)
        total = warmth.to(tl.float64) * 0.0
        if piece_top >= cut:
            v = piece * PIECE + tl.arange(0, PIECE)
            z_V = logits_at(logits, row, v, stride, V, cap)
            if ties > 0:
                equal_V = (z_V == cut).to(tl.int32)
                within_V = (equal_V > 0) & (seen + tl.cumsum(equal_V, axis=0) <= ties)
                last = tl.maximum(last, tl.max(tl.where(within_V, v, -1), axis=0))
                seen += tl.sum(equal_V, axis=0)
            left_V = kept(z_V, v, best, warmth, cut, last, least)
            p_V = tl.where(left_V, weight_of(z_V, piece_top, warmth), 0.0)
            total = tl.sum(p_V.to(tl.float64), axis=0)
        tl.store(piece_sum + row * pieces + piece, total)
    return last


@triton.jit
def _cut_kernel(
    logits, rows, temperature, starts, top_k, top_p, min_p, piece_best, piece_sum, cut_R, last_R,
    stride, V, cap, greedy_below, sequences, pieces,
    PIECES: tl.constexpr, PIECE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    SEQUENCES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What cut-offs leave of one row."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    b = sequence_of(starts, row, sequences, SEQUENCES)
    logits, there = picked(logits, rows, row, stride)
    if (b >= sequences) | ~there:
        return
    warmth, share = tl.load(temperature + b).to(tl.float32), tl.load(top_p + b).to(tl.float32)
    most = tl.maximum(tl.minimum(tl.load(top_k + b).to(tl.float32), V), 1.0).to(tl.int32)
    most = tl.where(most < V, most, V + 1)
    least = tl.load(min_p + b).to(tl.float32)
    p = tl.arange(0, PIECES)
    best_P = tl.load(piece_best + row * pieces + p, mask=p < pieces, other=float("-inf"))
    best, _at = best_of(best_P, 0)
    tl.store(cut_R + row, float("-inf"))
    tl.store(last_R + row, V)
    some = (most < V) | (share < 1.0) | (least > 0.0)
    # Of a row with a NaN nothing is asked.
    if (warmth < greedy_below) | ~some | ~(best > float("-inf")):
        return
    sum_P = tl.load(piece_sum + row * pieces + p, mask=p < pieces, other=0.0)
    weight_P = tl.where(sum_P > 0, sum_P * tl.exp((best_P - best) / warmth).to(tl.float64), 0.0)
    weight = tl.sum(weight_P, axis=0)
    n_lo, ties = most * 0, most * 0
    lo = n_lo.to(tl.float32) - float("inf")
    cut = lo
    if (most < V) | (least > 0.0):
        lo, n_lo, cut, ties, weight = _search(
            logits, piece_best, row, lo, n_lo, most, n_lo.to(tl.float64) + float("inf"), best,
            warmth, least, stride, V, cap, pieces, PIECE, ROWS, COLUMNS,
        )  # fmt: skip
    if share < 1.0:
        # The best one stays, whatever its share.
        lo, n_lo, cut, ties, weight = _search(
            logits, piece_best, row, lo, n_lo, most, tl.maximum(share * weight, 1e-30), best,
            warmth, least, stride, V, cap, pieces, PIECE, ROWS, COLUMNS,
        )  # fmt: skip
    last = _keep(
        logits, piece_best, piece_sum, row, cut, ties, best, warmth, least, stride, V, cap, pieces,
        PIECE,
    )  # fmt: skip
    tl.store(cut_R + row, cut)
    tl.store(last_R + row, last)


def launch(
    logits_RV: torch.Tensor,
    temperature_B: torch.Tensor | None,
    *,
    greedy_below: float,
    cap: float | None = None,
    starts_B: torch.Tensor | None = None,
    cuts: Cuts | None = None,
    rows_R: torch.Tensor | None = None,
) -> Pieces:
    """The pieces of rows that are a sequence each, or packed from `starts_B` on.

    Without temperatures there are no sums. Rows behind the last sequence are not looked at. With
    `rows_R`, int64, row r is that one of the logits, or none: -1.
    """
    rows, vocabulary = logits_RV.shape
    if rows_R is not None:
        assert rows_R.dtype == torch.int64 and rows_R.is_contiguous()
        rows = len(rows_R)
    assert logits_RV.dtype == torch.float32 and logits_RV.stride(1) == 1 and vocabulary > 0
    sequences = rows if starts_B is None else len(starts_B) - 1
    bound, block = bounds_of(sequences, packed=starts_B is not None)
    per_B = (*(() if cuts is None else cuts.arguments), temperature_B)
    assert all(x is None or x.shape == (sequences,) and x.is_contiguous() for x in per_B)
    pieces, device = count_of(vocabulary), logits_RV.device
    best_RP, at_RP, sum_RP = (
        torch.empty(rows, pieces, dtype=dtype, device=device)
        for dtype in (torch.float32, torch.int32, torch.float64)
    )
    shape = (logits_RV.stride(0), vocabulary, cap, greedy_below, bound)
    known = {"SEQUENCES": block, "PIECE": PIECE}
    cut_R, last_R = None, None
    if cuts is not None:
        cut_R = torch.empty(rows, dtype=torch.float32, device=device)
        last_R = torch.empty(rows, dtype=torch.int32, device=device)
    if rows:
        _pieces_kernel[(rows, pieces)](
            logits_RV, rows_R, temperature_B, starts_B, best_RP, at_RP, sum_RP, *shape,
            num_warps=4, **known, **pdl(logits_RV),
        )  # fmt: skip
    if rows and cuts is not None:
        _cut_kernel[(rows,)](
            logits_RV, rows_R, temperature_B, starts_B, *cuts.arguments, best_RP, sum_RP, cut_R,
            last_R, *shape, pieces, PIECES=next_power_of_2(pieces), ROWS=TILE_ROWS,
            COLUMNS=TILE_COLUMNS, num_warps=8, **known, **pdl(logits_RV),
        )  # fmt: skip
    return Pieces(best_RP, at_RP, sum_RP, cut_R, last_R)


def count_of(vocabulary: int) -> int:
    """How many pieces a row has."""
    return cdiv(vocabulary, PIECE)


def bounds_of(sequences: int, *, packed: bool) -> tuple[int, int]:
    """For `sequence_of`: how many sequences there are, and a power of two that holds them. Rows
    that are one each need no bound, so that one compiled kernel does for any number."""
    return (sequences, next_power_of_2(max(sequences, 1))) if packed else (2**30, 1)
